"""Gather loops: compute the corner rows of a workload in advance, then run a native loop that only reads and adds them.

The loop (benchmarks/floor_library) is a library of its own, which wheels do not contain.
"""

from __future__ import annotations

import ctypes
import functools
import math
import pathlib
from collections.abc import Callable

import torch
from torch import Tensor

from mx_driving import _backends, config
from mx_driving._measure.workloads import AGGREGATION, GEOMETRIC, Args
from mx_driving._operator import geometry


def _library_path() -> pathlib.Path:
    path = config.library_path()
    return path.with_stem(path.stem + "_floor")


def why_not() -> str | None:
    """Return why there is no gather loop, or None if there is one."""
    if _library_path().exists():
        return None
    return "The gather loop is left out: a wheel does not hold its library. `make native` in the source tree builds it."


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(_library_path()))


def add_rows(
    value: Tensor, rows: Tensor, output: Tensor, grad_value: Tensor | None = None, starts: Tensor | None = None
) -> None:
    """Set output[b, q, h] to the sum of the rows of value[b, :, h] that rows[b, h, q] lists.

    With `grad_value`, add output[b, q, h] to the listed rows of grad_value[b, :, h] instead. With `starts`, the lists lie one
    after the other in `rows`. The native loop does not check `rows` and `starts`: see benchmarks/floor_library/floor.h.
    """
    tensors = [None if t is None else _backends.native._pack(t) for t in (value, rows, starts, output, grad_value)]
    status = _library().mxd_gather_floor(_backends.native.isa().encode(), *tensors, torch.get_num_threads())
    if status:
        raise RuntimeError(f"the gather loop returned status {status}")


def _corners(pixel: Tensor, size: Tensor, start: Tensor, keys: int) -> Tensor:
    """Return the rows of the four corners of samples at `pixel` [..., 2] (x, y) on maps of `size` (width, height): [..., 4].
    A corner off the map is row `keys`, a row of zeros."""
    corner = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]])
    at = pixel.floor().long()[..., None, :] + corner
    inside = ((at >= 0) & (at < size[..., None, :])).all(-1)
    rows = start[..., None] + at[..., 1] * size[..., None, 0] + at[..., 0]
    return torch.where(inside, rows, keys)


def _aggregation_rows(features: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor) -> Tensor:
    size = shapes.flip(-1)  # [cam, scale, (w, h)]
    seen = geometry.inside(locations)[..., None, None]
    rows = _corners(geometry.pixels(locations[..., None, :], size), size, starts, features.shape[1])
    rows = torch.where(seen, rows, -1).flatten(2)  # [bs, anchor, pts * cam * scale * 4]
    last = (rows < 0).sort(dim=-1, stable=True).indices  # rows that are read come first, in their order
    rows = rows.gather(-1, last)
    return rows[..., : int((rows >= 0).sum(-1).max())][:, None]


def corner_rows(operator: str, args: tuple[Tensor, ...]) -> Tensor:
    """Return int32 [bs, heads, queries, rows]: the rows of value that each query sums, in the order of its samples."""
    value, shapes, starts, locations, _ = args
    keys = value.shape[1]
    if operator == AGGREGATION:
        rows = _aggregation_rows(value, shapes, starts, locations)
    else:
        size = shapes.flip(-1)[:, None]
        if operator == GEOMETRIC:
            pixel = torch.minimum(locations.long().clamp(min=0), size - 1)
            rows = pixel[..., 1] * size[..., 0] + pixel[..., 0] + starts[:, None]
        else:
            rows = _corners(geometry.pixels(locations, size), size, starts[:, None], keys)
        rows = rows.flatten(3).transpose(1, 2)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % 4), value=keys)
    if int(rows.min()) < -1 or int(rows.max()) > keys:
        raise ValueError("rows outside value")  # the native loop does not check them
    return rows.to(torch.int32).contiguous()


def pooling_floor(args: Args) -> Callable[[], Tensor]:
    """Return a call that sums the rows of feat of each cell's points. It reads no depth, and writes channels last."""
    feat, _, ranks_feat, _, ranks_bev, *sizes = args
    cells, keys = math.prod(sizes), feat.shape[0]
    order = ranks_bev.sort(stable=True).indices
    counts = ranks_bev.bincount(minlength=cells)
    lengths = (counts + 3) // 4 * 4
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    begins = torch.nn.functional.pad(counts.cumsum(0), (1, 0))[:-1]
    rows = torch.full((1, 1, 1, int(starts[-1])), keys, dtype=torch.int32)
    cell = ranks_bev[order].long()
    rows[0, 0, 0, starts[cell] + torch.arange(len(cell)) - begins[cell]] = ranks_feat[order].int()
    output = torch.empty(1, cells, 1, feat.shape[1], dtype=feat.dtype)

    def run() -> Tensor:
        add_rows(feat[None, :, None], rows, output, starts=starts)
        return output[0, :, 0]

    return run


def gather_floor(operator: str, args: tuple[Tensor, ...], backward: bool, head_major: bool = False) -> Callable[[], object]:
    """Return a call that only reads and adds the rows of one direction. The backward first sets the gradient of value to zero.
    With `head_major` the rows of a head are contiguous in value and its gradient, the best known layout. The call does not
    include the time to make this layout."""
    value = args[0].unsqueeze(2) if operator == AGGREGATION else args[0]
    rows = corner_rows(operator, args)
    bs, heads, queries, _ = rows.shape
    output = torch.zeros(bs, queries, heads, value.shape[-1], dtype=value.dtype)
    laid_out = value.transpose(1, 2).contiguous() if head_major else value

    def in_order(t: Tensor) -> Tensor:
        return t.transpose(1, 2) if head_major else t

    if backward:
        return lambda: add_rows(in_order(laid_out), rows, output, in_order(torch.zeros_like(laid_out)))
    return lambda: add_rows(in_order(laid_out), rows, output)
