"""Shared code of the two attention operators: the tiles of programs.

A program computes neighbouring queries of a head, as a tile [rows, channels]. A thread has a few neighbouring channels.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import triton
import triton.language as tl

from . import launch

# Warps of the forward exchange no data, so a program may have several.
_FORWARD_WARPS = 4
# (whether it is the backward, bytes of an element of value) -> most registers of a thread. Without a limit, the float32 forward
# uses only 40 registers and is slower (see launch.plan). The 16-bit forward spills on sm_80. The backward uses 65 to 70
# registers on some targets, too many for half of the GPU's occupancy.
_MOST_REGISTERS = {(False, 2): 64, (False, 4): 56, (True, 2): 64, (True, 4): 64}
# With one warp per program, sums over channels are shuffles, and stores need no exchange through shared memory.
_BACKWARD_WARPS = 1


# Kernels are not specialized for these arguments, so a call with new values compiles nothing.
VARYING = ["queries", "num_keys", "batch_stride", "key_stride", "head_stride"]


@triton.jit
def tile_of(
    value, queries, batch_stride, head_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Return the program's batch, its head, a mask of rows that exist, the rows' indices in [bs, queries, heads], the channels,
    and pointers to these channels in the first row of value.

    Programs are numbered head by head, so that programs that run at the same time read the same part of value.
    """
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    head = (program // blocks) % HEADS
    batch = (program // blocks // HEADS).to(tl.int64)
    first = (program % blocks) * ROWS
    local = tl.arange(0, ROWS)[:, None]
    here = first + local < queries
    # in place of a row past the last query, take the first row of the tile, so that reads need no mask
    row = (batch * queries + first) * HEADS + head + tl.where(here, local, 0) * HEADS
    c = tl.arange(0, COLUMNS)[None, :]
    return batch, head, here, row, c, value + (batch * batch_stride + head * head_stride) * LANE + c


@functools.lru_cache(maxsize=4096)
def plan(
    shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, samples: Sequence[int], gpu: launch.Gpu, backward: bool
) -> launch.Plan:
    """Return the plan of a launch for a value of this shape and stride. `samples` is (heads, levels, points)."""
    (heads, levels, points), channels = samples, shape[3]
    layout = launch.layout(shape, stride, itemsize, channels)
    if backward:
        tile = launch.tile(channels, min(layout.lane, launch.MOST_PER_THREAD), _BACKWARD_WARPS, gpu.lanes)
    else:
        tile = launch.tile(channels, layout.lane, _FORWARD_WARPS, gpu.lanes)
    sizes = {"HEADS": heads, "CHANNELS": channels, "LEVELS": levels, "POINTS": points, "UNROLL": launch.unroll(points)}
    registers = _MOST_REGISTERS.get((backward, itemsize)) if gpu.capped else None
    return launch.plan(layout, tile, tile.rows, heads, registers, **sizes)
