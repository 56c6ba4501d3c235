// The list of kernels.
#include "kernels/kernels.h"

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

} // namespace mxd::MXD_ISA
