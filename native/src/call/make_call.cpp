#include "call/make_call.h"

#include <algorithm>
#include <cstring>

namespace mxd {
namespace {

// Which tensor of a call an argument is, and how many axes it has.
struct Argument {
    Tensor Call::*tensor;
    int axes;
};

// The tensors of a forward function but its output, in order. The backward is given grad_output, then the same, then
// the gradients, in order.
struct Arguments {
    const char *function;
    Argument inputs[9], gradients[5]; // and one without a tensor at the end
};

constexpr Argument VALUE{&Call::value, 4}, SHAPES{&Call::shapes, 2}, STARTS{&Call::starts, 1}, LOCATIONS{&Call::locations, 6},
    WEIGHTS{&Call::weights, 5}, REFERENCES{&Call::reference, 4}, FEATURES{&Call::value, 3}, MAPS{&Call::shapes, 3},
    MAP_STARTS{&Call::starts, 2}, OF_GROUPS{&Call::weights, 6};
constexpr Argument GRAD_VALUE{&Call::grad_value, 4}, GRAD_LOCATIONS{&Call::grad_locations, 6},
    GRAD_WEIGHTS{&Call::grad_weights, 5}, GRAD_FEATURES{&Call::grad_value, 3}, GRAD_OF_GROUPS{&Call::grad_weights, 6};

const Arguments ARGUMENTS[] = {
    // by operator, and with logits
    {"multi_scale_deformable_attn", {VALUE, SHAPES, STARTS, LOCATIONS, WEIGHTS}, {GRAD_VALUE, GRAD_LOCATIONS, GRAD_WEIGHTS}},
    {"multi_scale_deformable_attn_with_logits",
     {VALUE, SHAPES, STARTS, REFERENCES, LOCATIONS, WEIGHTS},
     {GRAD_VALUE, {&Call::grad_reference, 4}, GRAD_LOCATIONS, GRAD_WEIGHTS}},
    {"deformable_aggregation",
     {FEATURES, MAPS, MAP_STARTS, {&Call::locations, 5}, OF_GROUPS},
     {GRAD_FEATURES, {&Call::grad_locations, 5}, GRAD_OF_GROUPS}},
    {"deformable_aggregation_with_logits",
     {FEATURES,
      MAPS,
      MAP_STARTS,
      {&Call::locations, 4},
      {&Call::projection, 4},
      OF_GROUPS,
      {&Call::image_size, 3},
      {&Call::pair_scale, 4}},
     {GRAD_FEATURES, {&Call::grad_locations, 4}, {&Call::grad_projection, 4}, GRAD_OF_GROUPS}},
    {"geometric_kernel_attention", {VALUE, SHAPES, STARTS, LOCATIONS, WEIGHTS}, {GRAD_VALUE, GRAD_WEIGHTS}},
    {"geometric_kernel_attention_with_logits",
     {VALUE, SHAPES, STARTS, REFERENCES, {&Call::window, 2}, WEIGHTS},
     {GRAD_VALUE, GRAD_WEIGHTS}},
};

// Gives a tensor an axis of one element, if it is given.
void add_axis(Tensor &t, int axis) {
    if (t.axes == 0) return;
    std::copy_backward(t.shape + axis, t.shape + t.axes, t.shape + t.axes + 1);
    std::copy_backward(t.strides + axis, t.strides + t.axes, t.strides + t.axes + 1);
    t.shape[axis] = 1;
    t.strides[axis] = 0;
    ++t.axes;
}

// Moves an axis to the place of one before it.
void move_axis(Tensor &t, int from, int to) {
    std::rotate(t.shape + to, t.shape + from, t.shape + from + 1);
    std::rotate(t.strides + to, t.strides + from, t.strides + from + 1);
}

// Gives all tensors the axes that axes.h names.
void name_axes(Call &call) {
    if (call.op != AGGREGATION) {
        for (Tensor *t : {&call.shapes, &call.starts}) add_axis(*t, MAP_CAMERA);
        return;
    }
    for (Tensor *t : {&call.value, &call.output, &call.grad_output, &call.grad_value}) add_axis(*t, HEAD);
    if (!call.with_logits) return;
    for (Tensor *t : {&call.weights, &call.grad_weights}) move_axis(*t, SCALE, KEY_POINT); // [camera, scale, point]
    move_axis(call.pair_scale, CAMERA, KEY_POINT);                                         // [camera, point]
}

Sizes sizes_of(const Call &call) {
    const int64_t *value = call.value.shape, *weights = call.weights.shape, *maps = call.starts.shape;
    Sizes n{};
    n.batch = value[BATCH];
    n.keys = value[KEY];
    n.heads = value[HEAD];
    n.channels = value[CHANNEL];
    n.queries = weights[QUERY];
    n.points = weights[call.op == AGGREGATION ? KEY_POINT : POINT];
    n.cameras = maps[MAP_CAMERA];
    n.scales = maps[MAP_SCALE];
    n.levels = int64_t(uint64_t(n.cameras) * uint64_t(n.scales)); // not checked yet
    n.groups = call.op == AGGREGATION ? weights[GROUP] : 0;
    n.group_channels = n.groups > 0 ? n.channels / n.groups : 0;
    n.references = call.reference.shape[REFERENCE];
    n.coordinates = call.reference.shape[COORDINATE];
    return n;
}

} // namespace

bool find_function(const char *name, Function &function) {
    for (Operator op : {MULTI_SCALE, AGGREGATION, GEOMETRIC})
        for (bool with_logits : {true, false}) { // the longer name first
            const char *known = ARGUMENTS[2 * op + with_logits].function;
            const size_t length = std::strlen(known);
            if (std::strncmp(name, known, length) != 0) continue;
            function = {op, with_logits, name[length] != 0};
            return !function.backward || std::strcmp(name + length, "_backward") == 0;
        }
    return false;
}

Call make_call(const Function &function, const mxd_tensor *const *arguments, int num_threads) {
    Call call{};
    call.op = function.op;
    call.with_logits = function.with_logits;
    call.has_window = call.with_logits && call.op == GEOMETRIC;
    call.backward = function.backward;
    call.num_threads = num_threads;
    const auto take = [&](const Argument &argument) {
        if (*arguments) call.*argument.tensor = {**arguments, argument.axes};
        ++arguments;
    };
    const Arguments &all = ARGUMENTS[2 * call.op + call.with_logits];
    const int axes_of_output = all.inputs[0].axes;
    if (call.backward) take({&Call::grad_output, axes_of_output});
    for (const Argument *each = all.inputs; each->tensor; ++each) take(*each);
    if (!call.backward) take({&Call::output, axes_of_output});
    for (const Argument *each = all.gradients; call.backward && each->tensor; ++each) take(*each);
    name_axes(call);
    call.sizes = sizes_of(call);
    return call;
}

} // namespace mxd
