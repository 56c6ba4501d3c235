// What phase one checks: the arguments of the two operators of aclnn.cpp. A check that fails throws a Refusal.
#pragma once

#include "call/call.h"
#include "cann/tensor.h"

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

    // Takes the handles that both operators have; the caller sets the rest.
    Arguments(bool of_gradient, const aclTensor *values, const aclTensor *shapes, const aclTensor *starts,
              const aclTensor *locations, const aclTensor *weights)
        : backward(of_gradient) {
        value.handle = values;
        spatial_shape.handle = shapes;
        level_start_index.handle = starts;
        location.handle = locations;
        attn_weight.handle = weights;
    }

    // fn(argument) for each argument of the operator, in the order of its C function.
    template <class Fn> void for_each(Fn &&fn) {
        for (Argument *each : {&value, &spatial_shape, &level_start_index, &location, &attn_weight}) fn(*each);
        if (!backward) return fn(output);
        for (Argument *each : {&grad_output, &grad_value, &grad_location, &grad_attn_weight}) fn(*each);
    }
};

constexpr int64_t ANY = -1; // a size that no argument has told yet

// Every check of phase one; reads no tensor's elements. Copies each handle's tensor; returns the sizes.
mxd::Sizes check_phase_one(Arguments &arguments, const void *workspace_size, const void *executor);

} // namespace acl
