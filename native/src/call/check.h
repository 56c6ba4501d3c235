// What memory safety needs of a caller's tensors.
#pragma once

#include "call/call.h"

namespace mxd {

// Shapes and dtypes; levels are checked when they are read. Returns a status.
int check(const Call &call);

// Whether a query has more samples than any memory has room for.
bool query_is_too_large(const Call &call);

} // namespace mxd
