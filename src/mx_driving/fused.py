"""The vendor's older path `mx_driving.fused`."""

import warnings

from ._foreign.absent import explain_missing
from .ops.geometric_kernel_attention import npu_geometric_kernel_attention
from .ops.multi_scale_deformable_attn import (
    MultiScaleDeformableAttnFunction,
    multi_scale_deformable_attn,
    npu_multi_scale_deformable_attn_function,
)
from .ops.npu_deformable_aggregation import npu_deformable_aggregation

warnings.warn("mx_driving.fused is deprecated: import from mx_driving", DeprecationWarning, stacklevel=2)

npu_geometric_kernel_attention_func = npu_geometric_kernel_attention

__all__ = [
    "MultiScaleDeformableAttnFunction",
    "multi_scale_deformable_attn",
    "npu_deformable_aggregation",
    "npu_geometric_kernel_attention",
    "npu_geometric_kernel_attention_func",
    "npu_multi_scale_deformable_attn_function",
]

__getattr__ = explain_missing(__name__)
