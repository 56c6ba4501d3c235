"""Shared code of the GPU kernels: a level of the pyramid, the bilinear sample and its gradient, the softmax of a row of logits.

Coordinates, row indices and coefficients are tensors [rows, 1] (a sample for each row of a tile) or [1, 1] (a sample for the
program). They broadcast against tensors that have channels. Index tables are never trusted: every access is masked by `exists`.

The four corners are 00, 01 (right), 10 (below) and 11. They are separate arguments: Triton 3.6 compiles a NamedTuple to the
same machine code, but functions of Triton 3.2 take no tuples.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import launch

# Row indices have 32 bits. A value with more than MOST_ROWS rows goes to the reference. If a level has more pixels than
# MOST_ROWS, its shape is wrong, and no sample on it is valid.
MOST_ROWS = 1 << 30
_MOST_ROWS = tl.constexpr(MOST_ROWS)
_MOST_PER_THREAD = tl.constexpr(launch.MOST_PER_THREAD)
_LOG2_E = tl.constexpr(1.4426950408889634)

# What a backward kernel does with the terms of value's gradient.
NOT_NEEDED = tl.constexpr(0)  # computes no terms
ADDED = tl.constexpr(1)  # adds the terms by atomics, in the order in which programs happen to run
RECORDED = tl.constexpr(2)  # records the terms as (target, coefficient) pairs for sampler.py


@triton.jit
def level(shapes, starts, l):
    """Return (H, W, first row) of a level in int32. If the index tables are wrong, H = W = -1, so that no sample is valid."""
    height = tl.load(shapes + 2 * l).to(tl.int64)
    width = tl.load(shapes + 2 * l + 1).to(tl.int64)
    start = tl.load(starts + l).to(tl.int64)
    sane = (height > 0) & (height <= _MOST_ROWS) & (width > 0) & (width <= _MOST_ROWS)
    sane = sane & (start >= -_MOST_ROWS) & (start <= _MOST_ROWS)
    height = tl.where(sane, height, -1)
    width = tl.where(sane, width, -1)
    sane = height * width <= _MOST_ROWS
    return tl.where(sane, height, -1).to(tl.int32), tl.where(sane, width, -1).to(tl.int32), start.to(tl.int32)


@triton.jit
def exists(row, num_keys):
    """Return whether 0 <= row < num_keys, by a single comparison."""
    return row.to(tl.uint32, bitcast=True) < num_keys.to(tl.uint32, bitcast=True)


@triton.jit
def bilinear(x, y, height, width, start, num_keys, LEAST: tl.constexpr = False):
    """Return whether the sample at pixel (x, y) is valid, the row of corner 00, how far the sample is right of and below corner
    00, and a mask for each corner: whether the corner may be read."""
    # LEAST: compare min(x, y), so that three comparisons suffice. Triton 3.7.1 packs four comparisons into a vector of bits,
    # which takes up to 9 more instructions per sample. Aggregation compares four times: with three, it spills on sm_100.
    above = tl.minimum(x, y) > -1 if LEAST else (x > -1) & (y > -1)
    valid = above & (x < width) & (y < height)
    x = tl.where(valid, x, 0.0)
    y = tl.where(valid, y, 0.0)
    i = tl.floor(x).to(tl.int32)
    j = tl.floor(y).to(tl.int32)
    right = x - i.to(tl.float32)
    below = y - j.to(tl.float32)
    row = start + j * width + i
    on_left = valid & (i >= 0)
    on_right = valid & (i + 1 < width)
    in00 = on_left & (j >= 0) & exists(row, num_keys)
    in01 = on_right & (j >= 0) & exists(row + 1, num_keys)
    in10 = on_left & (j + 1 < height) & exists(row + width, num_keys)
    in11 = on_right & (j + 1 < height) & exists(row + width + 1, num_keys)
    return valid, row, right, below, in00, in01, in10, in11


@triton.jit
def coefficients(right, below, weight):
    """Return the coefficients of the four corners of a sample with this weight."""
    bottom = weight * below
    top = weight - bottom
    # tl.fma, because compilers contract `bottom - bottom * right` in two ways, and the bits would depend on value's dtype.
    return top - top * right, top * right, tl.fma(bottom, right * -1.0, bottom), bottom * right


@triton.jit
def read(pointers, here):
    """Return rows in float32; zeros where `here` is false."""
    return tl.load(pointers, mask=here, other=0.0).to(tl.float32)


@triton.jit
def corners(base, row, width, key, in00, in01, in10, in11, ONCE: tl.constexpr = False):
    """Return the rows of the four corners. The first row of value is at `base`; rows are `key` elements apart."""
    # The right neighbour is at `top + key`, which needs no address arithmetic if `key` is a constant.
    top = base + row.to(tl.int64) * key
    # ONCE: compute `width * key`, the distance to the row below, once for a level, and keep it in a register. The backward of
    # multi_scale_deformable_attn has no free register for it, and computes the row below for each sample.
    bottom = top + width.to(tl.int64) * key if ONCE else base + (row + width).to(tl.int64) * key
    return read(top, in00), read(top + key, in01), read(bottom, in10), read(bottom + key, in11)


@triton.jit
def add(pointers, addend, here):
    # relaxed, because the default order puts a fence around every reduction
    tl.atomic_add(pointers, addend, mask=here, sem="relaxed")


@triton.jit
def add_corners(base, row, width, key, in00, in01, in10, in11, s00, s01, s10, s11, addend):
    """Add the product of `addend` and the corner's coefficient to the row of every corner."""
    top = base + row.to(tl.int64) * key
    bottom = base + (row + width).to(tl.int64) * key
    add(top, s00 * addend, in00)
    add(top + key, s01 * addend, in01)
    add(bottom, s10 * addend, in10)
    add(bottom + key, s11 * addend, in11)


