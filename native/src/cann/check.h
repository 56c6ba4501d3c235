// What phase one checks: the tensors of a call of aclnnMultiScaleDeformableAttnFunction or of its gradient.
#pragma once

#include "call/check.h"
#include "cann/tensor.h"

#include <vector>

namespace acl {

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
