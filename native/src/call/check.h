// What memory safety needs of a caller's tensors.
#pragma once

#include "call/call.h"

namespace mxd {

// Shapes, dtypes, and how much a query has; levels are checked when they are read. Returns a status. A call whose
// queries have no samples is left without queries.
int check(Call &call);

} // namespace mxd
