"""Lifting by depth: the view transform of BEVDet, BEVDepth, BEVFusion, FlashOcc and most occupancy models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from .._operator.description import OPERATORS, POOL
from ._arguments import explain_arguments, prepare
from ._pooling import check, gradients, inputs_of

__all__ = ["BEVPoolV3", "bev_pool_v3"]

_op = torch.ops.mx_driving.bev_pool_v3.default  # bound at import, which saves 0.4 us per call


@functools.partial(explain_arguments, check=check)
def bev_pool_v3(
    depth: Tensor | None,
    feat: Tensor,
    ranks_depth: Tensor | None,
    ranks_feat: Tensor | None,
    ranks_bev: Tensor,
    bev_feat_shape: Sequence[int],
) -> Tensor:
    """Sum camera features over the points in each cell of a bird's-eye view.

        out[cell(ranks_bev[i])] += depth[ranks_depth[i]] * feat[ranks_feat[i]]    for each point i

    Ranks are indices of depth's elements, feat's rows and cells in memory order: cell ((b * D + d) * H + h) * W + w. Points may
    come in any order; the sum is fastest if they are sorted by cell, as in most models.

    Without depth, rows of feat are summed as they are: depth, ranks_depth and ranks_feat are None, and point i reads row i.

    Args:
        depth: [B, N, D', H', W'] or any shape, the share of a pixel's feature at each depth. float32, float64, float16 or
            bfloat16; or None.
        feat: [B, N, H', W', C] or any shape whose last axis is C, one row for each pixel. Any of the same dtypes. Without
            depth, any shape; memory is read as rows of C elements.
        ranks_depth: [n], the element of depth of each point. int32 or int64; or None.
        ranks_feat: [n], the row of feat of each point. int32 or int64; or None.
        ranks_bev: [n], the cell of each point. int32 or int64. Without depth [n, 4], its (h, w, d, b).
        bev_feat_shape: (B, D, H, W, C) of the bird's-eye view.

    Gradients: of depth and feat, each in its input's dtype; differentiable twice. Sums are in float32 (float64 if an input is
    float64), and bitwise repeatable on a CPU for any number of threads. NaN and infinity propagate to their cells.

    Returns:
        [B, C, D, H, W], contiguous, in feat's dtype (float32 under autocast). A cell without points is zero.

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not allowed.
        ValueError: shapes do not agree, devices differ, the output would have 2**48 elements, or (on a CPU) a rank has no
            element, row or cell.

    Source: Huang and Huang, "BEVPoolv2", 2022; same numbers as its CUDA kernel and as the vendor's operator.

    >>> import torch, mx_driving
    >>> depth, feat = torch.tensor([0.25, 0.75]), torch.tensor([[4.0]])  # one pixel, two depths
    >>> rank = torch.tensor([0, 1])
    >>> mx_driving.bev_pool_v3(depth, feat, rank, torch.tensor([0, 0]), rank, (1, 1, 1, 2, 1))
    tensor([[[[[1., 3.]]]]])
    """
    inputs = inputs_of(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape)
    return _op(*prepare(OPERATORS[POOL], inputs))


class BEVPoolV3(torch.autograd.Function):
    """The operator as the vendor's autograd function: `BEVPoolV3.apply(...)` returns [B, D, H, W, C], channels last."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Call the public function, channels last, unless a derived class overrides forward or backward."""
        if cls.forward is BEVPoolV3.forward and cls.backward is BEVPoolV3.backward:
            return bev_pool_v3(*args, **kwargs).permute(0, 2, 3, 4, 1)
        return super().apply(*args, **kwargs)

    @staticmethod
    def forward(
        ctx: Any,
        depth: Tensor | None,
        feat: Tensor,
        ranks_depth: Tensor | None,
        ranks_feat: Tensor | None,
        ranks_bev: Tensor,
        bev_feat_shape: Sequence[int],
    ) -> Tensor:
        """Save the inputs in ctx, and return the output, channels last."""
        # Save the inputs in the vendor's order, because a derived class may have a backward of its own.
        ctx.save_for_backward(depth, feat, ranks_feat, ranks_depth, ranks_bev)
        with _dispatch.functions.without_graph():
            return bev_pool_v3(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape).permute(0, 2, 3, 4, 1)

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of depth and feat, and None for the other inputs. grad_out is [B, D, H, W, C]."""
        depth, feat, ranks_feat, ranks_depth, ranks_bev = ctx.saved_tensors
        # Like the vendor's backward, record no graph if ctx is not torch's own.
        by_torch = isinstance(getattr(ctx, "needs_input_grad", None), tuple)
        with torch.set_grad_enabled(by_torch and torch.is_grad_enabled()):
            return (*gradients(grad_out, depth, feat, ranks_depth, ranks_feat, ranks_bev), None, None, None, None)