@triton.jit
def record(targets, parts, at, first, step, row, width, right, below, in00, in01, in10, in11):
    """Record the four rows to which sample `at` adds, as row indices in all of value, and the coefficients of the rows."""
    s00, s01, s10, s11 = coefficients(right, below, 1.0)
    record_one(targets, parts, 4 * at, first, step, row, s00, in00)
    record_one(targets, parts, 4 * at + 1, first, step, row + 1, s01, in01)
    record_one(targets, parts, 4 * at + 2, first, step, row + width, s10, in10)
    record_one(targets, parts, 4 * at + 3, first, step, row + width + 1, s11, in11)


@triton.jit
def record_one(targets, parts, at, first, step, row, coefficient, inside):
    tl.store(targets + at, first + row.to(tl.int64) * step, mask=inside)
    tl.store(parts + at, coefficient, mask=inside)


@triton.jit
def threads(COLUMNS: tl.constexpr, LANE: tl.constexpr):
    """Return the indices of a row's threads, [1, threads]. Adding `0 * threads` to a sum gives the sum the layout of the
    reduction, so that thread 0 stores the sum without a layout conversion (Triton 3.7.1 converts otherwise)."""
    PER_THREAD: tl.constexpr = LANE if LANE < _MOST_PER_THREAD else _MOST_PER_THREAD
    return tl.arange(0, COLUMNS // PER_THREAD)[None, :]


@triton.jit
def by_lane(t, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr):
    """Sum [ROWS, COLUMNS] within threads, to [ROWS, threads of a row]."""
    PER_THREAD: tl.constexpr = LANE if LANE < _MOST_PER_THREAD else _MOST_PER_THREAD
    return tl.sum(tl.reshape(t, (ROWS, COLUMNS // PER_THREAD, PER_THREAD)), 2)


@triton.jit
def dots(v00, v01, v10, v11, g, right, below, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr):
    """Return the dot products of g with the sample and with its two slopes: three tensors [ROWS, 1].

    Combine the four corners within threads first, so that three sums cross threads instead of four.
    """
    v00, v01 = by_lane(v00 * g, ROWS, COLUMNS, LANE), by_lane(v01 * g, ROWS, COLUMNS, LANE)
    v10, v11 = by_lane(v10 * g, ROWS, COLUMNS, LANE), by_lane(v11 * g, ROWS, COLUMNS, LANE)
    along_top = v01 - v00
    along_bottom = v11 - v10
    top = v00 + right * along_top
    dy = v10 + right * along_bottom - top
    sample, dx = top + below * dy, along_top + below * (along_bottom - along_top)
    return tl.sum(sample, 1, keep_dims=True), tl.sum(dx, 1, keep_dims=True), tl.sum(dy, 1, keep_dims=True)


# ---- For kernels that take logits and offsets. A kernel reads a row of logits twice: first as tiles, for the greatest logit
# and the sum, then sample by sample.


@triton.jit
def _add_pairwise(t, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the sums of rows. Add neighbours, then neighbouring sums, so that the bits do not depend on how many columns a
    thread has."""
    for halved in tl.static_range(16):  # Triton 3.4 cannot hash a function that calls itself
        if COLUMNS >> halved > 1:
            t = tl.sum(tl.reshape(t, (ROWS, COLUMNS >> (halved + 1), 2)), 2)
    return tl.reshape(t, (ROWS, 1))


@triton.jit
def power(logit, top):
    return tl.exp2((logit - top) * _LOG2_E)


@triton.jit
def start_row(weights, row, c, LOGITS: tl.constexpr, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the greatest logit of each row, the inverse of the sum of exp(logit - greatest), and an integer that is always
    zero. Without LOGITS, return zeros.

    The tile has as many columns as the tile of channels, so that both have the same layout. Triton does not know that the
    integer is zero. Combining a coordinate's bits with the integer by a bitwise or gives the coordinate the tile's layout, so
    that no thread computes the coordinate twice. LLVM removes the or.
    """
    if LOGITS:
        greatest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
        for first in range(0, SAMPLES, COLUMNS):
            s = first + c
            logit = tl.load(weights + row * SAMPLES + s, mask=s < SAMPLES, other=-float("inf")).to(tl.float32)
            greatest = tl.maximum(greatest, logit)
        top = tl.max(greatest, 1, keep_dims=True)
        powers = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, SAMPLES, COLUMNS):
            s = first + c
            logit = tl.load(weights + row * SAMPLES + s, mask=s < SAMPLES, other=-float("inf")).to(tl.float32)
            powers += power(logit, top)
        scale, zero = 1.0 / _add_pairwise(powers, ROWS, COLUMNS), (top.to(tl.int32, bitcast=True) & 1) >> 1
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
