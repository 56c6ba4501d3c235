// A call from the arguments of a C function, and which function a name means. Kernels do not include this header.
#pragma once

#include <cstring>

#include "call/call.h"

namespace mxd {

inline Call call_of(Operator op, const mxd_tensor *value, const mxd_tensor *shapes, const mxd_tensor *starts,
                    const mxd_tensor *locations, const mxd_tensor *weights, int num_threads) {
    Call call{};
    call.op = op;
    call.value = *value;
    call.shapes = *shapes;
    call.starts = *starts;
    call.locations = *locations;
    call.weights = *weights;
    call.num_threads = num_threads;
    return call;
}

inline void set_gradients(Call &call, const mxd_tensor *grad_output, const mxd_tensor *grad_value,
                          const mxd_tensor *grad_locations, const mxd_tensor *grad_weights) {
    call.backward = true;
    call.grad_output = *grad_output;
    if (grad_value) call.grad_value = *grad_value;
    if (grad_locations) call.grad_locations = *grad_locations;
    if (grad_weights) call.grad_weights = *grad_weights;
}

inline void set_reference(Call &call, const mxd_tensor *reference, bool by_point) {
    call.with_logits = true;
    call.reference = *reference;
    call.reference_by_point = by_point;
}

inline Call call_with_window(const mxd_tensor *value, const mxd_tensor *shapes, const mxd_tensor *starts,
                             const mxd_tensor *reference, const mxd_tensor *window, const mxd_tensor *logits,
                             int num_threads) {
    static const mxd_tensor NO_LOCATIONS{};
    Call call = call_of(GEOMETRIC, value, shapes, starts, &NO_LOCATIONS, logits, num_threads);
    set_reference(call, reference, false);
    call.window = *window;
    return call;
}

inline Call call_with_cameras(const mxd_tensor *features, const mxd_tensor *shapes, const mxd_tensor *starts,
                              const mxd_tensor *key_points, const mxd_tensor *projection, const mxd_tensor *logits,
                              const mxd_tensor *image_size, const mxd_tensor *pair_scale, int num_threads) {
    Call call = call_of(AGGREGATION, features, shapes, starts, key_points, logits, num_threads);
    call.with_logits = true;
    call.projection = *projection;
    if (image_size) call.image_size = *image_size;
    if (pair_scale) call.pair_scale = *pair_scale;
    return call;
}

// The operator and the direction of a function, by its name without "mxd_".
inline bool find_function(const char *name, Operator &op, bool &backward, bool &with_logits) {
    static const char LOGITS[] = "_with_logits";
    static const char *const NAMES[] = {"multi_scale_deformable_attn", "deformable_aggregation",
                                        "geometric_kernel_attention"};
    for (Operator candidate : {MULTI_SCALE, AGGREGATION, GEOMETRIC}) {
        const size_t length = std::strlen(NAMES[candidate]);
        if (std::strncmp(name, NAMES[candidate], length) != 0) continue;
        op = candidate;
        const char *rest = name + length;
        with_logits = std::strncmp(rest, LOGITS, sizeof LOGITS - 1) == 0;
        if (with_logits) rest += sizeof LOGITS - 1;
        backward = rest[0] != 0;
        return !backward || std::strcmp(rest, "_backward") == 0;
    }
    return false;
}

// arguments: those of the function, in order. Which axis reference points belong to makes no difference to a plan: the
// one that fits.
inline Call call_with_logits(Operator op, bool backward, const mxd_tensor *const *arguments, int num_threads) {
    const mxd_tensor *const *in = arguments + backward, *const *results = in + (op == AGGREGATION ? 8 : 6);
    Call call{};
    if (op == AGGREGATION) {
        call = call_with_cameras(in[0], in[1], in[2], in[3], in[4], in[5], in[6], in[7], num_threads);
    } else if (op == GEOMETRIC) {
        call = call_with_window(in[0], in[1], in[2], in[3], in[4], in[5], num_threads);
    } else {
        call = call_of(MULTI_SCALE, in[0], in[1], in[2], in[4], in[5], num_threads);
        const int64_t references = in[3]->shape[2];
        set_reference(call, in[3], references != 1 && references != call.starts.shape[0]);
    }
    if (!backward) {
        call.output = *results[0];
    } else if (op == AGGREGATION) {
        set_gradients(call, arguments[0], results[0], results[1], results[3]);
        if (results[2]) call.grad_projection = *results[2];
    } else if (op == GEOMETRIC) {
        set_gradients(call, arguments[0], results[0], nullptr, results[1]);
    } else {
        set_gradients(call, arguments[0], results[0], results[2], results[3]);
        if (results[1]) call.grad_reference = *results[1];
    }
    return call;
}

// The same, of a bare operator.
inline Call call_of_function(Operator op, bool backward, const mxd_tensor *const *arguments, int num_threads) {
    const mxd_tensor *const *inputs = arguments + backward, *const *results = inputs + 5;
    Call call = call_of(op, inputs[0], inputs[1], inputs[2], inputs[3], inputs[4], num_threads);
    if (!backward)
        call.output = *results[0];
    else if (op == GEOMETRIC)
        set_gradients(call, arguments[0], results[0], nullptr, results[1]);
    else
        set_gradients(call, arguments[0], results[0], results[1], results[2]);
    return call;
}

} // namespace mxd
