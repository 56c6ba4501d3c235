// aclTensor is a program's description of a view. Phase one checks the tensors of a call.
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
    int64_t storage; // elements in memory from data on, or UNKNOWN_STORAGE
    void *data;
};

namespace acl {

// More elements than any memory holds, yet few enough that sums of such numbers, in bytes, do not overflow.
constexpr int64_t MOST_ELEMENTS = int64_t(1) << 47, UNKNOWN_STORAGE = MOST_ELEMENTS + 1;

inline bool is_empty(const aclTensor &t) { return std::count(t.shape, t.shape + t.axes, 0) > 0; }

// In the order of mxd_multi_scale_deformable_attn's arguments or of its backward's.
struct Arguments {
    bool backward;
    const mxd::Function &function;
    std::vector<const char *> names; // CANN's
    std::vector<aclTensor> tensors;  // copies
    mxd::TensorInfo infos[mxd::MOST_ARGUMENTS] = {};
    mxd::AxisSizes sizes;
};

// handles: in the order of the C function. Throws a Refusal. Reads no tensor's elements.
Arguments check_phase_one(bool backward, std::vector<const aclTensor *> handles, const void *workspace_size,
                          const void *executor);

} // namespace acl
