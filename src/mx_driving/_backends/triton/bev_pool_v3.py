"""bev_pool_v3 on a GPU: points are sorted by cell, and a program sums the points of a cell.

The gradient of feat is the same sum with cells and rows of feat exchanged; the same program has all that the gradient of depth
needs of a point. No program adds to what another writes, so the bits are the same in every run; PyTorch's `index_add` sums the
gradient of an element of depth that several points have.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch


@triton.jit
def _ranks(ranks, point, here, count):
    """The ranks of points, and whether they are rows of a tensor of `count` rows."""
    rank = tl.load(ranks + point, mask=here, other=-1).to(tl.int64)
    return rank, rank.to(tl.uint64, bitcast=True) < count.to(tl.uint64)  # 0 <= rank < count


@triton.jit(do_not_specialize=["num_rows", "num_depth"])
def _sums(
    rows, depth, ranks_row, ranks_depth, order, starts, others, sums, dots, num_rows, num_depth,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """sums[target] = sum of depth * row over the points of a target; dots[point] = product of its row and of others[target].

    A rank that has no row counts as zero. The order, the ranks and the rows of a point are read one after the other. They are
    read for three rounds at once, so that a round waits for one read and not for three.
    """
    target = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)[None, :]
    first = tl.load(starts + target)
    end = tl.load(starts + target + 1)
    i = first + tl.arange(0, ROWS)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    if DOTS:
        other = tl.load(others + target * CHANNELS + c, mask=c < CHANNELS, other=0.0).to(tl.float32)
    point = tl.load(order + i, mask=i < end, other=0)
    row, in_rows = _ranks(ranks_row, point, i < end, num_rows)
    at, in_depth = _ranks(ranks_depth, point, i < end, num_depth)
    following = tl.load(order + i + ROWS, mask=i + ROWS < end, other=0)
    left = end - first
    while left > 0:
        here = in_rows & in_depth
        values = tl.load(rows + row * CHANNELS + c, mask=here & (c < CHANNELS), other=0.0).to(tl.float32)
        if SUMS:
            total += tl.load(depth + at, mask=here, other=0.0).to(tl.float32) * values
        if DOTS:
            tl.store(dots + point, tl.sum(values * other, 1)[:, None], mask=i < end)
        i += ROWS
        left -= ROWS
        point = following
        row, in_rows = _ranks(ranks_row, point, i < end, num_rows)
        at, in_depth = _ranks(ranks_depth, point, i < end, num_depth)
        following = tl.load(order + i + ROWS, mask=i + ROWS < end, other=0)
    if SUMS:
        result = tl.sum(total, 0)[None, :].to(sums.dtype.element_ty)
        tl.store(sums + target * CHANNELS + c, result, mask=c < CHANNELS)


# Points of a cell that a program reads at once. A cell near the camera has hundreds, and its program ends last.
_FEWEST_ROWS = 16
_WARPS = 4


@functools.lru_cache(maxsize=256)
def _options(channels: int, itemsize: int, lanes: int) -> dict[str, int]:
    tile = launch.tile(channels, min(16 // itemsize, launch.MOST_HELD), _WARPS, lanes)
    rows = max(tile.rows, _FEWEST_ROWS)
    return {"CHANNELS": channels, "ROWS": rows, "COLUMNS": tile.columns, "num_warps": tile.warps}


def _sorted(ranks: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the points in the order of a rank, and where those of each rank begin. A rank that has no row is left out.

    A radix sort of int16 takes half the passes of int32, and a quarter of int64. int16 holds the ranks of -1..rows.
    """
    if rows < 1 << 15:
        ranks = ranks.clamp(-1, rows).to(torch.int16)
    ordered, order = ranks.sort(stable=True)
    firsts = torch.arange(rows + 1, device=ranks.device)  # int64: `rows` may be 2**31
    return order, torch.searchsorted(ordered, firsts.to(ranks.dtype) if rows < 1 << 31 else firsts)


def _run(
    rows: Tensor, depth: Tensor, ranks: Tensor, ranks_depth: Tensor, targets: Tensor, others: Tensor, sums: Tensor, dots: Tensor
) -> None:
    """Write sums [targets, channels] and dots [points], as far as they have elements."""
    order, starts = _sorted(targets, len(others))
    options = _options(others.shape[1], rows.element_size(), launch.gpu().lanes)
    tensors = (rows, depth, ranks, ranks_depth, order, starts, others, sums, dots)
    flags = {"SUMS": sums.numel() > 0, "DOTS": dots.numel() > 0}
    launch.run(_sums, len(others), tensors, (len(rows), len(depth)), options, **flags)


def forward(
    feat: Tensor,
    depth: Tensor,
    ranks_feat: Tensor,
    ranks_depth: Tensor,
    ranks_bev: Tensor,
    bs: int,
    d: int,
    h: int,
    w: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    cells = feat.new_empty((bs * d * h * w, feat.shape[1]), dtype=dtype)
    if cells.numel():
        ranks = (t.contiguous() for t in (ranks_feat, ranks_depth, ranks_bev))
        _run(feat.contiguous(), depth.contiguous(), *ranks, cells, cells, depth.new_empty(0))
    return cells.view(bs, d, h, w, feat.shape[1]).movedim(-1, 1).contiguous()


def backward(
    grad_output: Tensor,
    feat: Tensor,
    depth: Tensor,
    ranks_feat: Tensor,
    ranks_depth: Tensor,
    ranks_bev: Tensor,
    bs: int,
    d: int,
    h: int,
    w: int,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    cells = grad_output.movedim(1, -1).reshape(bs * d * h * w, feat.shape[1])
    cells, feat, depth = cells.contiguous(), feat.contiguous(), depth.contiguous()
    ranks_feat, ranks_depth, ranks_bev = (t.contiguous() for t in (ranks_feat, ranks_depth, ranks_bev))
    grad_feat = torch.empty_like(feat) if output_mask[0] else feat.new_empty(0)
    dots = torch.zeros(len(ranks_bev) if output_mask[1] else 0, device=feat.device)
    if feat.numel() and any(output_mask):
        _run(cells, depth, ranks_bev, ranks_depth, ranks_feat, feat, grad_feat, dots)
    return grad_feat, _sum_by_depth(dots, ranks_depth, depth) if output_mask[1] else depth.new_empty(0)


def _sum_by_depth(dots: Tensor, ranks: Tensor, depth: Tensor) -> Tensor:
    """Return the gradient of depth: the sums of each element's points. Points of none go behind the last."""
    ranks = ranks.long()
    ranks = torch.where((ranks >= 0) & (ranks < len(depth)), ranks, len(depth))
    return dots.new_zeros(len(depth) + 1).index_add(0, ranks, dots)[:-1].to(depth.dtype)
