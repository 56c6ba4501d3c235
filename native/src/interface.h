// What the C interfaces share below their own signatures.
#pragma once

#include "call.h"

namespace mxd {

// Checks a call, prepares and plans it, and runs the kernel of the instruction set in use. Returns a status; the call
// is used up.
int run(Call &call);

} // namespace mxd
