// The forward of the attention operators, and the choice of workers for the backward. A Rule<T> defines an operator's samples:
//
//   CORNERS                                         the number of rows of value that a sample reads
//   rows(query, i)                                  SampledRows: the rows that samples i..i+LANES-1 read
//   reach(query, i, band)                           the samples that may read a row of a band; cheaper than rows()
//   gradients(query, dot, i, grad_xy, grad_weight)  computes the gradients of weights and locations;
//                                                   gradients<true>: of weights and of offsets in pixels.
//                                                   dot: the dot products of grad_output with the rows
#pragma once

#include "kernels/attention/value_gradient.h"

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
        // The output may have another type than V: value may be widened to double, and 16-bit value may have a float32 output.
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
    Blocks blocks; // a range is one head of a batch
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

// Sets a chunk of grad_value to zero, in the order of memory. Zeroing one head after the other takes longer.
template <class T> inline void set_to_zero(const Call &call, int64_t chunk) {
    const Sizes &n = call.sizes;
    const Tensor &grad = call.grad_value;
    const int64_t begin = n.keys * chunk / STAGE_CHUNKS, end = n.keys * (chunk + 1) / STAGE_CHUNKS;
    const bool contiguous = grad.strides[HEAD] == n.channels && grad.strides[KEY] == n.heads * n.channels;
    for (int64_t b = 0; b < n.batch; ++b) {
        if (contiguous) {
            memset(at(grad, offset_of(grad, b, begin, 0)), 0, size_t((end - begin) * grad.strides[KEY]) * sizeof(T));
            continue;
        }
        for (int64_t i = begin; i < end; ++i)
            for (int64_t h = 0; h < n.heads; ++h) memset(at(grad, offset_of(grad, b, i, h)), 0, size_t(n.channels) * sizeof(T));
    }
}

// Sets grad_value to zero, unless the worker writes all of its rows, and then runs the worker over its items.
template <class T, class Worker> inline bool add_to_zero(const Job &job) {
    if (job.plan.all_rows_are_packed) return over_items<Worker>(job);
    return parallel_stages<Worker>(job.call.num_threads, 1, Worker::items(job), job,
                                   [&](int64_t, int64_t chunk) { set_to_zero<T>(job.call, chunk); });
}

template <class V, class T, template <class> class Rule> inline bool sample_gradients(const Job &job) {
    if constexpr (Rule<T>::CORNERS == 4)
        if (job.plan.near_as_computed) return over_queries<V, SampleGradients<T, T, Rule>>(job);
    return over_queries<V, SampleGradients<V, T, Rule>>(job);
}

template <class V, class T, template <class> class Rule> inline bool all_gradients(const Job &job) {
    if (job.plan.sample_gradients && !sample_gradients<V, T, Rule>(job)) return false;
    switch (job.plan.value_gradient) {
    case ValueGradient::NOT_WANTED: return true;
    case ValueGradient::WITH_SAMPLES:
        if constexpr (Rule<T>::CORNERS == 1) {
            if (job.plan.packed_gradient.bytes > 0) return add_to_zero<T, AllGradients<V, T, Rule, true>>(job);
        }
        if constexpr (same_type<V, T>) return add_to_zero<T, AllGradients<V, T, Rule, false>>(job);
        return false;
    case ValueGradient::BY_HEADS:
    case ValueGradient::BY_PARTS: return add_to_zero<T, ValueByHeads<T, Rule>>(job);
    case ValueGradient::BY_BANDS: return over_items<ValueByBands<T, Rule>>(job);
    }
    return false;
}

template <template <class> class Rule> inline bool attention_backward(const Call &call, const Plan &plan) {
    return with_types(call, [&](auto *v, auto *t) {
        typedef __typeof__(*v) V;
        typedef __typeof__(*t) T;
        if (!call.grad_reference.data) return all_gradients<V, T, Rule>({call, plan});
        const Sizes &n = call.sizes;
        // Memory of 0 bytes is null, so ask for at least 1.
        const Memory memory(1 + PartialSums<T>(call.grad_reference, nullptr).bytes(n.batch * n.heads));
        return memory.begin() && all_gradients<V, T, Rule>({call, plan, nullptr, memory.begin()}) &&
               add_parts<T>(call.num_threads, {call.grad_reference, n.heads, {call.grad_reference, memory.begin()}});
    });
}

} // namespace
} // namespace mxd::MXD_ISA
