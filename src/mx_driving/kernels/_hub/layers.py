"""The layers of the repository."""

try:
    from mx_driving.kernels import MultiScaleDeformableAttention
    from mx_driving.ops.multi_scale_deformable_attn import multi_scale_deformable_attn
except ImportError as missing:
    raise ImportError("This kernel needs mx_driving's operators: install mx-driving-portable") from missing

__all__ = ["MultiScaleDeformableAttention", "multi_scale_deformable_attn"]
