"""The attention modules published around the operators, with the parameter names of their checkpoints."""

from ._layers import flatten_cameras, flatten_levels
from .deformable_aggregation import DeformableFeatureAggregation
from .geometric_kernel_attention import GeometricKernelAttention
from .multi_scale_deformable_attn import MultiScaleDeformableAttention
from .spatial_cross_attention import MSDeformableAttention3D, SpatialCrossAttention
from .temporal_self_attention import TemporalSelfAttention

__all__ = [
    "DeformableFeatureAggregation",
    "GeometricKernelAttention",
    "MSDeformableAttention3D",
    "MultiScaleDeformableAttention",
    "SpatialCrossAttention",
    "TemporalSelfAttention",
    "flatten_cameras",
    "flatten_levels",
]
