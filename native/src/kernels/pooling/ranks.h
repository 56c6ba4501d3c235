// A tensor of ranks as numbers.
#pragma once

#include "call/call.h"
#include "kernels/shared/vectors.h"

namespace mxd::MXD_ISA {
namespace {

// fn(ranks, stride), of the tensor's own integers.
template <class Fn> MXD_INLINE auto with_ranks(const Tensor &t, Fn &&fn) {
    const int64_t stride = t.strides[LISTED];
    return t.dtype == MXD_INT64 ? fn(static_cast<const int64_t *>(t.data), stride)
                                : fn(static_cast<const int32_t *>(t.data), stride);
}

// put(i, rank) for n points from a place of the order on; order may be null: points are in order.
template <class Put> MXD_INLINE void each_rank(const Tensor &t, const uint32_t *order, int64_t begin, int64_t n, Put &&put) {
    with_ranks(t, [&](auto *ranks, int64_t stride) {
        if (order)
            for (int64_t i = 0; i < n; ++i) put(i, int64_t(ranks[order[begin + i] * stride]));
        else
            for (int64_t i = 0; i < n; ++i) put(i, int64_t(ranks[(begin + i) * stride]));
    });
}

} // namespace
} // namespace mxd::MXD_ISA
