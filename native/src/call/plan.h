// How a call is done: what make_plan.h decides, and kernels switch on.
#pragma once

#include "call/call.h"

namespace mxd {

// Lists of rows take as many samples together. So a part of a head begins at a multiple of it.
constexpr int ROWS = 4;

// Ways to the gradient of value, and what a worker owns in each. Nobody else adds to its rows, so no addition is
// atomic, and additions come in the order of the queries for any number of threads.
enum class ValueGradient {
    NOT_WANTED,
    WITH_SAMPLES, // a head; together with the gradients of locations and weights
    BY_HEADS,     // a head
    BY_PARTS,     // a part: some levels of a head
    BY_BANDS,     // a band: a range of rows of a head; deformable_aggregation: of all channels
};

// Levels of one head that get memory of their own, where their rows lie side by side. In value the rows of a head lie
// about a kilobyte apart, so that they use an eighth of the caches' sets.
struct PackedLevels {
    const int64_t *offset;      // for each level, in bytes; -1: not packed
    int64_t bytes;              // of all; 0: nothing is packed
    int64_t far_begin, far_end; // the forward prefetches rows of levels far_begin..far_end-1; those of others stay near
    int64_t far_row_bytes, near_row_bytes;
};

// Where a field is of no use to the way that is taken, it is zero.
struct Plan {
    PackedLevels packed_value; // read by the forward and by the gradients of samples in a pass of their own
    bool near_as_computed;     // packed rows are of the type computed in, not of value's: of near levels, backward of all
    bool sample_gradients;     // in a pass of their own
    ValueGradient value_gradient;
    PackedLevels packed_gradient; // BY_HEADS: a copy for each thread; WITH_SAMPLES: and one of value, all rows or none,
                                  // of the type computed in
    bool all_rows_are_packed;     // the same two: so grad_value is written once, and need not be set to zero before
    int64_t heads_together;       // around a window; 0: one head after the other
    int64_t parts;                // BY_PARTS: of each head
    const int64_t *band_starts;   // BY_BANDS: num_bands + 1 rows of value
    int64_t num_bands;
    bool band_is_buffered; // BY_BANDS: added up beside grad_value, and converted once
};

} // namespace mxd
