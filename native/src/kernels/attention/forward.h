// The forward direction: each query's rows, summed.
#pragma once

#include "kernels/attention/worker.h"

namespace mxd::MXD_ISA {
namespace {

// Items: QueryBlocks. V: the type of value. Near: of the rows of near levels: V, or T where those are packed as computed.
// Without SOME_FAR all levels are near.
template <class V, class T, template <class> class Rule, bool SOME_FAR, class Near = V>
class Forward : QueryWorker<Near, T, Rule> {
    typedef QueryWorker<Near, T, Rule> Base;

  public:
    typedef Near Row;
    Forward(const Job &j, Arena &arena)
        : Base(j, arena), job(j), blocks(j.call, j.packed_value != nullptr),
          far(j.packed_value && (same_type<V, Near> || j.plan.near_as_computed)
                  ? far_rows<Rule<T>::CORNERS>(this->n, j.plan.packed_value)
                  : FarRows{}),
          sum(arena.take<T>(this->n.channels)) {}

    void operator()(int64_t item) {
        const int64_t b = blocks.batch(item), h = blocks.head(item);
        const Tensor &output = this->call.output;
        const bool side_by_side = output.strides[CHANNEL] == 1;
        // Value may have been widened to double, and the output of 16-bit value may be float32.
        const bool as_value = side_by_side && output.dtype == this->call.value.dtype;
        const bool as_computed = side_by_side && output.dtype == OWN<T>;
        const QueryRows outputs(output, b, h, this->n.channels);
        this->find_value(job, b, h);
        this->reader.reads_16_bits = Rule<T>::CORNERS == 4 && SIXTEEN_AT_ONCE<T> && !this->rows.far;
        this->reader.open(b, h);
        this->template queries<true>(
            blocks.begin(item), blocks.end(item),
            [&](int64_t q, const PreparedQuery<T> &prepared, const PreparedQuery<T> &next) {
                char *out = outputs.template at_in_turn<true>(q);
                T *const computed = as_value ? nullptr : as_computed ? reinterpret_cast<T *>(out) : sum;
                weighted_sum<V, T, SOME_FAR, Near>(prepared.address, prepared.coefficient, next.address, far, this->num_rows,
                                                   this->n.channels, reinterpret_cast<V *>(out), computed);
                if (computed == sum) write_elements(sum, out, output.dtype, output.strides[CHANNEL], this->n.channels);
            });
    }

  private:
    const Job job;
    QueryBlocks blocks;
    FarRows far;
    T *sum; // of a query, where output has another dtype or stride
};

} // namespace
} // namespace mxd::MXD_ISA
