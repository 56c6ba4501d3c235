// Facts about tensors, for code that runs once per call.
#pragma once

#include <algorithm>

#include "call/call.h"

namespace mxd {

inline bool is_empty(const Tensor &t) { return std::count(t.shape, t.shape + t.axes, 0) > 0; }

inline int64_t floating_size(int64_t dtype) { return dtype == MXD_FLOAT64 ? 8 : dtype == MXD_FLOAT32 ? 4 : 2; }
inline int64_t element_size(int64_t dtype) { return dtype == MXD_INT64 ? 8 : dtype == MXD_INT32 ? 4 : floating_size(dtype); }

} // namespace mxd
