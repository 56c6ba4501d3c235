// How large a call of an attention operator is. value is [bs, num_keys, num_heads, embed_dims], a query [num_heads,
// num_levels, num_points].
#pragma once

#include "kernels/kernels.h"
#include "kernels/shared/sampling.h"

namespace mxd {
namespace MXD_ISA {
namespace {

struct Sizes {
    int64_t batch, keys, heads, channels, queries, levels, points;
    bool with_logits, has_window;

    explicit Sizes(const Call &call)
        : batch(call.value.shape[0]), keys(call.value.shape[1]), heads(call.value.shape[2]),
          channels(call.value.shape[3]), queries(call.weights.shape[1]), levels(call.num_levels),
          points(call.weights.shape[4]), with_logits(call.with_logits),
          has_window(call.op == GEOMETRIC && call.with_logits) {}
    int64_t room() const { return round_up(levels * points, LANES); } // samples of a query, padded
};

inline int64_t offset3(const mxd_tensor &t, int64_t i, int64_t j, int64_t k) {
    return i * t.strides[0] + j * t.strides[1] + k * t.strides[2];
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
