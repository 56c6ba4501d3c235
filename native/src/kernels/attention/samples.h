// The gradients of samples alone: of all inputs but value.
#pragma once

#include "kernels/attention/worker.h"

namespace mxd::MXD_ISA {
namespace {

// Items: QueryBlocks.
template <class V, class T, class Rule> class SampleGradients : QueryWorker<V, T, Rule> {
    typedef QueryWorker<V, T, Rule> Base;

  public:
    typedef V Row;
    SampleGradients(const Job &j, Arena &arena)
        : Base(j, arena), job(j), blocks(j.call, j.packed_value != nullptr), samples(j, arena) {}

    void operator()(int64_t item) {
        const int64_t b = blocks.batch(item), h = blocks.head(item);
        const OutputGradient<T> grad_output(this->call, b, h, this->row);
        this->find_value(job, b, h);
        this->reader.open(b, h);
        samples.open(b, h);
        this->queries(
            blocks.begin(item), blocks.end(item), [](T *, int64_t, const auto &) {},
            [&](int64_t q, const auto &prepared, const auto &next) {
                const T *g = grad_output.of(q);
                dots<V, T>(prepared.address, next.address, this->num_rows, this->n.channels, g, samples.dot);
                samples.write(q, prepared.query, this->reader);
            });
    }

  private:
    const Job job;
    QueryBlocks blocks;
    typename Rule::Reader::template Gradients<Rule> samples;
};

} // namespace
} // namespace mxd::MXD_ISA
