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
bool gather_floor(const Call &call);

namespace {

// fn(V*, T*) for the storage type of value and the type computed in: double as soon as one input is double.
template <class Fn> inline bool with_types(const Call &call, Fn &&fn) {
    const bool wide =
        call.value.dtype == MXD_FLOAT64 || call.locations.dtype == MXD_FLOAT64 || call.weights.dtype == MXD_FLOAT64;
    const auto with = [&](auto *v) {
        typedef __typeof__(*v) V;
        if constexpr (!same_type<V, double>)
            if (!wide) return fn(v, static_cast<float *>(nullptr));
        return fn(v, static_cast<double *>(nullptr));
    };
    switch (call.value.dtype) {
    case MXD_FLOAT64:
        return with(static_cast<double *>(nullptr));
    case MXD_FLOAT16:
        return with(static_cast<Half *>(nullptr));
    case MXD_BFLOAT16:
        return with(static_cast<BFloat16 *>(nullptr));
    default:
        return with(static_cast<float *>(nullptr));
    }
}

} // namespace
} // namespace MXD_ISA
} // namespace mxd
