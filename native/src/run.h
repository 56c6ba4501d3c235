// What all bindings call: the C functions, onnxruntime's nodes and CANN's two phases.
#pragma once

#include <exception>
#include <string>

#include "call/check.h"

namespace mxd {

// Prepares and plans a call whose tensors fit, and runs the kernel of the instruction set in use. Returns a status. It
// changes the call, so a call is run once.
int run(Call &call);

// What is wrong, where `run` returned this status for a call of this function.
std::string sentence_of(int status, const Function &function, const Call &call);

const char *isa_in_use();
// False: this library or machine does not have it.
bool use_isa(const char *name);

template <class Fn> int out_of_memory_if_thrown(Fn &&fn) {
    try {
        return fn();
    } catch (const std::exception &) { // a list of levels that is too long
        return MXD_OUT_OF_MEMORY;
    }
}

} // namespace mxd
