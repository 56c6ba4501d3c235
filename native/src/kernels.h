// The kernels, once per instruction set.
#pragma once

#include "tensor.h"

namespace mxd {
namespace MXD_ISA {

// False: no memory for scratch.
bool multi_scale_deformable_attn(const Call &call);
bool multi_scale_deformable_attn_backward(const Call &call);
bool deformable_aggregation(const Call &call);
bool deformable_aggregation_backward(const Call &call);
bool geometric_kernel_attention(const Call &call);
bool geometric_kernel_attention_backward(const Call &call);

namespace {

// fn(V*, T*) for the storage type of value and the type computed in.
template <class Fn> inline bool with_types(const Call &call, Fn &&fn) {
    float *const single = nullptr;
    double *const wide = nullptr;
    switch (call.value.dtype) {
    case MXD_FLOAT64:
        return fn(wide, wide);
    case MXD_FLOAT16:
        return fn(static_cast<Half *>(nullptr), single);
    case MXD_BFLOAT16:
        return fn(static_cast<BFloat16 *>(nullptr), single);
    default:
        return fn(single, single);
    }
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
