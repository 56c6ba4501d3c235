"""What every launch needs: how the table lies in memory, how large a tile is, the device, the optional check of the tables."""

from __future__ import annotations

import contextlib
import math
import os
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check

# Channels that a thread holds in a backward kernel: with eight (16 bytes of a 16-bit dtype), the four corners' rows, their
# products and the gradient pass 64 registers, and with that half of the occupancy.
MOST_HELD = 4
_MOST_WARPS = 16  # more than 512 threads leave too few registers each


class Table(NamedTuple):
    """A table whose channels are neighbours in memory."""

    tensor: Tensor
    lane: int  # neighbouring elements that one thread reads at once: 16 bytes where strides allow it
    key: int  # distance of neighbouring rows where it is one of the model's constants, else 0: read from `strides`
    strides: tuple[int, ...]  # of every axis but channels, in lanes: the compiler sees that rows stay aligned


def table(value: Tensor, run: int) -> Table:
    """value [bs, num_keys, ..., channels], of which `run` neighbouring channels belong together.

    Any strides are read in place, except channels that are not neighbours: those would cost a read each, four times over.
    """
    if value.stride(-1) != 1 and value.shape[-1] > 1:
        value = value.contiguous()
    strides = [stride if size > 1 else 0 for stride, size in zip(value.stride()[:-1], value.shape[:-1], strict=True)]
    lane = math.gcd(16 // value.element_size(), run, *strides)
    packed = math.prod(value.shape[2:])
    key = strides[1] if value.shape[1] > 1 else packed
    return Table(value, lane, key if key in (packed, value.shape[-1]) else 0, tuple(stride // lane for stride in strides))


def _power_of_two(n: int) -> int:
    """The smallest that is not below n."""
    return 1 << (n - 1).bit_length()


class Tile(NamedTuple):
    rows: int
    columns: int  # channels, rounded up to a power of two
    warps: int


def tile(channels: int, held: int, warps: int) -> Tile:
    """A tile of `warps` warps, more where one row asks for it; a thread holds `held` channels of a row."""
    columns = _power_of_two(channels)
    rows = max(1, min(16 * warps, 32 * warps * held // columns))
    return Tile(rows, columns, max(warps, _warps(columns, held)))


def grouped_tile(groups: int, width: int, held: int) -> Tile:
    """All the groups of a row at once, in as many warps as that takes."""
    rows, columns = _power_of_two(groups), _power_of_two(width)
    return Tile(rows, columns, max(1, _warps(rows * columns, held)))


def _warps(elements: int, held: int) -> int:
    return min(_MOST_WARPS, elements // (32 * held))


def options(table: Table, tile: Tile) -> dict[str, int | None]:
    """Warps, and a cap on registers for 16-bit tables: one kernel in three asks for 65 or 66 of the 64 that half of the
    occupancy leaves. No cap (None) for float32: with one of 64, the compiler spills in a kernel that needs 40."""
    return {"num_warps": tile.warps, "maxnreg": None if table.tensor.dtype == torch.float32 else 64}


def unroll(points: int) -> int:
    """Up to four points at a time: that many reads are in flight; all of them at once spill."""
    return max(n for n in (1, 2, 3, 4) if points % n == 0)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, and on its current stream."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def check(shapes_name: str, starts_name: str, shapes: Tensor, starts: Tensor, num_keys: int) -> None:
    """With MX_DRIVING_CHECK=1 the tables are read, which waits for the device, and refused as on a CPU."""
    if os.environ.get("MX_DRIVING_CHECK") == "1":
        _check.levels(shapes_name, starts_name, shapes, starts, num_keys)


def gradients(inputs: tuple[Tensor, ...], mask: list[bool]) -> list[Tensor]:
    """Memory for each gradient that is asked for, an empty tensor for each that is not."""
    return [
        torch.empty(t.shape if wanted else (0,), dtype=t.dtype, device=t.device) for t, wanted in zip(inputs, mask, strict=True)
    ]
