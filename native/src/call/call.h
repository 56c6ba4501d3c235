// A call: the operator, its tensors, sizes and levels. A Plan says how the call is computed.
#pragma once

#include "mx_driving.h"

namespace mxd {

// The position of each axis in its tensor. Code uses these names instead of numbers.
//
//   shapes               MAP_CAMERA, MAP_SCALE, HEIGHT_WIDTH (attention: the levels are the scales of one camera)
//   starts               MAP_CAMERA, MAP_SCALE
//   value                BATCH, KEY, HEAD, CHANNEL
//   output               BATCH, QUERY, HEAD, CHANNEL
//   locations            BATCH, QUERY, HEAD, LEVEL, POINT, XY
//   weights              BATCH, QUERY, HEAD, LEVEL, POINT
//   reference            BATCH, QUERY, REFERENCE (with a window: HEAD), COORDINATE
//   window               PLACE, PLACE_XY
//
// In deformable_aggregation a query is an anchor, and value and output have one head:
//
//   weights              BATCH, QUERY, KEY_POINT, CAMERA, SCALE, GROUP
//   pair_scale           BATCH, QUERY, KEY_POINT, CAMERA
//   locations            BATCH, QUERY, KEY_POINT, CAMERA, PAIR_XY (with logits, key points: BATCH, QUERY, KEY_POINT, XYZ)
//   projection           BATCH, MATRIX, ROW, COLUMN
//   image_size           BATCH, MATRIX, EXTENT
//
// In bev_pool_v3 value is feat, with one batch and one head:
//
//   depth, ranks         LISTED
//   output               BATCH, CELL_CHANNEL, CELL_D, CELL_H, CELL_W
enum Axis {
    // clang-format off
    MAP_CAMERA = 0, MAP_SCALE = 1, HEIGHT_WIDTH = 2,
    BATCH = 0, KEY = 1, QUERY = 1, HEAD = 2, CHANNEL = 3,
    LEVEL = 3, POINT = 4, XY = 5,
    REFERENCE = 2, COORDINATE = 3,
    PLACE = 0, PLACE_XY = 1,
    KEY_POINT = 2, CAMERA = 3, SCALE = 4, GROUP = 5, PAIR_XY = 4, XYZ = 3,
    MATRIX = 1, ROW = 2, COLUMN = 3, EXTENT = 2,
    LISTED = 0, CELL_CHANNEL = 1, CELL_D = 2, CELL_H = 3, CELL_W = 4,
    // clang-format on
};

enum Operator { MULTI_SCALE, AGGREGATION, GEOMETRIC, POOLING };

struct Level {
    int64_t height, width, start; // checked: height > 0, width > 0, start >= 0, start + height * width <= keys
};

struct Tensor : mxd_tensor {
    int axes;
};

struct Sizes {
    int64_t batch, keys, heads, channels, queries;
    int64_t levels, points;         // levels: cameras * scales. points: the points of one level, or the key points of an anchor
    int64_t cameras, scales;        // cameras is 1, except in deformable_aggregation
    int64_t groups, group_channels; // only in deformable_aggregation; group_channels is channels / groups
    // references: the number R of reference points of a query; 0 with a window. coordinates: 2 for a point, 4 for a box.
    int64_t references, coordinates;
    int64_t cells; // bev_pool_v3: bs * d * h * w. In bev_pool_v3 `keys` is num_feat, and `points` is the length of ranks_bev
};

struct Call {
    Operator op;
    bool backward;
    // true: `weights` holds logits, and `locations` holds offsets from reference points, or in deformable_aggregation the key
    // points of an anchor.
    bool with_logits;
    bool has_window; // true in geometric_kernel_attention_with_logits
    // true: sample (level, point) reads reference point `point % R`. false: the sample reads reference point `level`, or the
    // only one.
    bool reference_by_point;
    int num_threads;
    Sizes sizes;
    Tensor value, shapes, starts, locations, weights; // value is feature_maps in deformable_aggregation, feat in bev_pool_v3
    Tensor reference, window;                         // reference: only with logits; window: replaces locations if has_window
    Tensor projection, image_size, pair_scale;        // only in deformable_aggregation; data is null if a tensor is not given
    Tensor depth, ranks_feat, ranks_depth, ranks_bev; // only in bev_pool_v3
    Tensor output;                                    // forward: the result
    Tensor grad_output;                               // backward: an input
    // backward: the results; data is null if a gradient is not wanted
    Tensor grad_value, grad_locations, grad_weights, grad_reference, grad_projection, grad_depth;
    // Set by prepare(), which also makes the channels of value contiguous, and converts value to double if any input is double.
    const Level *levels;
};

} // namespace mxd
