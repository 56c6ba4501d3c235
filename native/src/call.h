// What the interface hands to a kernel: tensors that were checked and levels that fit.
#pragma once

#include "mx_driving.h"

namespace mxd {

struct Level {
    int64_t height, width, start; // start + height * width <= num_keys, all three checked
};

// Levels of one head whose rows get memory of their own, side by side: in value they lie a kilobyte apart and use an
// eighth of the caches' sets.
struct PackedLevels {
    const int64_t *offset; // for each level, in bytes; -1: not packed
    int64_t bytes;         // 0: nothing is packed
};

// A call with its arguments, as interface.cpp hands it to a kernel. Unwanted gradients have data == nullptr.
struct Call {
    mxd_tensor value, locations, weights; // value: channels are adjacent (stride 1); double as soon as one input is
    mxd_tensor output;                    // forward: written; backward: the gradient of the output, read
    mxd_tensor grad_value, grad_locations, grad_weights;
    bool grad_value_in_place; // grad_value has the type computed in and adjacent channels: it is added up where it lies
    const Level *levels;
    int64_t num_levels; // maps (cam * scale) for deformable_aggregation
    // Backward: ranges of value rows; one worker at a time owns a range of one head, so there are no atomics and the
    // order of additions is that of the queries whatever the number of threads.
    const int64_t *band_starts;
    int64_t num_bands;
    PackedLevels copied; // of one (batch, head) of value, for all threads, one head after the other
    char *copy;          // where they are; null until the kernel has memory for them
    PackedLevels summed; // of one (batch, head) of the gradient of value, for each thread
    // Backward, where there are more threads than heads but not many more: a head's gradient of value is shared out by
    // levels and by channels, which repeats less than bands do. 1 and 1: whole heads, or bands.
    int64_t level_parts, channel_parts;
    bool in_one_pass; // all gradients: value and its gradient are laid out alike then, and nothing is packed
    int num_threads;
};

} // namespace mxd
