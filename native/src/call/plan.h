// A plan says how a call is computed. make_plan() makes the plan, and kernels switch on its fields.
#pragma once

#include "call/call.h"

namespace mxd {

// Lists of rows have groups of ROWS samples. A part of a head begins at a multiple of ROWS samples.
constexpr int ROWS = 4;

// How the gradient of value is shared among workers. A worker owns a head, a part or a band, and nobody else adds to its rows.
// So no addition is atomic, and additions have the order of the queries for any number of threads.
enum class ValueGradient {
    NOT_WANTED,
    WITH_SAMPLES, // a worker owns a head; the same pass computes the gradients of locations and weights
    BY_HEADS,     // a worker owns a head
    BY_PARTS,     // a worker owns a part of a head: some of its levels
    BY_BANDS,     // a worker owns a band: a range of rows of a head (deformable_aggregation: of all channels)
};

// The levels of a head that are packed: copied so that their rows are contiguous. In value the rows of a head are about a
// kilobyte apart, so they use only an eighth of the sets of a cache.
struct PackedLevels {
    const int64_t *offset;      // where the packed rows of each level begin, in bytes; -1 if the level is not packed
    int64_t bytes;              // the size of all packed rows of a head; 0 if no level is packed
    int64_t far_begin, far_end; // the forward prefetches rows of levels far_begin..far_end-1, and no others
    int64_t far_row_bytes, near_row_bytes;
};

// Fields that a call does not use are zero.
struct Plan {
    PackedLevels packed_value; // for the forward, and for the separate pass for the gradients of samples
    // If true, packed rows of value are widened to the computed type: in the forward the rows of near levels, in the backward
    // all packed rows.
    bool near_as_computed;
    bool sample_gradients; // true if a separate pass computes the gradients of samples
    ValueGradient value_gradient;
    // The levels of grad_value that are summed in packed rows of the computed type. WITH_SAMPLES: either all rows of value and
    // of grad_value are packed in this way, or none.
    PackedLevels packed_gradient;
    bool all_rows_are_packed;   // BY_HEADS, WITH_SAMPLES: if true, grad_value is written once, at the end, and needs no memset
    int64_t heads_together;     // with a window: how many heads are processed together; 0 if they are processed one by one
    int64_t parts;              // BY_PARTS: the number of parts of each head
    const int64_t *band_starts; // BY_BANDS: the first row of each band, and then the end of the last band
    int64_t num_bands;
    bool band_is_buffered; // BY_BANDS: if true, a band is summed in a buffer, and then converted and copied to grad_value
};

} // namespace mxd
