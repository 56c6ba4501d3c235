// From the tensors of a function to a call that can be planned.
#pragma once

#include <memory>
#include <vector>

#include "call/check.h"

namespace mxd {

// Give the tensors of a function, which fit, the names that kernels know them by, and their axes the order of Axis.
// An info without a shape: that tensor is not given or not wanted. sizes: as `fits` found them.
Call make_call(const Function &function, const TensorInfo *tensors, const AxisSizes &sizes, int64_t option, int num_threads);

// Owns what a prepared call points to.
struct Prepared {
    std::vector<Level> levels;
    std::unique_ptr<char[]> value;
};

// Copies a tensor's elements side by side, as doubles or as they are.
typedef void CopyElements(const Tensor &t, bool as_doubles, char *to);

// Read the levels, and make value readable: channels contiguous, and double as soon as one input is, which saves a copy
// of each kernel for every other dtype computed with in double. Requests huge pages for the results. Returns
// MXD_BAD_LEVEL, MXD_BAD_RANK, MXD_OUT_OF_MEMORY or MXD_OK. Without copy_elements only a plan is made, and value is
// described as it would be.
int prepare(Call &call, Prepared &prepared, CopyElements *copy_elements);

// Whether no result is wanted, or all are empty. No kernel may go through the queries then: expanded inputs take no
// memory and can have more queries than anyone can wait for.
bool nothing_to_do(const Call &call);

} // namespace mxd
