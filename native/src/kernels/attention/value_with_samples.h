// All gradients in one pass, head by head: a query's rows of value are multiplied with grad_output, and the same rows
// of the gradient are added to.
#pragma once

#include "kernels/attention/samples.h"

namespace mxd::MXD_ISA {
namespace {

// Items: (batch, head). Value and its gradient are laid out alike: in their tensors, which are of T; or PACKED in
// memory of the worker, all rows of both, and the tensors are of any dtype. Where they are not packed, all of
// grad_value has been set to zero.
template <class V, class T, template <class> class Rule, bool PACKED> class AllGradients : QueryWorker<T, T, Rule> {
    static_assert(PACKED || same_type<V, T>, "rows that are added to are of the type computed in");
    typedef QueryWorker<T, T, Rule> Base;

  public:
    static int64_t items(const Job &job) { return job.call.sizes.batch * job.call.sizes.heads; }
    AllGradients(const Job &j, Arena &arena)
        : Base(j, arena), job(j), levels(j.plan.packed_gradient), samples(j, arena),
          packed_value(arena.take<char>(levels.bytes)), packed_gradient(arena.take<char>(levels.bytes)) {}

    void operator()(int64_t item) {
        const Call &call = this->call;
        const int64_t h = item % this->n.heads, b = item / this->n.heads;
        const OutputGradient<T> grad_output(call, b, h, this->row);
        const OtherRows gradient{open_rows(b, h), reinterpret_cast<int64_t>(this->zero_row)};
        this->reader.open(b, h);
        samples.open(b, h);
        this->template queries<true>(
            0, this->n.queries, [&](int64_t q, const PreparedQuery<T> &prepared, const PreparedQuery<T> &next) {
                const T *g = grad_output.of(q);
                dots_and_scatter_add<T, !PACKED>(prepared.address, prepared.coefficient, next.address, gradient, this->num_rows,
                                                 this->n.channels, g, samples.dot);
                samples.write(q, prepared.query, this->reader);
            });
        if (PACKED) unpack_as<T>(call, levels, packed_gradient, b, h);
    }

  private:
    const Job job;
    const PackedLevels &levels;
    SampleOutputs<T, Rule> samples;
    char *packed_value, *packed_gradient;

    // Selects the rows of a head. Returns the distance from a row of value to that of its gradient.
    int64_t open_rows(int64_t b, int64_t h) {
        const Call &call = this->call;
        const HeadRows value(call.value, b, h), gradient(call.grad_value, b, h);
        if (PACKED) {
            pack_as<V, T>(call, levels, b, h, packed_value);
            memset(packed_gradient, 0, size_t(levels.bytes));
        }
        find_levels(call, this->n, 0, value, levels, PACKED ? packed_value : nullptr, this->rows);
        return PACKED ? packed_gradient - packed_value : gradient.first - value.first;
    }
};

} // namespace
} // namespace mxd::MXD_ISA
