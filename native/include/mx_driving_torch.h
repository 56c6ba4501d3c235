/* The operators for PyTorch in programs of C++: torch.export's packages (AOTInductor), traced and scripted modules.
 *
 * Linking with the CMake target mx_driving::torch, or loading its library (python -m mx_driving.config --torch-library), is
 * enough: the operators are registered when it is loaded, which is after libtorch. A program that links with
 * mx_driving::mx_driving alone calls mxd_register_with_torch itself.
 *
 * torch 2.10 or later, of any build: nothing here is compiled or linked against it. Operators run forward and backward on the
 * CPU; formulas for autograd are those of the Python package.
 */
#ifndef MX_DRIVING_TORCH_H
#define MX_DRIVING_TORCH_H

#include "mx_driving.h"

#ifdef __cplusplus
extern "C" {
#endif

enum mxd_torch {
    MXD_TORCH_ALL = 0,     /* schemas, kernels for the CPU, and shapes of results for tracing */
    MXD_TORCH_KERNELS = 1, /* the Python package, which has schemas and shapes of its own */
    MXD_TORCH_NOTHING = 2  /* the Python package, where it has kernels of its own, too */
};

/* Registers what is not registered yet, and takes back what the Python package brings. Returns NULL, or why it cannot, a
 * sentence that stays until this thread's next call: libtorch is not loaded, or it is older than 2.10. Calls in any order,
 * from any thread, before or after the Python package is imported. */
MXD_API const char *mxd_register_with_torch(int what);

#ifdef __cplusplus
}
#endif

#endif
