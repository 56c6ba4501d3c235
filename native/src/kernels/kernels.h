// The kernels of each instruction set. The rest of the library includes only this header of kernels/.
#pragma once

#include "call/plan.h"

namespace mxd {

// The forward or the backward of an operator. Returns false if memory runs out.
typedef bool Kernel(const Call &call, const Plan &plan);

struct Kernels {
    Kernel *forward, *backward;
};

// Each array `kernels` is indexed by Operator. A library has only the instruction sets that it was built with.
namespace baseline {
extern const Kernels kernels[];
void copy_elements(const Tensor &t, bool as_doubles, char *to); // used by prepare()
} // namespace baseline
namespace avx2 {
extern const Kernels kernels[];
}
namespace avx512 {
extern const Kernels kernels[];
}

} // namespace mxd
