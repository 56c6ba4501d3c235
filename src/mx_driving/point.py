"""The vendor's older path `mx_driving.point`."""

import warnings

from .ops.multi_scale_deformable_attn import npu_multi_scale_deformable_attn_function

warnings.warn("mx_driving.point is deprecated: import from mx_driving", DeprecationWarning, stacklevel=2)

__all__ = ["npu_multi_scale_deformable_attn_function"]
