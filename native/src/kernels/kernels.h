// The kernels of each instruction set: all that the rest of the library sees of them.
#pragma once

#include "call/plan.h"

namespace mxd {

// One direction of an operator. False: no memory for scratch.
typedef bool Kernel(const Call &call, const Plan &plan);

struct Kernels {
    Kernel *forward, *backward;
};

// `kernels` by Operator, and prepare()'s copy_elements. A library has those that it is built with.
#define MXD_DECLARE(isa)                                                                                                       \
    namespace isa {                                                                                                            \
    extern const Kernels kernels[];                                                                                            \
    void copy_elements(const Tensor &t, bool as_doubles, char *to);                                                            \
    }
MXD_DECLARE(baseline)
MXD_DECLARE(avx2)
MXD_DECLARE(avx512)
#undef MXD_DECLARE

} // namespace mxd
