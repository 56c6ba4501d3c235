// The one list of kernels; and copies of value where they cannot read it as it lies.
#include "kernels/kernels.h"

#include "kernels/shared/tensor.h"

namespace mxd::MXD_ISA {

Kernel multi_scale_deformable_attn, multi_scale_deformable_attn_backward;
Kernel deformable_aggregation, deformable_aggregation_backward;
Kernel geometric_kernel_attention, geometric_kernel_attention_backward;
Kernel bev_pool_v3, bev_pool_v3_backward;

const Kernels kernels[] = {
    {multi_scale_deformable_attn, multi_scale_deformable_attn_backward},
    {deformable_aggregation, deformable_aggregation_backward},
    {geometric_kernel_attention, geometric_kernel_attention_backward},
    {bev_pool_v3, bev_pool_v3_backward},
};

void copy_elements(const Tensor &t, bool as_doubles, char *to) {
    const SomeAxes<4> all(t, {BATCH, KEY, HEAD, CHANNEL});
    if (as_doubles) return all.read(0, reinterpret_cast<double *>(to));
    const int64_t size = element_size(t.dtype);
    all.runs(0, [&](int64_t offset, int64_t stride, int64_t n, int64_t place) {
        for (int64_t i = 0; i < n; ++i) memcpy(to + (place + i) * size, at(t, offset + i * stride), size_t(size));
    });
}

} // namespace mxd::MXD_ISA
