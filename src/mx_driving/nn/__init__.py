"""The attention modules published around the three operators, with the parameter names of their checkpoints."""

from ._pyramid import flatten_cameras, flatten_levels
from .deformable_aggregation import DeformableFeatureAggregation
from .geometric_kernel_attention import GeometricKernelAttention
from .multi_scale_deformable_attn import MultiScaleDeformableAttention

__all__ = [
    "DeformableFeatureAggregation",
    "GeometricKernelAttention",
    "MultiScaleDeformableAttention",
    "flatten_cameras",
    "flatten_levels",
]
