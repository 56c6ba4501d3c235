// What is done to a checked call before it is planned.
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

// Reads the levels; MXD_BAD_LEVEL when one does not fit.
int prepare_levels(Call &call, Prepared &prepared);

// Describes value as kernels read it: channels contiguous, and double as soon as one input is, which saves a copy of
// each kernel for every other dtype computed with in double. The data is yet to be copied, if value was not so already.
Tensor readable_value(const Call &call);

// Copies value where kernels cannot read it as it lies, and requests huge pages for the results. MXD_OUT_OF_MEMORY.
int prepare_memory(Call &call, Prepared &prepared);

// One level from the tables. They are not checked.
Level read_level(const Call &call, int64_t camera, int64_t scale);
bool level_fits(const Level &level, int64_t keys);

// For a caller with memory of its own for a copy of value with contiguous channels.
bool channels_lie_apart(const Tensor &value);
int64_t contiguous_bytes(const Tensor &value);
void make_contiguous(Tensor &value, char *memory);

} // namespace mxd
