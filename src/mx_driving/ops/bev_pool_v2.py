"""`bev_pool_v3` as BEVDet calls it: points sorted by cell, and where each cell's points begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._checks.rules import INDEX, INDEX_RULE, fail, need_axes, need_dtype, tensors
from .bev_pool_v3 import bev_pool_v3

__all__ = ["bev_pool_v2"]


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
    """`bev_pool_v3` over intervals of points: all points of an interval go to the cell of its first point.

    A point that is in no interval is left out. Where intervals are the runs of one cell, as BEVDet makes them, the result is
    that of bev_pool_v3.

    Args:
        depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape: as for `bev_pool_v3`.
        interval_starts: [n_intervals], the first point of each. int32 or int64.
        interval_lengths: [n_intervals], how many points each has. int32 or int64.

    Gradients, Returns, Raises: as for `bev_pool_v3`; ValueError also where (on a CPU) an interval goes beyond the points.

    >>> import torch, mx_driving
    >>> depth, feat, zero = torch.ones(1), torch.tensor([[4.0]]), torch.tensor([0, 0])
    >>> mx_driving.bev_pool_v2(depth, feat, zero, zero, zero, (1, 1, 1, 1, 1), torch.tensor([0]), torch.tensor([2]))
    tensor([[[[[8.]]]]])
    """
    named = {"ranks_depth": ranks_depth, "ranks_feat": ranks_feat, "ranks_bev": ranks_bev}
    intervals = {"interval_starts": interval_starts, "interval_lengths": interval_lengths}
    tensors(*named.items(), *intervals.items())
    for name, t in intervals.items():
        need_axes(name, t, "n_intervals")
        need_dtype(name, t, INDEX, INDEX_RULE)
    for name, t in named.items():
        if t.shape != ranks_bev.shape:
            fail(ValueError, name, f"have shape (n={ranks_bev.shape[0]})", tuple(t.shape))
    if interval_lengths.shape != interval_starts.shape:
        rule = f"have shape (n_intervals={interval_starts.shape[0]})"
        fail(ValueError, "interval_lengths", rule, tuple(interval_lengths.shape))
    points, cells = _in_intervals(ranks_bev, interval_starts, interval_lengths)
    return bev_pool_v3(depth, feat, ranks_depth[points], ranks_feat[points], cells, bev_feat_shape)


def _in_intervals(ranks_bev: Tensor, interval_starts: Tensor, interval_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """The points of all intervals, and their cells: those of the intervals' first points."""
    starts, lengths = interval_starts.long(), interval_lengths.long()
    if starts.device.type == "cpu":
        _check(starts, lengths, ranks_bev.shape[0])
    before = lengths.cumsum(0) - lengths
    interval = torch.repeat_interleave(lengths)  # of each point
    points = torch.arange(interval.shape[0], device=starts.device) + (starts - before)[interval]
    return points, ranks_bev[starts[interval]]


def _check(starts: Tensor, lengths: Tensor, count: int) -> None:
    outside = (starts < 0) | (starts + lengths > count)
    if torch.compiler.is_compiling():  # into a graph, which cannot read numbers for a sentence
        torch.ops.aten._assert_async.msg(
            ~(outside | (lengths < 0)).any(), "interval_starts and interval_lengths must lie within the points"
        )
        return
    for name, t, wrong in (("interval_lengths", lengths, lengths < 0), ("interval_starts", starts, outside)):
        if wrong.any():
            at = int(wrong.int().argmax())
            rule = "not be negative" if t is lengths else f"leave room for {int(lengths[at])} of {count} points"
            fail(ValueError, f"{name}[{at}]", rule, int(t[at]))
