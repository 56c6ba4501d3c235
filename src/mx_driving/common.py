"""The vendor's oldest path, `mx_driving.common`."""

import warnings

from ._foreign.absent import explain_missing
from .ops.multi_scale_deformable_attn import npu_multi_scale_deformable_attn_function

warnings.warn("mx_driving.common is deprecated: import from mx_driving", DeprecationWarning, stacklevel=2)

__all__ = ["npu_multi_scale_deformable_attn_function"]

__getattr__ = explain_missing(__name__)
