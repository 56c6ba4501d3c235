// The one list of kernels.
#include "kernels/kernels.h"

namespace mxd::MXD_ISA {

Kernel multi_scale_deformable_attn, multi_scale_deformable_attn_backward;
Kernel deformable_aggregation, deformable_aggregation_backward;
Kernel geometric_kernel_attention, geometric_kernel_attention_backward;

const Kernels kernels[] = {
    {multi_scale_deformable_attn, multi_scale_deformable_attn_backward},
    {deformable_aggregation, deformable_aggregation_backward},
    {geometric_kernel_attention, geometric_kernel_attention_backward},
};

} // namespace mxd::MXD_ISA
