"""`bev_pool_v3` as BEVDet calls it: points sorted by cell, and where each cell's points begin."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._operator import geometry
from .._operator.rules import INDEX, INDEX_RULE, fail, need_axes, need_dtype, need_one_device, need_shape, tensors
from ._arguments import explain_arguments
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
    ranks = {"ranks_bev": ranks_bev, "ranks_depth": ranks_depth, "ranks_feat": ranks_feat}
    intervals = {"interval_starts": interval_starts, "interval_lengths": interval_lengths}
    tensors(*ranks.items(), *intervals.items())
    need_one_device(*ranks.items(), *intervals.items())
    for axis, named in (("n", ranks), ("n_intervals", intervals)):
        (first, like), *others = named.items()
        need_axes(first, like, axis)
        for name, t in others:
            need_shape(name, t, axis, like.shape[0])
    for name, t in intervals.items():
        need_dtype(name, t, INDEX, INDEX_RULE)
    points, cells = _points_of_intervals(ranks_bev, interval_starts.long(), interval_lengths.long())
    return bev_pool_v3(depth, feat, ranks_depth[points], ranks_feat[points], cells, bev_feat_shape)


def _points_of_intervals(ranks_bev: Tensor, starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return the points of all intervals, and their cells: those of the intervals' first points."""
    if ranks_bev.is_meta:  # the number of points is data
        return ranks_bev.new_empty(0, dtype=torch.int64), ranks_bev[:0]
    if starts.device.type == "cpu":
        _check_intervals(starts, lengths, ranks_bev.shape[0])
    before = lengths.cumsum(0) - lengths
    interval = torch.repeat_interleave(lengths)  # of each point
    points = torch.arange(interval.shape[0], device=starts.device) + (starts - before)[interval]
    return points, ranks_bev[starts[interval]]


def _check_intervals(starts: Tensor, lengths: Tensor, count: int) -> None:
    start, outside = geometry.clamp_index(starts, count + 1)
    _, too_long = geometry.clamp_index(lengths, count + 1 - start)
    wrong = outside + too_long
    if torch.compiler.is_compiling():  # a graph cannot read numbers for a sentence
        ok = 1 - wrong.sum().clamp(max=1)
        torch.ops.aten._assert_async.msg(ok, "interval_starts and interval_lengths must lie within the points")
    elif wrong.any():
        at = int(wrong.nonzero()[0])
        start, length = int(starts[at]), int(lengths[at])
        if length < 0:
            fail(ValueError, f"interval_lengths[{at}]", "not be negative", length)
        fail(ValueError, f"interval_starts[{at}]", f"leave room for {length} of {count} points", start)
