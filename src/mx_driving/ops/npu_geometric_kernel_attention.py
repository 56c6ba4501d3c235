"""The vendor's older path of geometric kernel attention."""

from .geometric_kernel_attention import GeometricKernelAttentionFunc, npu_geometric_kernel_attention

__all__ = ["GeometricKernelAttentionFunc", "npu_geometric_kernel_attention"]
