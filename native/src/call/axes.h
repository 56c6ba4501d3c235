// Facts about an operator's tensors, for code that runs once per call. Kernels do not include this header: the linker
// would merge its functions between instruction sets.
#pragma once

#include <algorithm>

#include "call/call.h"

namespace mxd {

// How many axes tensors have, and where some axes are.
struct Axes {
    int value, starts, locations, weights; // output has as many as value, shapes one more than starts
    int points, points_of_weights;         // of locations, and of weights
    int per_query;                         // of locations and weights: the first axis after the queries and heads
    int reference = 4, projection = 4;     // with logits
};

inline Axes axes_of(const Call &call) {
    if (call.op != AGGREGATION) return {4, 1, 6, 5, 4, 4, 3};
    return call.with_logits ? Axes{3, 2, 4, 6, 2, 4, 2} : Axes{3, 2, 5, 6, 2, 2, 2};
}

inline bool is_empty(const mxd_tensor &t, int axes) { return std::count(t.shape, t.shape + axes, 0) > 0; }

inline int64_t floating_size(int64_t dtype) { return dtype == MXD_FLOAT64 ? 8 : dtype == MXD_FLOAT32 ? 4 : 2; }

} // namespace mxd
