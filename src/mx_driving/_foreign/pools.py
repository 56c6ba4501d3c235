"""Pooling functions with the interface of compiled extensions: channels last, no autograd, no autocast, separate backwards.

Extensions also take the intervals of the points. Only `bev_pool_v2_forward` reads the intervals. The other functions read the
cell of every point. Their results equal the extensions' if all points of an interval have the same cell. In the backward of
bev_pool_v2 they must have the same row of feat instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .._operator.composition import without_autocast
from .._operator.rules import (
    FLOATING,
    FLOATING_RULE,
    INDEX,
    INDEX_RULE,
    fail,
    need_axes,
    need_dtype,
    need_one_device,
    need_shape,
    need_tensors,
)
from ..ops._arguments import explain_arguments
from ..ops._pooling import gradients
from ..ops.bev_pool import bev_pool
from ..ops.bev_pool_v2 import bev_pool_v2
from ..ops.bev_pool_v3 import bev_pool_v3

_v1, _v2, _v3 = without_autocast(bev_pool), without_autocast(bev_pool_v2), without_autocast(bev_pool_v3)


def check_outputs(results: Sequence[Tensor | None], outputs: dict[str, Any]) -> None:
    """Check that the caller's outputs have the shapes and devices of the results. A copy to a meta tensor would lose them."""
    for (name, out), result in zip(outputs.items(), results, strict=True):
        need_tensors((name, out))
        need_dtype(name, out, FLOATING, FLOATING_RULE)
        if result is not None and out.shape != result.shape:
            fail(ValueError, name, f"have shape {tuple(result.shape)}", tuple(out.shape))
        if result is not None:
            need_one_device(("the input", result), (name, out))


def _channels_last(out: Tensor) -> Tensor:
    return out.permute(0, 2, 3, 4, 1)


@torch.no_grad()
@explain_arguments
def bev_pool_forward(
    feat: Tensor, geom_feat: Tensor, interval_lengths: Any, interval_starts: Any, b: int, d: int, h: int, w: int
) -> Tensor:
    """Return [b, d, h, w, c]."""
    _check_intervals(interval_lengths, interval_starts)
    return _channels_last(_v1(feat, geom_feat, b, d, h, w))


@torch.no_grad()
@explain_arguments
def bev_pool_backward(grad_out: Tensor, geom_feat: Tensor, *intervals_and_sizes: Any) -> Tensor:
    """Return the gradient of feat, [n, c]."""
    need_tensors(("grad_out", grad_out), ("geom_feat", geom_feat))
    need_axes("grad_out", grad_out, "B, D, H, W, C")
    need_dtype("grad_out", grad_out, FLOATING, FLOATING_RULE)
    need_shape("geom_feat", geom_feat, "n, 4", None, 4)
    _check_intervals(*intervals_and_sizes)
    rows = grad_out.new_zeros(()).expand(geom_feat.shape[0], grad_out.shape[-1])
    return gradients(grad_out, None, rows, None, None, geom_feat)[1]


@torch.no_grad()
@explain_arguments
def bev_pool_v2_forward(
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_lengths: Tensor,
    interval_starts: Tensor,
    b: int,
    d: int,
    h: int,
    w: int,
) -> Tensor:
    """Return [b, d, h, w, c]."""
    need_tensors(("feat", feat))
    if feat.dim() == 0:
        fail(ValueError, "feat", "have shape (..., C)", ())
    shape = (b, d, h, w, feat.shape[-1])
    return _channels_last(_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, shape, interval_starts, interval_lengths))


@torch.no_grad()
@explain_arguments
def bev_pool_v3_forward(
    depth: Any, feat: Tensor, ranks_depth: Any, ranks_feat: Any, ranks_bev: Tensor, b: int, d: int, h: int, w: int
) -> Tensor:
    """Return [b, d, h, w, c]. If depth is None, c is feat.shape[1], else feat.shape[-1]."""
    need_tensors(("feat", feat))
    if feat.dim() < (2 if depth is None else 1):
        fail(ValueError, "feat", f"have shape {'(n, C)' if depth is None else '(..., C)'}", tuple(feat.shape))
    channels = feat.shape[1 if depth is None else -1]
    return _channels_last(_v3(depth, feat, ranks_depth, ranks_feat, ranks_bev, (b, d, h, w, channels)))


@torch.no_grad()
@explain_arguments
def bev_pool_v3_backward(
    grad_out: Tensor, depth: Any, feat: Tensor, ranks_depth: Any, ranks_feat: Any, ranks_bev: Tensor, *intervals_and_sizes: Any
) -> tuple[Any, Tensor]:
    """Return the gradients of depth (None without depth) and feat, for the extensions of bev_pool_v2 and bev_pool_v3."""
    _check_intervals(*intervals_and_sizes)
    return gradients(grad_out, depth, feat, ranks_depth, ranks_feat, ranks_bev)


def _check_intervals(*intervals_and_sizes: Any) -> None:
    """Check the dtypes of interval_lengths and interval_starts: the first two arguments, if the caller passes tensors."""
    for name, t in zip(("interval_lengths", "interval_starts"), intervals_and_sizes, strict=False):
        if isinstance(t, Tensor):
            need_dtype(name, t, INDEX, INDEX_RULE)
