// What the interface hands to a kernel: tensors that were checked and levels that fit.
#pragma once

#include "mx_driving.h"

namespace mxd {

struct Level {
    int64_t height, width, start; // start + height * width <= num_keys, all three checked
};

// A call with its arguments, as interface.cpp hands it to a kernel. Unwanted gradients have data == nullptr.
struct Call {
    mxd_tensor value, locations, weights; // value: channels are adjacent (stride 1)
    mxd_tensor output;                    // forward: written; backward: the gradient of the output, read
    mxd_tensor grad_value, grad_locations, grad_weights;
    bool grad_value_in_place; // grad_value has the type computed in and adjacent channels: it is added up where it lies
    const Level *levels;
    int64_t num_levels; // maps (cam * scale) for deformable_aggregation
    // Backward: ranges of value rows; one worker at a time owns a range of one head, so there are no atomics and the
    // order of additions is that of the queries whatever the number of threads.
    const int64_t *band_starts;
    int64_t num_bands;
    // A copy of some levels of one (batch, head) of value, shared by all threads, one head after the other: a head's
    // rows lie a kilobyte apart and use an eighth of the caches' sets. Null: nothing is copied.
    char *copy;
    const int64_t *copy_offset; // for each level where it lies in the copy, in bytes; -1: it is read from value
    int num_threads;
};

} // namespace mxd
