// Launches kernels that Triton has compiled, without Python. _backends/triton/from_cpp.py hands the kernels over.
#pragma once

#include <array>

#include "call/check.h"

namespace mxd::torch {

// A compiled kernel. A program (Triton's word for a block of threads) has `threads` threads and `shared` bytes of shared
// memory, and serves `rows` queries of one head. A thread reads `lane` neighbouring channels at once, so the kernel takes
// strides in units of `lane` channels.
struct GpuKernel {
    void *function = nullptr;
    unsigned threads = 0, shared = 0;
    int64_t rows = 1, lane = 1;
};

// A call of an attention operator, of its backward, or of its forward with logits. Its shapes and dtypes are already checked.
class GpuCall {
  public:
    // `device` is torch's number; `variant` encodes the option, the dtype of the output, and the gradients that are needed.
    GpuCall(const Function &, TensorInfo *, const AxisSizes &, int device, int64_t variant);

    // Returns false if Python must serve the call. If only the kernel is missing, a kernel that this thread hands over before
    // stop_waiting() is kept for calls like this one.
    bool find_kernel();
    // Launches the kernel. The results must have memory, and the gradient of value must be float32.
    void launch();

  private:
    const Function &function;
    TensorInfo *const infos;
    const AxisSizes &sizes;
    const int device;
    const int64_t variant;
    GpuKernel kernel;
    int64_t programs = 0;

    int64_t size(sizes::Name name) const { return sizes.of[name]; }
    std::array<int64_t, 3> strides_of_value() const;
    bool is_usual() const;
};

void stop_waiting();

// Registers the CUDA kernels with torch. Defined in operators.cpp.
void register_gpu_kernels();

} // namespace mxd::torch
