// Registers the operators with PyTorch when the library mx_driving_torch is loaded. A program that links the CMake target
// mx_driving::torch compiles this file into itself, and registers them when it starts.
#include <cstdio>

#include "mx_driving_torch.h"

namespace {

#ifndef _MSC_VER
__attribute__((constructor)) // a static object with a constructor crashes Zig 0.17.1, which links the library for macOS
#endif
void register_all() {
    const char *const why = mxd_register_with_torch(MXD_TORCH_ALL);
    if (why) std::fprintf(stderr, "mx_driving: %s\n", why); // a constructor of a library has no other way to report an error
}

#ifdef _MSC_VER
const bool registered = (register_all(), true);
#endif

} // namespace
