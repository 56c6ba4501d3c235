// A call from the tensors of a C function.
#pragma once

#include "call/check.h"

namespace mxd {

// tensors: the function's, in order, which fit; null for one that is not given or not wanted. sizes: as `fits` found
// them.
Call make_call(const Function &function, const mxd_tensor *const *tensors, const AxisSizes &sizes, int64_t option,
               int num_threads);

} // namespace mxd
