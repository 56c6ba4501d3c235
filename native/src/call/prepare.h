// What is done to a checked call before it is planned.
#pragma once

#include <memory>
#include <vector>

#include "call/call.h"

namespace mxd {

// Owns what a prepared call points to.
struct Prepared {
    static constexpr int64_t FEW = 32;
    Level few_levels[FEW];
    std::vector<Level> more_levels;
    std::unique_ptr<char[]> value;
};

// Reads the levels, and makes value readable: channels contiguous, and double as soon as one input is, which saves a copy
// of each kernel for every other dtype computed with in double. Requests huge pages for the results. MXD_BAD_LEVEL when a
// level does not fit, MXD_BAD_RANK, MXD_OUT_OF_MEMORY. reads_value: else only a plan is made, and value is described as it
// would be.
int prepare(Call &call, Prepared &prepared, bool reads_value);

// Whether nothing is to be written. No kernel may go through the queries then: expanded inputs take no memory and can
// have more queries than anyone can wait for.
bool nothing_to_do(const Call &call);

// One level from the tables. They are not checked.
Level read_level(const Call &call, int64_t camera, int64_t scale);
bool level_fits(const Level &level, int64_t keys);

// For a caller with memory of its own for a copy of value with contiguous channels.
bool channels_lie_apart(const Tensor &value);
int64_t contiguous_bytes(const Tensor &value);
void make_contiguous(Tensor &value, char *memory);

} // namespace mxd
