// Index tables: levels, and the ranks of bev_pool_v3. All entries are checked before any is used.
#pragma once

#include <string>

#include "call/call.h"

namespace mxd {

// Reads one level from the tables, without a check.
Level read_level(const Call &call, int64_t camera, int64_t scale);
bool level_fits(const Level &level, int64_t keys);

// Returns whether all ranks are in range. True for operators without ranks.
bool ranks_fit(const Call &call);

// Return an error sentence about the first level or rank that is out of range, or "". `shapes` and `starts` name the tables.
std::string fault_of_levels(const Call &call, const std::string &shapes, const std::string &starts);
std::string fault_of_ranks(const Call &call);

} // namespace mxd
