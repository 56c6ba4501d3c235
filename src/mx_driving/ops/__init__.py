"""The operators at the vendor's places: each name here is a module that holds the function of that name."""

from . import geometric_kernel_attention, multi_scale_deformable_attn, npu_deformable_aggregation

__all__ = ["geometric_kernel_attention", "multi_scale_deformable_attn", "npu_deformable_aggregation"]
