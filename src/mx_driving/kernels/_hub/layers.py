"""The layers of the repository."""

try:
    from mx_driving.kernels import MultiScaleDeformableAttention
    from mx_driving.ops.multi_scale_deformable_attn import multi_scale_deformable_attn
except ImportError as missing:
    raise ImportError("This kernel runs on mx_driving's operators: the package mx-driving-portable must be installed") from missing

__all__ = ["MultiScaleDeformableAttention", "multi_scale_deformable_attn"]
