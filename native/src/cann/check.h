// What phase one checks: the arguments of the two operators of aclnn.cpp. A check that fails throws a Refusal.
#pragma once

#include "call/check.h"
#include "cann/tensor.h"

#include <initializer_list>
#include <vector>

namespace acl {

struct Argument {
    const char *name;     // in sentences
    bool written = false; // by the operator
    const aclTensor *handle = nullptr;
    aclTensor tensor{}; // a copy of the handle's tensor; check_phase_one makes it
};

// The arguments of aclnnMultiScaleDeformableAttnFunction, or with `backward` of aclnnMultiScaleDeformableAttentionGrad.
struct Arguments {
    bool backward;
    Argument value{"value"}, spatial_shape{"spatialShape"}, level_start_index{"levelStartIndex"}, location{"location"},
        attn_weight{"attnWeight"};
    Argument output{"output", true}; // forward only
    Argument grad_output{"gradOutput"}, grad_value{"gradValue", true}, grad_location{"gradLocation", true},
        grad_attn_weight{"gradAttnWeight", true}; // backward only

    // The handles are in the order of the C function.
    Arguments(bool of_gradient, std::initializer_list<const aclTensor *> handles) : backward(of_gradient) {
        auto next = handles.begin();
        for_each([&](Argument &each) { each.handle = *next++; });
    }

    // fn(argument) for each argument of the operator, in the order of its C function.
    template <class Fn> void for_each(Fn &&fn) {
        for (Argument *each : {&value, &spatial_shape, &level_start_index, &location, &attn_weight}) fn(*each);
        if (!backward) return fn(output);
        for (Argument *each : {&grad_output, &grad_value, &grad_location, &grad_attn_weight}) fn(*each);
    }
};

// mxd_multi_scale_deformable_attn, or its backward; and its tensors, in its order.
const mxd::Function &function_of(bool backward);
std::vector<const Argument *> in_order(const Arguments &arguments);

// Every check of phase one; reads no tensor's elements. Copies each handle's tensor. Returns the sizes of axes.
mxd::AxisSizes check_phase_one(Arguments &arguments, const void *workspace_size, const void *executor);

} // namespace acl
