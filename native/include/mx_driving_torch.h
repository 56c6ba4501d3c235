/* The operators for PyTorch in C++ programs: packages of torch.export (AOTInductor), traced and scripted modules.
 *
 * A program either links the CMake target mx_driving::torch, or loads its library (python -m mx_driving.config
 * --torch-library) after libtorch. Loading registers the operators. A program that links only mx_driving::mx_driving calls
 * mxd_register_with_torch itself.
 *
 * Any build of torch 2.10 or later works, because nothing is compiled or linked against torch. The operators run forward and
 * backward on the CPU. The formulas for autograd are in the Python package.
 */
#ifndef MX_DRIVING_TORCH_H
#define MX_DRIVING_TORCH_H

#include "mx_driving.h"

#ifdef __cplusplus
extern "C" {
#endif

enum mxd_torch {
    MXD_TORCH_ALL = 0,     /* schemas, CPU kernels, and meta kernels for tracing */
    MXD_TORCH_KERNELS = 1, /* CPU kernels: for the Python package, which has the schemas and shapes */
    MXD_TORCH_NOTHING = 2  /* nothing: for the Python package when it also has kernels */
};

/* Registers missing operators, and withdraws those that Python now provides. Returns NULL, or an error sentence if libtorch is
 * not loaded or is older than 2.10. The sentence is valid until this thread's next call. May be called several times, from
 * any thread, before or after the Python package is imported. */
MXD_API const char *mxd_register_with_torch(int what);

/* For the Python package alone, which compiles the kernels of NVIDIA's GPUs. The first function takes the driver's functions
 * that launch kernels. The second takes a compiled kernel. */
MXD_API const char *mxd_launch_on_gpu(const void *const *functions);
MXD_API void mxd_keep_gpu_kernel(void *function, unsigned threads, unsigned shared, int64_t rows, int64_t lane);

#ifdef __cplusplus
}
#endif

#endif
