"""`bev_pool_v3` as BEVDepth calls it: every point of a frustum has a feature and a voxel, which may lie outside the grid."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .. import _torch_private
from .._operator.rules import FLOATING, FLOATING_RULE, INDEX, INDEX_RULE, fail, need_dtype, need_one_device, need_tensors
from ._arguments import explain_arguments
from ._pooling import points_inside, sizes_of
from .bev_pool_v3 import bev_pool_v3

__all__ = ["npu_voxel_pooling_train"]


@explain_arguments
def npu_voxel_pooling_train(geom_xyz: Tensor, input_features: Tensor, voxel_num: Sequence[int] | Tensor) -> Tensor:
    """Sum the features of the points above each cell of the ground. Points outside the grid are ignored.

    Args:
        geom_xyz: [B, ..., 3], the voxel (x, y, z) of each point. int32 or int64.
        input_features: [B, ..., C], the feature of each point. float32, float64, float16 or bfloat16.
        voxel_num: (X, Y, Z), the number of voxels along each axis.

    Gradients: of input_features; as for `bev_pool_v3`.

    Returns:
        [B, C, Y, X], in input_features' dtype.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape.

    >>> import torch, mx_driving
    >>> voxels = torch.tensor([[[0, 0, 0], [0, 0, 1], [9, 0, 0]]])
    >>> mx_driving.npu_voxel_pooling_train(voxels, torch.ones(1, 3, 1), (2, 1, 2))
    tensor([[[[2., 0.]]]])
    """
    need_tensors(("geom_xyz", geom_xyz), ("input_features", input_features))
    need_dtype("geom_xyz", geom_xyz, INDEX, INDEX_RULE)
    need_dtype("input_features", input_features, FLOATING, FLOATING_RULE)
    if geom_xyz.dim() < 3 or geom_xyz.shape[-1] != 3:
        fail(ValueError, "geom_xyz", "have shape (B, ..., 3)", tuple(geom_xyz.shape))
    points, rows = geom_xyz.shape[:-1], input_features.shape[:-1]
    if rows[:1] != points[:1] or math.prod(rows) != math.prod(points):
        shape = ", ".join(map(str, points))
        fail(ValueError, "input_features", f"have shape ({shape}, C)", tuple(input_features.shape))
    need_one_device(("input_features", input_features), ("geom_xyz", geom_xyz))
    listed = voxel_num.tolist() if isinstance(voxel_num, Tensor) else voxel_num
    X, Y, _ = sizes = sizes_of("voxel_num", listed, "three", "X, Y, Z")
    points, cells = points_inside(geom_xyz, sizes)
    extra = 1 if _torch_private.is_batched(geom_xyz) else 0  # scenes
    shape = (geom_xyz.shape[0] + extra, 1, Y, X, input_features.shape[-1])
    pooled = bev_pool_v3(input_features.new_ones(1), input_features, torch.zeros_like(points), points, cells, shape)
    return (pooled[:-1] if extra else pooled).squeeze(2)
