// A call from the tensors of a C function.
#pragma once

#include "call/check.h"

namespace mxd {

// A tensor of an argument with both factors of each product: [bs, num_queries, num_heads * embed_dims] has four axes then.
mxd_tensor split_products(const Argument &argument, const TensorInfo &tensor, const AxisSizes &sizes);

// tensors: the function's, in order, which fit; null for one that is not given or not wanted. sizes: as `fits` found
// them.
Call make_call(const Function &function, const mxd_tensor *const *tensors, const AxisSizes &sizes, int64_t option,
               int num_threads);

} // namespace mxd
