"""bev_pool_v3 on a GPU: walk the points in the order of the call, sum runs of equal ranks in registers, add sums by atomics.

The gradient of feat is the same sum with cells and rows of feat exchanged; the same program computes the gradient of depth.
Sums are float32, and their bits may differ from run to run. In deterministic mode points are sorted, and a single program sums
all points of a cell, without atomics; PyTorch's `index_add` sums the gradient of depth.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .sampling import add, threads


@triton.jit
def _ranks(ranks, point, here, count):
    """Return the ranks of points in their own dtype, and whether 0 <= rank < count."""
    rank = tl.load(ranks + point, mask=here, other=-1)
    return rank, rank.to(tl.int64).to(tl.uint64, bitcast=True) < count.to(tl.uint64)  # both bounds in one comparison


@triton.jit
def _point(ranks_row, ranks_depth, ranks_target, point, end, num_rows, num_depth, num_targets):
    """Return the three ranks of points, and whether all three exist. The target is -1 if a rank does not exist."""
    row, in_rows = _ranks(ranks_row, point, point < end, num_rows)
    at, in_depth = _ranks(ranks_depth, point, point < end, num_depth)
    target, in_targets = _ranks(ranks_target, point, point < end, num_targets)
    here = in_rows & in_depth & in_targets
    return row, at, tl.where(here, target, -1), here


@triton.jit
def _operands(
    rows, depth, others, row, at, target, here, c,
    CHANNELS: tl.constexpr, SUMS: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """Return the row of each point, its depth, and row `target` of `others`. All are zero where `here` is false.

    Only sums need depths, so depths are zero without SUMS. Only dot products need rows of `others`, so these are zero
    without DOTS.
    """
    channel = here & (c < CHANNELS)
    values = tl.load(rows + row.to(tl.int64) * CHANNELS + c, mask=channel, other=0.0)
    factor = tl.load(depth + at, mask=here & SUMS, other=0.0)
    other = tl.load(others + target.to(tl.int64) * CHANNELS + c, mask=channel & DOTS, other=0.0)
    return values, factor, other


@triton.jit(do_not_specialize=["num_points", "num_rows", "num_depth", "num_targets"])
def _walk(
    rows, depth, ranks_row, ranks_depth, ranks_target, others, sums, dots, num_points, num_rows, num_depth, num_targets,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LENGTH: tl.constexpr,
    SUMS: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """For every point, sums[target] += depth * row and dots[depth's rank] += dot product of row and others[target].

    Every row of a tile walks LENGTH consecutive points. Ranks are read two points ahead, and rows a single point ahead.
    """
    c = tl.arange(0, COLUMNS)[None, :]
    i = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]) * LENGTH
    end = tl.minimum(i + LENGTH, num_points)
    thread = threads(COLUMNS, CHANNELS & -CHANNELS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    row, at, target, here = _point(ranks_row, ranks_depth, ranks_target, i, end, num_rows, num_depth, num_targets)
    values, factor, other = _operands(rows, depth, others, row, at, target, here, c, CHANNELS, SUMS, DOTS)
    row, next_at, next_target, next_here = _point(
        ranks_row, ranks_depth, ranks_target, i + 1, end, num_rows, num_depth, num_targets
    )
    for k in range(LENGTH):
        next_values, next_factor, next_other = _operands(
            rows, depth, others, row, next_at, next_target, next_here, c, CHANNELS, SUMS, DOTS
        )
        row, then_at, then_target, then_here = _point(
            ranks_row, ranks_depth, ranks_target, i + (k + 2), end, num_rows, num_depth, num_targets
        )
        if SUMS:
            total += factor.to(tl.float32) * values.to(tl.float32)
            ends = target != next_target  # after the last point, next_target is -1, so the last run also ends
            add(sums + target.to(tl.int64) * CHANNELS + c, total, ends & here & (c < CHANNELS))
            total = tl.where(ends, 0.0, total)
        if DOTS:
            dot = tl.sum(values.to(tl.float32) * other.to(tl.float32), 1, keep_dims=True)
            add(dots + at + 0 * thread, dot + 0.0 * thread, here & (thread == 0))
        at, target, here = next_at, next_target, next_here
        next_at, next_target, next_here = then_at, then_target, then_here
        values, factor, other = next_values, next_factor, next_other


@triton.jit(do_not_specialize=["height", "width"])
def _transposed(source, target, height, width, TILE: tl.constexpr):
    """Transpose source [..., height, width] to target [..., width, height], in target's dtype."""
    down, across = tl.cdiv(height, TILE), tl.cdiv(width, TILE)
    program = tl.program_id(0)
    first = (program // (down * across)).to(tl.int64) * height * width
    y = (program // across % down).to(tl.int64) * TILE + tl.arange(0, TILE)
    x = (program % across).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = (y < height)[:, None] & (x < width)[None, :]
    tile = tl.load(source + first + y[:, None] * width + x[None, :], mask=inside)
    inside = (x < width)[:, None] & (y < height)[None, :]
    tl.store(target + first + x[:, None] * height + y[None, :], tl.trans(tile).to(target.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows", "num_depth"])
def _sorted_sums(
    rows, depth, ranks_row, ranks_depth, order, starts, others, sums, dots, num_rows, num_depth,
    CHANNELS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, SUMS: tl.constexpr, DOTS: tl.constexpr,
):  # fmt: skip
    """sums[target] = sum of depth * row over a target's points; dots[point] = dot product of row and others[target].

    A rank that does not exist contributes zero. `order` gives a point, the point gives ranks, and a rank gives a row: three
    reads, each of which needs the read before. So a round reads its rows, the ranks of the next round, and the order of the
    round after that. Then a round waits for a single read instead of three.
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
        values = tl.load(rows + row.to(tl.int64) * CHANNELS + c, mask=here & (c < CHANNELS), other=0.0).to(tl.float32)
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


# The number of consecutive points that a row of a tile walks. A smaller number would mean more programs, a larger number fewer
# atomics. Other numbers are not yet measured.
_LENGTH = 32
_WARPS = 1  # warps of _walk; within one warp, sums over channels are shuffles
_TILE = 32  # a program of _transposed moves a tile of 32 rows and 32 columns
# _sorted_sums has a program for each cell. The program reads at least this many points of the cell at once, because a cell near
# the camera has hundreds of points, and its program ends last.
_FEWEST_ROWS = 16
_SORTED_WARPS = 4


@functools.lru_cache(maxsize=256)
def _options(channels: int, itemsize: int, lanes: int, walk: bool) -> dict[str, int]:
    tile = launch.tile(channels, min(16 // itemsize, launch.MOST_PER_THREAD), _WARPS if walk else _SORTED_WARPS, lanes)
    rows, length = (tile.rows, {"LENGTH": _LENGTH}) if walk else (max(tile.rows, _FEWEST_ROWS), {})
    return {"CHANNELS": channels, "ROWS": rows, "COLUMNS": tile.columns, **length, "num_warps": tile.warps}


def _transpose(source: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Transpose [b, height, width] to a contiguous [b, width, height], and convert it to `dtype` if given."""
    b, height, width = source.shape
    target = torch.empty((b, width, height), dtype=dtype or source.dtype, device=source.device)
    programs = b * -(-height // _TILE) * -(-width // _TILE)
    if source.numel():
        options = {"TILE": _TILE, "num_warps": 4}
        launch.run(_transposed, programs, (source.contiguous(), target), (height, width), options)
    return target


class _Points(NamedTuple):
    """Points in the order of the call. The three ranks of a point are indices of `rows`, `depth` and `others`: its row, its
    depth, and the row of its target."""

    rows: Tensor
    depth: Tensor
    ranks_row: Tensor
    ranks_depth: Tensor
    ranks_target: Tensor
    others: Tensor

    def walk(self, sums: Tensor, dots: Tensor) -> None:
        """Run `_walk`, which adds products of points to float32 `sums` [targets, channels] and `dots` [depth]. Skip an empty
        tensor."""
        options = _options(self.others.shape[1], self.rows.element_size(), launch.gpu().lanes, True)
        numbers = len(self.ranks_row), len(self.rows), len(self.depth), len(self.others)
        programs = -(-len(self.ranks_row) // (options["ROWS"] * options["LENGTH"]))
        if programs:
            launch.run(_walk, programs, (*self, sums, dots), numbers, options, SUMS=sums.numel() > 0, DOTS=dots.numel() > 0)

    def sum_sorted(self, sums: Tensor, dots: Tensor) -> None:
        """Run `_sorted_sums`, which writes `sums` [targets, channels] and `dots` [points]. Skip an empty tensor."""
        # Sort the points by rank, and find where the points of each rank start. Points of ranks without a row are left out.
        rows, ranks = len(self.others), self.ranks_target
        if rows < 1 << 15:
            # A radix sort takes half as many passes for int16 as for int32, and a quarter as many as for int64.
            ranks = ranks.clamp(-1, rows).to(torch.int16)
        ordered, order = ranks.sort(stable=True)
        firsts = torch.arange(rows + 1, device=ranks.device)  # int64: `rows` may be 2**31
        starts = torch.searchsorted(ordered, firsts.to(ranks.dtype) if rows < 1 << 31 else firsts)
        options = _options(self.others.shape[1], self.rows.element_size(), launch.gpu().lanes, False)
        tensors = (*self[:4], order, starts, self.others, sums, dots)
        flags = {"SUMS": sums.numel() > 0, "DOTS": dots.numel() > 0}
        launch.run(_sorted_sums, rows, tensors, (len(self.rows), len(self.depth)), options, **flags)


def forward(feat: Tensor, depth: Tensor, *args: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return the output. `args` are the ranks of feat, depth and cells, and the sizes of the output."""
    *ranks, bs, d, h, w = args
    channels, dtype = feat.shape[1], dtype or feat.dtype
    shape, none = (bs * d * h * w, channels), torch.empty(0, device=feat.device, dtype=torch.float32)
    if torch.are_deterministic_algorithms_enabled():
        cells, run = feat.new_empty(shape, dtype=dtype), _Points.sum_sorted
    else:
        cells, run = torch.zeros(shape, device=feat.device, dtype=torch.float32), _Points.walk
    if cells.numel():
        run(_Points(*(t.contiguous() for t in (feat, depth, *ranks)), cells), cells, none)
    return _transpose(cells.view(bs, d * h * w, channels), dtype).view(bs, channels, d, h, w)


def backward(grad_output: Tensor, feat: Tensor, depth: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    """Return the gradients of feat and depth. `args` are the forward's args and output_mask."""
    ranks_feat, ranks_depth, ranks_bev, bs, d, h, w, output_mask = args
    cells = grad_output.movedim(1, -1)
    if not cells.is_contiguous():
        cells = _transpose(grad_output.reshape(bs, feat.shape[1], d * h * w))
    ranks = (t.contiguous() for t in (ranks_bev, ranks_depth, ranks_feat))
    points = _Points(cells.view(bs * d * h * w, feat.shape[1]), depth.contiguous(), *ranks, feat.contiguous())
    float32 = functools.partial(torch.zeros, device=feat.device, dtype=torch.float32)
    anything = feat.numel() and any(output_mask)
    if not torch.are_deterministic_algorithms_enabled():
        grad_feat = float32(points.others.shape if output_mask[0] else 0)
        grad_depth = float32(depth.shape if output_mask[1] else 0)
        if anything:
            points.walk(grad_feat, grad_depth)
        return grad_feat.to(feat.dtype), grad_depth.to(depth.dtype)
    # Sum in an order fixed by the inputs.
    grad_feat = torch.empty_like(points.others) if output_mask[0] else feat.new_empty(0)
    dots = float32(len(points.ranks_row) if output_mask[1] else 0)
    if anything:
        points.sum_sorted(grad_feat, dots)
    if not output_mask[1]:
        return grad_feat, depth.new_empty(0)
    # Sum dots over the points of every element of depth. Points without an element go to an extra element, which is dropped.
    elements = points.ranks_depth.long()
    elements = torch.where((elements >= 0) & (elements < len(depth)), elements, len(depth))
    return grad_feat, dots.new_zeros(len(depth) + 1).index_add(0, elements, dots)[:-1].to(depth.dtype)
