"""`bev_pool_v3` as BEVDet calls it: points sorted by cell, and the first point and the number of points of every cell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_private
from .._operator import geometry
from .._operator.rules import INDEX, INDEX_RULE, fail, need_axes, need_dtype, need_one_device, need_shape, need_tensors
from ._arguments import explain_arguments
from ._pooling import sizes_of
from .bev_pool_v3 import bev_pool_v3

__all__ = ["bev_pool_v2"]


@explain_arguments
def bev_pool_v2(
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    bev_feat_shape: Sequence[int],
    interval_starts: Tensor,
    interval_lengths: Tensor,
) -> Tensor:
    """`bev_pool_v3` over intervals of points: all points of an interval are added to the cell of the interval's first point.

    Points outside all intervals are ignored. If every interval is a run of points of one cell, as in BEVDet, the result equals
    that of `bev_pool_v3`.

    Args:
        depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape: as for `bev_pool_v3`.
        interval_starts: [n_intervals], the first point of each interval. int32 or int64.
        interval_lengths: [n_intervals], the number of points of each interval. int32 or int64.

    Gradients, Returns, Raises: as for `bev_pool_v3`; ValueError also if (on a CPU) an interval exceeds the points.

    >>> import torch, mx_driving
    >>> depth, feat, zero = torch.ones(1), torch.tensor([[4.0]]), torch.tensor([0, 0])
    >>> mx_driving.bev_pool_v2(depth, feat, zero, zero, zero, (1, 1, 1, 1, 1), torch.tensor([0]), torch.tensor([2]))
    tensor([[[[[8.]]]]])
    """
    ranks = {"ranks_bev": ranks_bev, "ranks_depth": ranks_depth, "ranks_feat": ranks_feat}
    intervals = {"interval_starts": interval_starts, "interval_lengths": interval_lengths}
    need_tensors(*ranks.items(), *intervals.items())
    need_one_device(*ranks.items(), *intervals.items())
    for axis, named in (("n", ranks), ("n_intervals", intervals)):
        (first, like), *others = named.items()
        need_axes(first, like, axis)
        for name, t in others:
            need_shape(name, t, axis, like.shape[0])
    for name, t in intervals.items():
        need_dtype(name, t, INDEX, INDEX_RULE)
    shape, (starts, lengths) = bev_feat_shape, map(geometry.as_int64, intervals.values())
    if any(map(_torch_private.is_batched, (starts, lengths))):
        shape = sizes_of("bev_feat_shape", bev_feat_shape, "five", "B, D, H, W, C")
        cells, sizes = math.prod(shape[:4]), shape[1:]
        points, first, padding = _IntervalPoints.apply(starts, lengths, ranks_bev.shape[0])
        scene = math.prod(sizes[:3])  # number of cells of a scene; padding goes to the first cell of an extra scene
        ranks = geometry.as_int64(ranks_bev[first])
        ranks = torch.where(padding, cells, ranks + (ranks >= cells) * scene)
        return bev_pool_v3(depth, feat, ranks_depth[points], ranks_feat[points], ranks, (shape[0] + 1, *sizes))[:-1]
    points, first = _points_of_intervals(starts, lengths, ranks_bev.shape[0])
    return bev_pool_v3(depth, feat, ranks_depth[points], ranks_feat[points], ranks_bev[first], shape)


def _points_of_intervals(starts: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the points of all intervals, and for each point the first point of its interval."""
    if starts.is_meta:  # the number of points depends on data, and a meta tensor has none
        return starts[:0], starts[:0]
    if starts.device.type == "cpu":
        start, outside = geometry.clamp_index(starts, count + 1)
        _, too_long = geometry.clamp_index(lengths, count + 1 - start)
        wrong = outside + too_long
        if torch.compiler.is_compiling() or _torch_private.count_dispatch_modes():  # in a graph, the message has no numbers
            ok = 1 - wrong.sum().clamp(max=1)
            _torch_private.assert_in_graph(ok, "interval_starts and interval_lengths must lie within the points")
        elif wrong.any():
            at = int(wrong.nonzero()[0])
            start, length = int(starts[at]), int(lengths[at])
            if length < 0:
                fail(ValueError, f"interval_lengths[{at}]", "not be negative", length)
            fail(ValueError, f"interval_starts[{at}]", f"leave room for {length} of {count} points", start)
    before = lengths.cumsum(0) - lengths
    interval = torch.repeat_interleave(lengths)  # the interval of each point
    points = torch.arange(interval.shape[0], device=starts.device) + (starts - before)[interval]
    return points, starts[interval]


class _IntervalPoints(torch.autograd.Function):
    """`_points_of_intervals` for torch.func. Under vmap, all entries are padded to as many points as the longest entry has. A
    third output is True for padding."""

    @staticmethod
    def forward(starts: Tensor, lengths: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:  # pyright: ignore
        points, first = _points_of_intervals(starts, lengths, count)
        return points, first, torch.zeros_like(first, dtype=torch.bool)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> tuple[None, ...]:  # pyright: ignore
        return None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, starts: Tensor, lengths: Tensor, count: int) -> Any:  # pyright: ignore
        if info.batch_size == 0:
            fail(ValueError, "in_dims", "name axes with entries where vmap calls bev_pool_v2 for each", "size 0")
        entries = (
            [t] * info.batch_size if dim is None else t.unbind(dim) for t, dim in zip((starts, lengths), in_dims, strict=False)
        )
        results = [_IntervalPoints.apply(*entry, count) for entry in zip(*entries, strict=True)]
        most = max(points.shape[0] for points, *_ in results)
        padded = ([F.pad(t, (0, most - t.shape[0]), value=t.dtype == torch.bool) for t in entry] for entry in results)
        return tuple(map(torch.stack, zip(*padded, strict=True))), (0, 0, 0)
