// Runs calls for all bindings: the C functions, PyTorch's kernels, onnxruntime's nodes and CANN's phases.
#pragma once

#include <exception>
#include <string>

#include "call/check.h"

namespace mxd {

// Prepares and plans a call, and runs the kernel of the instruction set in use. `fits` must have returned true for the tensors
// of the call. Returns an mxd_status. Changes the call, so a call can run only once.
int run(Call &call);

// Returns the error sentence for a status that `run` returned.
std::string sentence_of(int status, const Function &function, const Call &call);

const char *isa_in_use();
// Returns false if this library or machine does not have the instruction set.
bool use_isa(const char *name);

template <class Fn> int out_of_memory_if_thrown(Fn &&fn) {
    try {
        return fn();
    } catch (const std::exception &) { // no memory for a list, or a list is longer than its type allows
        return MXD_OUT_OF_MEMORY;
    }
}

} // namespace mxd
