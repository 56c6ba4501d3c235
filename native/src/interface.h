// What the C interfaces share below their own signatures.
#pragma once

#include "call.h"

namespace mxd {

// value, locations, weights and output (backward: its gradient) are set, and the wanted gradients; the rest is filled
// in here.
int attention(bool geometric, bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts);
int aggregation(bool backward, Call &call, const mxd_tensor &shapes, const mxd_tensor &starts);

} // namespace mxd
