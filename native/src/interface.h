// What all bindings call: the C functions, onnxruntime's nodes and CANN's two phases.
#pragma once

#include <string>

#include "call/check.h"

namespace mxd {

// Prepares and plans a call whose tensors fit, and runs the kernel of the instruction set in use. Returns a status. It
// changes the call, so a call is run once.
int run(Call &call);

// What is wrong, where `run` returned this status for a call of this function.
std::string sentence_of(int status, const Function &function, const Call &call);

} // namespace mxd
