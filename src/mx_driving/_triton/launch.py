"""What every launch needs: how value lies in memory, how large a tile is, the device, the optional check of index tables."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _check, _data_checks

# Channels that a thread holds in a backward kernel: with eight (16 bytes of a 16-bit dtype), the four corners' rows, their
# products and the gradient pass 64 registers, and with that half of the occupancy.
MOST_HELD = 4
_MOST_WARPS = 16  # more than 512 threads leave too few registers each


class Layout(NamedTuple):
    """How value lies in memory."""

    lane: int  # neighbouring elements that one thread reads at once: 16 bytes where strides allow it
    key: int  # distance of neighbouring rows where it is one of the model's constants, else 0: read from `strides`
    strides: tuple[int, ...]  # of every axis but channels, in lanes: the compiler sees that rows stay aligned


def packed(value: Tensor) -> Tensor:
    """Any strides are read in place, except channels that are not neighbours: those would cost a read each, four times over."""
    return value if value.stride(-1) == 1 or value.shape[-1] == 1 else value.contiguous()


def layout(shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, run: int) -> Layout:
    """Of a value [bs, num_keys, ..., channels], of which `run` neighbouring channels belong together."""
    strides = [step if size > 1 else 0 for step, size in zip(stride[:-1], shape[:-1], strict=True)]
    lane = math.gcd(16 // itemsize, run, *strides)
    row = math.prod(shape[2:])
    key = strides[1] if shape[1] > 1 else row
    return Layout(lane, key if key in (row, shape[-1]) else 0, tuple(step // lane for step in strides))


class Plan(NamedTuple):
    """What a launch depends on besides its tensors. Worked out once for each layout: it would be a third of a small call."""

    rows: int  # of a tile
    strides: tuple[int, ...]
    options: dict[str, int | None]  # what the kernel is compiled for: the model's sizes, never batch, queries or map sizes


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


def plan(layout: Layout, tile: Tile, capped: bool, **sizes: int) -> Plan:
    """`sizes` are the operator's own constants. capped: at most 64 registers, for kernels that on one target or another ask
    for 65 or 66; as a rule it is harmful, because the compiler then takes 64 where it needs 40, and has spilled on the way."""
    shape = {"ROWS": tile.rows, "COLUMNS": tile.columns, "LANE": layout.lane, "KEY": layout.key}
    return Plan(tile.rows, layout.strides, {**sizes, **shape, "num_warps": tile.warps, "maxnreg": 64 if capped else None})


def unroll(points: int) -> int:
    """Up to four points at a time: that many reads are in flight; all of them at once spill."""
    return max(n for n in (1, 2, 3, 4) if points % n == 0)


def on(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Triton launches on the current device, and on its current stream."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def check(shapes_name: str, starts_name: str, shapes: Tensor, starts: Tensor, num_keys: int) -> None:
    """Inside data_checks() the index tables are read, which waits for the device, and refused as on a CPU."""
    if _data_checks.asked():
        _check.levels(shapes_name, starts_name, shapes, starts, num_keys)
