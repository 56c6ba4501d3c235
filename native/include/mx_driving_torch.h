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
    MXD_TORCH_KERNELS = 1, /* only CPU kernels: the Python package has schemas and meta kernels */
    MXD_TORCH_NOTHING = 2  /* nothing: the Python package has them all */
};

/* Registers the parts that `what` (an mxd_torch) names, if they are missing. Withdraws parts that the Python package provides.
 * Returns NULL, or an error sentence, for example if libtorch is not loaded or is older than 2.10. The sentence is valid until
 * this thread's next call. May be called several times, from any thread, before or after the Python package is imported. */
MXD_API const char *mxd_register_with_torch(int what);

/* Only for the Python package, which compiles the kernels for NVIDIA's GPUs. mxd_launch_on_gpu takes the functions of CUDA's
 * driver and of torch that launch kernels. mxd_keep_gpu_kernel takes a compiled kernel. */
MXD_API const char *mxd_launch_on_gpu(const void *const *functions);
MXD_API void mxd_keep_gpu_kernel(void *function, unsigned threads, unsigned shared, int64_t rows, int64_t lane);

#ifdef __cplusplus
}
#endif

#endif
