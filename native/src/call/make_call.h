// A call from the arguments of a C function.
#pragma once

#include "call/call.h"

namespace mxd {

struct Function {
    Operator op;
    bool with_logits, backward;
};

// The function of this name, without "mxd_". False: there is none.
bool find_function(const char *name, Function &function);

// arguments: the function's tensors, in order; null for one that is not given or not wanted. A caller with reference
// points sets `reference_by_point`.
Call make_call(const Function &function, const mxd_tensor *const *arguments, int num_threads);

} // namespace mxd
