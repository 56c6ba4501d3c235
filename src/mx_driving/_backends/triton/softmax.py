"""Helpers of kernels that take logits and offsets: the softmax of a row of logits, and reads of an (x, y) pair in one access.

A kernel first reads a row of logits as tiles, for the greatest logit and the sum. Then it reads the row sample by sample.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _add_pairwise(t, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sums of rows. Add neighbours, then neighbouring sums, so that the bits do not depend on how many columns a
    thread has."""
    if COLUMNS > 1:
        t = _add_pairwise(tl.sum(tl.reshape(t, (ROWS, COLUMNS // 2, 2)), 2), ROWS, COLUMNS // 2)
    return tl.reshape(t, (ROWS, 1))


@triton.jit
def power(logit, top):
    return tl.exp2((logit - top) * _LOG2_E)


@triton.jit
def normalise(logits, row, c, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the greatest logit of each row, the inverse of the sum of the row's powers, and an integer that is always zero.

    The tile has as many columns as the tile of channels, so that both have the same layout. Triton does not know that the
    integer is zero. A bitwise or of the bits of a coordinate and the integer gives the coordinate the tile's layout, so that no
    thread computes it twice. LLVM removes the bitwise or.
    """
    greatest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for first in range(0, SAMPLES, COLUMNS):
        s = first + c
        logit = tl.load(logits + row * SAMPLES + s, mask=s < SAMPLES, other=-float("inf")).to(tl.float32)
        greatest = tl.maximum(greatest, logit)
    top = tl.max(greatest, 1, keep_dims=True)
    powers = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, SAMPLES, COLUMNS):
        s = first + c
        logit = tl.load(logits + row * SAMPLES + s, mask=s < SAMPLES, other=-float("inf")).to(tl.float32)
        powers += power(logit, top)
    return top, 1.0 / _add_pairwise(powers, ROWS, COLUMNS), (top.to(tl.int32, bitcast=True) & 1) >> 1


@triton.jit
def start_row(weights, row, c, LOGITS: tl.constexpr, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the results of `normalise` for a row of logits; without LOGITS, zeros."""
    if LOGITS:
        top, scale, zero = normalise(weights, row, c, SAMPLES, ROWS, COLUMNS)
    else:
        top = tl.zeros((1, 1), tl.float32)
        scale = top
        zero = tl.zeros((1, 1), tl.int32)
    return top, scale, zero


@triton.jit
def weigh(weights, at, top, scale, LOGITS: tl.constexpr):
    """Return the weight of a sample. If the softmax of a row is NaN, `scale` is NaN."""
    weight = tl.load(weights + at).to(tl.float32)
    if LOGITS:
        weight = power(weight, top) * scale
    return weight


@triton.jit
def read_pair(base, at, zero=0):
    """Return elements 2 * at and 2 * at + 1 in float32, by a single access."""
    if base.dtype.element_ty == tl.float32:
        both = tl.load(base.to(tl.pointer_type(tl.int64), bitcast=True) + at) | zero
        x, y = both.to(tl.int32).to(tl.float32, bitcast=True), (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    else:
        both = tl.load(base.to(tl.pointer_type(tl.int32), bitcast=True) + at) | zero
        if base.dtype.element_ty == tl.bfloat16:
            x, y = (both << 16).to(tl.float32, bitcast=True), (both & -65536).to(tl.float32, bitcast=True)
        else:
            x = both.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            y = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return x, y


@triton.jit
def store_pair(base, at, x, y, here):
    """Store x and y as elements 2 * at and 2 * at + 1, by a single access."""
    dtype: tl.constexpr = base.dtype.element_ty
    if dtype == tl.float32:
        low, high = x.to(tl.int32, bitcast=True).to(tl.int64), y.to(tl.int32, bitcast=True).to(tl.int64)
        tl.store(base.to(tl.pointer_type(tl.int64), bitcast=True) + at, (low & 0xFFFFFFFF) | (high << 32), mask=here)
    else:
        low, high = x.to(dtype).to(tl.int16, bitcast=True).to(tl.int32), y.to(dtype).to(tl.int16, bitcast=True).to(tl.int32)
        tl.store(base.to(tl.pointer_type(tl.int32), bitcast=True) + at, (low & 0xFFFF) | (high << 16), mask=here)


@triton.jit
def locate(reference, row, height, width, zero, POINTS: tl.constexpr, BOX: tl.constexpr):
    """Return the pixel (x, y) of a row of `reference`, and how many pixels (across, down) an offset of 1 moves a sample."""
    x, y = read_pair(reference, row * (2 if BOX else 1), zero)
    if BOX:
        across, down = read_pair(reference, row * 2 + 1, zero)
        across, down = across * (width * (0.5 / POINTS)), down * (height * (0.5 / POINTS))
    else:
        across = tl.full((1, 1), 1.0, tl.float32)
        down = across
    return x * width - 0.5, y * height - 0.5, across, down
