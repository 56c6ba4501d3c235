// What is done to a call before it is planned: its levels are read from their tables, and value is copied where kernels
// cannot read it as it lies.
#pragma once

#include <memory>
#include <vector>

#include "call/call.h"

namespace mxd {

// Owns what a prepared call points to.
struct Prepared {
    std::vector<Level> levels;
    std::unique_ptr<char[]> value;
};

// Sets the levels of a checked call; MXD_BAD_LEVEL when one does not fit.
int prepare_levels(Call &call, Prepared &prepared);

// Describes value as kernels read it: channels contiguous, and double as soon as one input is. If value is not so
// already, the data is yet to be copied, by prepare_value(). A value widened here saves a copy of each kernel for every
// other dtype computed with in double.
mxd_tensor readable_value(const Call &call);
int prepare_value(Call &call, Prepared &prepared); // copies it; MXD_OUT_OF_MEMORY

// Requests huge pages for the results.
void prefer_huge_pages(const Call &call);

// The number at an offset of an index table.
int64_t element(const mxd_tensor &table, int64_t offset);

// For a caller with memory of its own for a copy of value with contiguous channels.
bool channels_lie_apart(const mxd_tensor &value, int axes);
int64_t contiguous_bytes(const mxd_tensor &value, int axes);
void make_contiguous(mxd_tensor &value, int axes, char *memory);

} // namespace mxd
