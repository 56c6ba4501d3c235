"""mx_driving's multi-scale deformable attention as a kernel repository. `mx_driving.kernels.write` copies this folder."""

from . import layers
from .layers import multi_scale_deformable_attn

__all__ = ["layers", "multi_scale_deformable_attn"]
