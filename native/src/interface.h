// What both C interfaces call: the functions of mx_driving.h, and CANN's two phases.
#pragma once

#include "call/call.h"

namespace mxd {

// Checks a call, prepares and plans it, and runs the kernel of the instruction set in use. Returns a status. It changes
// the call, so a call is run once.
int run(Call &call);

} // namespace mxd
