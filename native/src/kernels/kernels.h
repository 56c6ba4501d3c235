// The kernels of each instruction set: all that the rest of the library sees of them.
#pragma once

#include "call/plan.h"

namespace mxd {

// One direction of an operator. False: no memory for scratch.
typedef bool Kernel(const Call &call, const Plan &plan);

struct Kernels {
    Kernel *forward, *backward;
};

// By Operator. A library has those that it is built with.
namespace baseline {
extern const Kernels kernels[];
void copy_elements(const Tensor &t, bool as_doubles, char *to); // prepare()'s
} // namespace baseline
namespace avx2 {
extern const Kernels kernels[];
}
namespace avx512 {
extern const Kernels kernels[];
}

} // namespace mxd
