"""Measure the GPU's limits that bound the operators: the throughput of copies, of reads from L2 and of additions to memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_PIECE = 4096  # elements that a program reads or adds at once
_PIECES = 8  # pieces that a program reads or adds to
_CACHED = 16 << 20  # bytes that stay in L2


class Ceilings(NamedTuple):
    """Bytes per second. A copy counts the bytes that it reads and writes."""

    copy: float
    cached_read: float
    reduction: float


@triton.jit
def _read(memory, sums, pieces, PIECE: tl.constexpr, COUNT: tl.constexpr):
    total = tl.zeros((PIECE,), tl.float32)
    for i in range(COUNT):
        piece = (tl.program_id(0) * 7919 + i * 104729) % pieces
        total += tl.load(memory + piece * PIECE + tl.arange(0, PIECE))
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def _add(memory, pieces, PIECE: tl.constexpr, COUNT: tl.constexpr):
    one = tl.full((PIECE,), 1.0, tl.float32)
    for i in range(COUNT):
        piece = (tl.program_id(0) * 7919 + i * 104729) % pieces
        tl.atomic_add(memory + piece * PIECE + tl.arange(0, PIECE), one, sem="relaxed")


def measure(seconds, device: str, small: bool) -> Ceilings:
    """Return the ceilings. `seconds(call)` is the time of one call. `small` is for a dry run."""
    elements = 1 << 16 if small else 1 << 28
    source = torch.zeros(elements, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / seconds(lambda: target.copy_(source))
    memory = torch.zeros((1 << 16 if small else _CACHED) // 4, device=device)
    pieces, programs = memory.numel() // _PIECE, 2 if small else 8192
    sums = torch.empty(programs, device=device)
    moved = programs * _PIECES * _PIECE * 4
    read = moved / seconds(lambda: _read[(programs,)](memory, sums, pieces, PIECE=_PIECE, COUNT=_PIECES))
    added = moved / seconds(lambda: _add[(programs,)](memory, pieces, PIECE=_PIECE, COUNT=_PIECES))
    return Ceilings(copy, read, added)
