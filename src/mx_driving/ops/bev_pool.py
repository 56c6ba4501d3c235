"""`bev_pool_v3` without depth, as BEVFusion calls it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._operator.description import OPERATORS, POOL
from .._operator.rules import INDEX, INDEX_RULE, need_dtype, need_one_device, need_shape, need_tensors
from ._arguments import explain_arguments, prepare
from ._pooling import check, inputs_of

__all__ = ["bev_pool"]

_op = torch.ops.mx_driving.bev_pool_v3.default  # bound at import, which saves 0.4 us per call


def _check_places(feat: Tensor, geom_feat: Tensor) -> None:
    need_tensors(("feat", feat), ("geom_feat", geom_feat))
    need_dtype("geom_feat", geom_feat, INDEX, INDEX_RULE)
    need_shape("geom_feat", geom_feat, "n, 4", None, 4)
    need_shape("feat", feat, "n, C", geom_feat.shape[0], None)
    need_one_device(("feat", feat), ("geom_feat", geom_feat))


def _check(feat: Tensor, geom_feat: Tensor, *sizes: int) -> None:
    _check_places(feat, geom_feat)
    check(None, feat, None, None, geom_feat, (*sizes, feat.shape[1]), voxels="geom_feat")


@functools.partial(explain_arguments, check=_check)
def bev_pool(feat: Tensor, geom_feat: Tensor, B: int, D: int, H: int, W: int) -> Tensor:
    """Sum the rows of feat over the points in each cell.

    Args:
        feat: [n, C], a row for each point. float32, float64, float16 or bfloat16.
        geom_feat: [n, 4], (h, w, d, b) of each point's cell. int32 or int64.
        B, D, H, W: the number of cells along each axis.

    Gradients: of feat; as for `bev_pool_v3`.

    Returns:
        [B, C, D, H, W], in feat's dtype.

    Raises:
        TypeError, ValueError: as `bev_pool_v3`; ValueError also if feat and geom_feat differ in their number of rows.

    >>> import torch, mx_driving
    >>> mx_driving.bev_pool(torch.ones(2, 1), torch.tensor([[0, 1, 0, 0], [0, 1, 0, 0]]), 1, 1, 1, 2)
    tensor([[[[[0., 2.]]]]])
    """
    _check_places(feat, geom_feat)
    inputs = inputs_of(None, feat, None, None, geom_feat, (B, D, H, W, feat.shape[1]))
    return _op(*prepare(OPERATORS[POOL], inputs))
