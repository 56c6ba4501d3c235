// The forward of the attention operators.
#pragma once

#include "kernels/attention/worker.h"

namespace mxd::MXD_ISA {
namespace {

// The forward. An item is one of the blocks that query_blocks() makes. V is the type of value, and T the type of all
// arithmetic. Near is the type of the rows of near levels (NEAR_BYTES in call/make_plan.cpp): T if they are widened, else V.
// SOME_FAR is false if all levels are near.
template <class V, class T, template <class> class Rule, bool SOME_FAR, class Near = V>
class Forward : QueryWorker<Near, T, Rule> {
    typedef QueryWorker<Near, T, Rule> Base;

  public:
    typedef Near Row;
    Forward(const Job &j, Arena &arena)
        : Base(j, arena), job(j), blocks(query_blocks(j.call, j.packed_value != nullptr)),
          far(j.packed_value && (same_type<V, Near> || j.plan.near_as_computed)
                  ? far_rows<Rule<T>::CORNERS>(this->n, j.plan.packed_value)
                  : FarRows{}),
          sum(arena.take<T>(this->n.channels)) {}

    void operator()(int64_t item) {
        const int64_t b = blocks.range(item) / this->n.heads, h = blocks.range(item) % this->n.heads;
        const Tensor &output = this->call.output;
        const bool side_by_side = output.strides[CHANNEL] == 1;
        // The output may have another type than V: value may be widened to double, and the output of 16-bit value may be
        // float32.
        const bool as_value = side_by_side && output.dtype == this->call.value.dtype;
        const bool as_computed = side_by_side && output.dtype == OWN<T>;
        const QueryRows outputs(output, b, h, this->n.channels);
        this->find_value(job, b, h);
        this->open_queries(b, h);
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
    Blocks blocks; // blocks of queries of one head of one batch element
    FarRows far;
    T *sum; // the output of a query, if output has another dtype or stride
};

template <template <class> class Rule> inline bool attention(const Call &call, const Plan &plan) {
    const Job job{call, plan};
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if constexpr (Rule<T>::CORNERS == 1) {
            if (plan.near_as_computed) return over_queries<V, Forward<V, T, Rule, false, T>>(job);
            return over_queries<V, Forward<V, T, Rule, true, V>>(job);
        } else if constexpr (same_type<V, Half>) {
            return over_queries<V, Forward<V, T, Rule, true, T>>(job);
        } else {
            return over_queries<V, Forward<V, T, Rule, true, V>>(job);
        }
    });
}

} // namespace
} // namespace mxd::MXD_ISA
