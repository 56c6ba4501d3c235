// The workers of an attention operator, and which of them run. A Rule<T> says what an operator does with a location:
//
//   CORNERS                                         rows of value a sample reads
//   rows(query, i)                                  what samples i..i+LANES-1 read, a SampledRows
//   reach(query, i, band)                           which of them may read a row of a band; cheaper than rows()
//   gradients(query, dot, i, grad_xy, grad_weight)  from the products with those rows to the gradients of weights and
//                                                   locations; gradients<true>: of weights and offsets in pixels
#pragma once

#include "kernels/attention/forward.h"
#include "kernels/attention/samples.h"
#include "kernels/attention/value_by_bands.h"
#include "kernels/attention/value_by_heads.h"
#include "kernels/attention/value_with_samples.h"

namespace mxd::MXD_ISA {
namespace {

template <template <class> class Rule> inline bool attention(const Call &call, const Plan &plan) {
    const Job job{call, plan, nullptr, nullptr};
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

// Chunk `chunk` of the gradient of value, in the order of memory: head by head takes longer.
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

// Worker over its items, once grad_value is zero.
template <class T, class Worker> inline bool add_to_zero(const Job &job) {
    if (job.plan.all_rows_are_packed) return over_items<Worker>(job);
    return parallel_stages<Worker>(job.call.num_threads, 1, Worker::items(job), job,
                                   [&](int64_t, int64_t chunk) { set_to_zero<T>(job.call, chunk); });
}

template <class V, class T, template <class> class Rule> inline bool all_gradients(const Job &job) {
    if (job.plan.sample_gradients && !over_queries<V, SampleGradients<V, T, Rule>>(job)) return false;
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
        if (!call.grad_reference.data) return all_gradients<V, T, Rule>({call, plan, nullptr, nullptr});
        const Memory sums(ReferenceSums<T>::bytes(call));
        const Job job{call, plan, nullptr, sums.begin()};
        return sums.begin() && all_gradients<V, T, Rule>(job) && over_items<ReferenceGradient<T>>(job);
    });
}

} // namespace
} // namespace mxd::MXD_ISA
