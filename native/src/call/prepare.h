// Makes a Call from the tensors of a function, and prepares it for a plan and kernels.
#pragma once

#include <memory>
#include <vector>

#include "call/check.h"

namespace mxd {

// Makes a call from tensors, and puts their axes in the order of Axis. `fits` must have returned true for these tensors, and
// set `sizes`. A TensorInfo without a shape is a tensor that is not given or not wanted.
Call make_call(const Function &function, const TensorInfo *tensors, const AxisSizes &sizes, int64_t option, int num_threads);

// Owns the memory to which a prepared call points.
struct Prepared {
    std::vector<Level> levels;
    std::unique_ptr<char[]> value;
};

// Copies a tensor's elements to contiguous memory, as doubles or unchanged.
typedef void CopyElements(const Tensor &t, bool as_doubles, char *to);

// Reads the levels. Copies value if its channels are not contiguous. Converts value to double if any input is double, because
// kernels that compute in double read only rows of double. Requests huge pages for the results. Returns MXD_BAD_LEVEL,
// MXD_BAD_RANK, MXD_OUT_OF_MEMORY or MXD_OK. If only a plan is made, copy_elements is null; then value describes a copy that is
// not made.
int prepare(Call &call, Prepared &prepared, CopyElements *copy_elements);

// Returns whether no result is wanted, or all wanted results are empty. Then no kernel may run: expanded inputs take no memory,
// so a call may have more queries than a kernel could ever finish.
bool nothing_to_do(const Call &call);

} // namespace mxd
