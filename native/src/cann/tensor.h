// Defines aclTensor, in which a program describes a view of memory. Declares the check of the tensors of a call, which phase
// one makes; aclnn.cpp has the two phases.
#pragma once

#include "acl/acl.h"
#include "call/check.h"

#include <algorithm>
#include <vector>

constexpr int ACL_MOST_AXES = 8;

struct aclTensor {
    int axes;
    int64_t shape[ACL_MOST_AXES];
    int64_t strides[ACL_MOST_AXES]; // in elements
    int64_t offset;
    aclDataType dtype;
    aclFormat format;
    int64_t storage; // the number of elements in the memory at `data`, or UNKNOWN_STORAGE
    void *data;
};

namespace acl {

// No memory has MOST_ELEMENTS elements, and sums of such sizes in bytes do not overflow. Every view lies inside a storage of
// UNKNOWN_STORAGE elements.
constexpr int64_t MOST_ELEMENTS = int64_t(1) << 47, UNKNOWN_STORAGE = MOST_ELEMENTS + 1;

inline bool is_empty(const aclTensor &t) { return std::count(t.shape, t.shape + t.axes, 0) > 0; }

// The arguments of a call, in the order of mxd_multi_scale_deformable_attn or of its backward.
struct Arguments {
    bool backward;
    const mxd::Function &function;
    std::vector<const char *> names; // CANN's names
    std::vector<aclTensor> tensors;  // copies of the program's descriptions
    mxd::TensorInfo infos[mxd::MOST_ARGUMENTS] = {};
    mxd::AxisSizes sizes;
};

// Checks all arguments of phase one. `handles` has the order of CANN's function. Throws an Outcome. Reads no elements.
Arguments check_phase_one(bool backward, std::vector<const aclTensor *> handles, const void *workspace_size,
                          const void *executor);

} // namespace acl
