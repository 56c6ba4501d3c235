// The ranks of bev_pool_v3: which row of feat and which element of depth a point reads, and which cell it is added to.
#pragma once

#include <string>

#include "call/call.h"

namespace mxd {

// Whether every rank has its row. A call of another operator has no ranks.
bool ranks_fit(const Call &call);

// What is wrong with the first rank that does not fit, which `ranks_fit` found.
std::string fault_of_ranks(const Call &call);

} // namespace mxd
