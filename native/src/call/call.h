// What a call is: an operator, its tensors under their own names, how large they are, and its levels. How it is done is
// a Plan.
#pragma once

#include "call/axes.h"
#include "mx_driving.h"

namespace mxd {

enum Operator { MULTI_SCALE, AGGREGATION, GEOMETRIC, POOLING };

struct Level {
    int64_t height, width, start; // start + height * width <= keys, all three checked
};

struct Tensor : mxd_tensor {
    int axes;
};

struct Sizes {
    int64_t batch, keys, heads, channels, queries;
    int64_t levels, points;          // deformable_aggregation: maps, cameras * scales of them; and key points
    int64_t cameras, scales;         // else 1 and levels
    int64_t groups, group_channels;  // of deformable_aggregation
    int64_t references, coordinates; // of reference points: R, or heads with a window; 2, or 4 of boxes
    int64_t cells;                   // of bev_pool_v3: bs * d * h * w; its keys are num_feat, its points n
};

struct Call {
    Operator op;
    bool backward;
    // Then weights are logits, and locations are offsets from reference points, or the key points of
    // deformable_aggregation.
    bool with_logits;
    bool has_window;         // GEOMETRIC with logits
    bool reference_by_point; // sample (level, point) belongs to reference point % R; else to level, or to the only one
    int num_threads;
    Sizes sizes;
    Tensor value, shapes, starts, locations, weights; // value: feature_maps for deformable_aggregation
    Tensor reference, window;                         // window: in place of locations
    Tensor projection, image_size, pair_scale;        // of deformable_aggregation; data == nullptr: not given
    Tensor depth, ranks_feat, ranks_depth, ranks_bev; // of bev_pool_v3, whose value is feat
    Tensor output;                                    // forward: written
    Tensor grad_output;                               // backward: read
    // backward: written; data == nullptr: not wanted
    Tensor grad_value, grad_locations, grad_weights, grad_reference, grad_projection, grad_depth;
    // Set by prepare(), which also makes value's channels contiguous, and value double as soon as one input is.
    const Level *levels;
};

} // namespace mxd
