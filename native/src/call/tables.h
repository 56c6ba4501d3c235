// Index tables: levels, and the ranks of bev_pool_v3. They are read once per call, and checked before any is used.
#pragma once

#include <string>

#include "call/call.h"

namespace mxd {

// One level from the tables. It is not checked.
Level read_level(const Call &call, int64_t camera, int64_t scale);
bool level_fits(const Level &level, int64_t keys);

// Whether every rank has its row. A call of another operator has no ranks.
bool ranks_fit(const Call &call);

// The sentence about the first level, or rank, that does not fit; empty if all do. `shapes` and `starts` name the tables.
std::string fault_of_levels(const Call &call, const std::string &shapes, const std::string &starts);
std::string fault_of_ranks(const Call &call);

} // namespace mxd
