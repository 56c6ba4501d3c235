// What a call is: an operator, its tensors under their own names, and its levels. How it is done is a Plan.
#pragma once

#include "mx_driving.h"

namespace mxd {

enum Operator { MULTI_SCALE, AGGREGATION, GEOMETRIC };

struct Level {
    int64_t height, width, start; // start + height * width <= num_keys, all three checked
};

struct Call {
    Operator op;
    bool backward;
    mxd_tensor value, shapes, starts, locations, weights; // value: feature_maps for deformable_aggregation
    // Then weights are logits, and locations are offsets from reference points, or the key points of
    // deformable_aggregation.
    bool with_logits;
    mxd_tensor reference;  // [bs, num_queries, R, 2 or 4]; geometric_kernel_attention: [bs, num_queries, num_heads, 2]
    mxd_tensor window;     // of geometric_kernel_attention, [num_points, 2], in place of locations
    mxd_tensor projection; // of deformable_aggregation
    mxd_tensor image_size, pair_scale; // the same; data == nullptr: not given
    bool reference_by_point; // sample (level, point) belongs to reference point % R; else to level, or to the only one
    mxd_tensor output;       // forward: written
    mxd_tensor grad_output;  // backward: read
    mxd_tensor grad_value, grad_locations, grad_weights; // backward: written; data == nullptr: not wanted
    mxd_tensor grad_reference, grad_projection;          // the same
    int num_threads;
    // Set by prepare_levels(). prepare_value() then makes value's channels contiguous, and value double as soon as one
    // input is.
    const Level *levels;
    int64_t num_levels; // maps (cam * scale) for deformable_aggregation
};

} // namespace mxd
