// All gradients in one pass, head by head: a query's rows of value are multiplied with grad_output, and the same rows
// of the gradient are added to.
#pragma once

#include "attention_samples.h"

namespace mxd {
namespace MXD_ISA {
namespace {

// Items: (batch, head). Value and its gradient are laid out alike, and nothing is packed. All of grad_value has been
// set to zero.
template <class T, template <class> class Rule> class AllGradients : QueryWorker<T, T, Rule> {
    typedef QueryWorker<T, T, Rule> Base;

  public:
    static int64_t items(const Job &job) {
        const Sizes n(job.call);
        return n.batch * n.heads;
    }
    static int64_t scratch_bytes(const Job &job) {
        return Base::scratch_bytes(job) + SampleOutputs<T, Rule>::bytes(Sizes(job.call));
    }
    AllGradients(const Job &j, Arena arena) : Base(j, arena), job(j), samples(j, this->n, arena) {}

    void operator()(int64_t item) {
        const Call &call = this->call;
        const int64_t h = item % this->n.heads, b = item / this->n.heads;
        const OutputGradient<T> grad_output(call, b, h, this->row);
        const OtherRows gradient{first_row(call.grad_value, b, h) - first_row(call.value, b, h),
                                 reinterpret_cast<int64_t>(this->nowhere)};
        this->find_value(job, b, h);
        this->reader.open(b, h);
        samples.open(b, h);
        this->queries(
            0, this->n.queries,
            [](T *shares, int64_t i, const auto &sampled) { Base::put_shares(shares, i, sampled); },
            [&](int64_t q, const Slot<T> &slot, const Slot<T> &next) {
                const T *g = grad_output.of(q);
                dots_and_scatter_add<T>(slot.address, slot.share, next.address, gradient, this->num_rows,
                                        this->n.channels, g, samples.dot);
                samples.write(q, slot.query, this->reader);
            });
        samples.finish(this->reader);
    }

  private:
    const Job job;
    SampleOutputs<T, Rule> samples;

    static const char *first_row(const mxd_tensor &t, int64_t b, int64_t h) { return at(t, offset3(t, b, 0, h)); }
};

} // namespace
} // namespace MXD_ISA
} // namespace mxd
