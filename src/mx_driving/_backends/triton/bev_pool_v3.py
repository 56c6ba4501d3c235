"""bev_pool_v3 on a GPU: points are sorted by cell, and a program sums the points of one cell.

The gradient of feat is the same sum with cells and rows of feat exchanged. No program adds to what another writes, so the
bits are the same in every run; the gradient of an element of depth that several points have is PyTorch's `index_add`.
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
    rows, depth, ranks_row, ranks_depth, order, starts, output, num_rows, num_depth,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """output[target] = sum of depth * row over the points of a target. A rank that has no row counts as zero.

    The order, the ranks and the rows of a point are read one after the other. They are read for three rounds at once, so that a
    round waits for one read and not for three.
    """
    target = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)[None, :]
    first = tl.load(starts + target)
    end = tl.load(starts + target + 1)
    i = first + tl.arange(0, ROWS)[:, None]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    point = tl.load(order + i, mask=i < end, other=0)
    row, in_rows = _ranks(ranks_row, point, i < end, num_rows)
    at, in_depth = _ranks(ranks_depth, point, i < end, num_depth)
    point = tl.load(order + i + ROWS, mask=i + ROWS < end, other=0)
    left = end - first
    while left > 0:
        here = in_rows & in_depth
        coefficient = tl.load(depth + at, mask=here, other=0.0).to(tl.float32)
        values = tl.load(rows + row * CHANNELS + c, mask=here & (c < CHANNELS), other=0.0).to(tl.float32)
        i += ROWS
        left -= ROWS
        row, in_rows = _ranks(ranks_row, point, i < end, num_rows)
        at, in_depth = _ranks(ranks_depth, point, i < end, num_depth)
        point = tl.load(order + i + ROWS, mask=i + ROWS < end, other=0)
        total += coefficient * values
    sums = tl.sum(total, 0)[None, :]
    tl.store(output + target * CHANNELS + c, sums.to(output.dtype.element_ty), mask=c < CHANNELS)


@triton.jit(do_not_specialize=["count", "num_cells", "num_feat"])
def _dots(
    cells, feat, ranks_bev, ranks_feat, dots, count, num_cells, num_feat,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dots[point] = product of its cell and its row of feat."""
    point = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    c = tl.arange(0, COLUMNS)[None, :]
    cell, in_cells = _ranks(ranks_bev, point, point < count, num_cells)
    row, in_feat = _ranks(ranks_feat, point, point < count, num_feat)
    here = in_cells & in_feat & (c < CHANNELS)
    g = tl.load(cells + cell * CHANNELS + c, mask=here, other=0.0).to(tl.float32)
    v = tl.load(feat + row * CHANNELS + c, mask=here, other=0.0).to(tl.float32)
    tl.store(dots + point, tl.sum(g * v, 1)[:, None], mask=point < count)


_FEWEST_ROWS = 4  # points of a cell whose three reads, one after the other, are in flight together


@functools.lru_cache(maxsize=256)
def _options(channels: int, itemsize: int, lanes: int) -> dict[str, int]:
    tile = launch.tile(channels, min(16 // itemsize, launch.MOST_HELD), 1, lanes)
    rows = max(tile.rows, _FEWEST_ROWS)
    return {"CHANNELS": channels, "ROWS": rows, "COLUMNS": tile.columns, "num_warps": tile.warps}


def _sorted(ranks: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Return the points in the order of a rank, and where those of each rank begin. A rank that has no row is left out.

    int32 ranks stay int32: a radix sort of int64 takes twice the passes.
    """
    ordered, order = ranks.sort(stable=True)
    firsts = torch.arange(rows + 1, device=ranks.device)  # int64: `rows` may be 2**31
    return order, torch.searchsorted(ordered, firsts.to(ranks.dtype) if rows < 1 << 31 else firsts)


def _sum(rows: Tensor, depth: Tensor, ranks: Tensor, ranks_depth: Tensor, targets: Tensor, output: Tensor) -> None:
    """Writes output [targets, channels]."""
    if not output.numel():
        return
    order, starts = _sorted(targets, len(output))
    options = _options(output.shape[1], rows.element_size(), launch.gpu().lanes)
    tensors = (rows, depth, ranks, ranks_depth, order, starts, output)
    launch.run(_sums, len(output), tensors, (len(rows), len(depth)), options)


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
    cells = torch.empty((bs * d * h * w, feat.shape[1]), dtype=dtype or feat.dtype, device=feat.device)
    ranks = (t.contiguous() for t in (ranks_feat, ranks_depth, ranks_bev))
    _sum(feat.contiguous(), depth.contiguous(), *ranks, cells)
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
    grad_feat, grad_depth = feat.new_empty(0), depth.new_empty(0)
    if output_mask[0]:
        grad_feat = torch.empty_like(feat)
        _sum(cells, depth, ranks_bev, ranks_depth, ranks_feat, grad_feat)
    if output_mask[1]:
        grad_depth = _of_depth(cells, feat, len(depth), ranks_feat, ranks_depth, ranks_bev).to(depth.dtype)
    return grad_feat, grad_depth


def _of_depth(
    cells: Tensor, feat: Tensor, num_depth: int, ranks_feat: Tensor, ranks_depth: Tensor, ranks_bev: Tensor
) -> Tensor:
    """Points of one depth are added up by PyTorch, those of none behind the last."""
    count = len(ranks_bev)
    dots = torch.zeros(count, device=feat.device)
    options = _options(feat.shape[1], feat.element_size(), launch.gpu().lanes) if feat.shape[1] else {}
    if count and options:
        tensors = (cells, feat, ranks_bev, ranks_feat, dots)
        launch.run(_dots, triton.cdiv(count, options["ROWS"]), tensors, (count, len(cells), len(feat)), options)
    ranks = ranks_depth.long()
    ranks = torch.where((ranks >= 0) & (ranks < num_depth), ranks, num_depth)
    return dots.new_zeros(num_depth + 1).index_add(0, ranks, dots)[:num_depth]
