"""The vendor's older path `mx_driving.point`."""

import warnings

from ._foreign.absent import explain_missing
from .ops.bev_pool import bev_pool
from .ops.bev_pool_v2 import bev_pool_v2
from .ops.bev_pool_v3 import bev_pool_v3
from .ops.multi_scale_deformable_attn import npu_multi_scale_deformable_attn_function
from .ops.voxel_pooling_train import npu_voxel_pooling_train

warnings.warn("mx_driving.point is deprecated: import from mx_driving", DeprecationWarning, stacklevel=2)

__all__ = ["bev_pool", "bev_pool_v2", "bev_pool_v3", "npu_multi_scale_deformable_attn_function", "npu_voxel_pooling_train"]

__getattr__ = explain_missing(__name__)
