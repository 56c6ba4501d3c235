// Phase one's checks: what the operators of aclnn.cpp ask of their tensors. Everything is told by a thrown Refusal.
#pragma once

#include "acl_tensor.h"
#include "mx_driving.h"

#include <initializer_list>

namespace acl {

// CANN's documented limits.
constexpr int64_t CHANNELS_MULTIPLE = 8, MOST_CHANNELS = 256, QUERIES_BELOW = 500000, MOST_LEVELS = 16, MOST_HEADS = 16,
                  MOST_POINTS = 16, KEYS_BELOW = INT32_MAX;

struct Argument {
    const char *name;
    const aclTensor *handle;
    aclTensor tensor; // a copy of what the handle stands for
    bool output;
};

struct AttentionSizes {
    int64_t batch, keys, heads, channels, queries, levels, points;
};

// Null pointers, and handles that are none; fills in the copies.
void check_handles(Argument *arguments, int count);

// value, spatialShape, levelStartIndex, location, attnWeight: formats, dtypes, shapes and limits.
AttentionSizes check_attention(const Argument *inputs);

struct Axis {
    const char *name; // null: the size speaks for itself
    int64_t size;     // ANY
};
constexpr int64_t ANY = -1;
void check_shape(const Argument &argument, std::initializer_list<Axis> axes);
void check_floating(const Argument &argument);

// Memory: there, aligned, the view inside its storage, the elements of an output distinct.
void check_memory(const Argument &argument);

// A checked argument with elements, as the kernels want it.
mxd_tensor native(const aclTensor &tensor);

} // namespace acl
