// Where tensors have their axes: no other file has the number of an axis.
//
//   shapes, starts       MAP_CAMERA, MAP_SCALE, of shapes HEIGHT_WIDTH      levels are the scales of one camera
//   value, output        BATCH, KEY or QUERY, HEAD, CHANNEL
//   locations, weights   BATCH, QUERY, HEAD, LEVEL, POINT, of locations XY
//   reference            BATCH, QUERY, REFERENCE or HEAD, COORDINATE
//   window               PLACE, PLACE_XY
//
// In deformable_aggregation a query is an anchor, and value and output have one head:
//
//   weights, pair_scale  BATCH, QUERY, KEY_POINT, CAMERA, of weights SCALE, GROUP
//   locations            BATCH, QUERY, KEY_POINT, CAMERA, PAIR_XY; or key points: BATCH, QUERY, KEY_POINT, XYZ
//   projection           BATCH, MATRIX, ROW, COLUMN
//   image_size           BATCH, MATRIX, EXTENT
//
// In bev_pool_v3 feat is value, with one batch and one head; depth, ranks_*: LISTED; output: BATCH,
// CELL_CHANNEL, CELL_D, CELL_H, CELL_W
#pragma once

namespace mxd {

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

} // namespace mxd
