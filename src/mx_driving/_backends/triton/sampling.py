"""What the GPU kernels have in common: a level of the pyramid, the one bilinear sample, and its gradient.

Coordinates, rows and coefficients are tensors [rows, 1] (a sample for each row of a tile) or [1, 1] (a sample for the program).
They broadcast against tensors that have channels. Index tables are never trusted: every access is masked by `exists`.

The four corners are 00, 01 (one to the right), 10 (one below) and 11. They are passed one by one, because torch 2.6 brings
Triton 3.2, whose functions take no tuple. Triton 3.6 makes the same machine code of a NamedTuple.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import launch

# Rows are numbered in 32 bits. A value of more rows goes to the reference. On a level of more rows no sample is valid.
MOST_ROWS = 1 << 30
_MOST_ROWS = tl.constexpr(MOST_ROWS)
_MOST_HELD = tl.constexpr(launch.MOST_HELD)

# What a backward kernel does with the gradient of value.
NOT_NEEDED = tl.constexpr(0)
ADDED = tl.constexpr(1)  # by atomics, in the order in which programs happen to run
RECORDED = tl.constexpr(2)  # as (target, coefficient) pairs, for deterministic.py


@triton.jit
def level(shapes, starts, l):
    """(H, W, first row) in int32. H = W = -1, so that no sample is valid, if the index tables hold what no level can be."""
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
    """0 <= row < num_keys, in one comparison."""
    return row.to(tl.uint32, bitcast=True) < num_keys.to(tl.uint32, bitcast=True)


@triton.jit
def bilinear(x, y, height, width, start, num_keys, LEAST: tl.constexpr = False):
    """The sample at pixel (x, y): whether it is valid, the row of corner 00, how far the sample lies to the right of it and
    below it, and for each corner whether it may be read."""
    # LEAST: Triton 3.7.1 makes a vector of bits of four comparisons, up to 9 instructions more for each sample. In aggregation
    # three comparisons spill on sm_100.
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
    """The coefficient of each corner in a sample of this weight."""
    bottom = weight * below
    top = weight - bottom
    return top - top * right, top * right, bottom - bottom * right, bottom * right


@triton.jit
def slopes(v00, v01, v10, v11, right, below):
    """The sample between four corners, and its slopes in x and in y."""
    along_top = v01 - v00
    along_bottom = v11 - v10
    top = v00 + right * along_top
    down = v10 + right * along_bottom - top
    return top + below * down, along_top + below * (along_bottom - along_top), down


@triton.jit
def read(pointers, here):
    """Rows in float32; zeros where `here` is false."""
    return tl.load(pointers, mask=here, other=0.0).to(tl.float32)


@triton.jit
def corners(base, row, width, key, in00, in01, in10, in11, ONCE: tl.constexpr = False):
    """The rows of the four corners. The first row of value is at `base`, and each lies `key` elements after the one before."""
    # The right neighbour is at `top + key`: where `key` is a constant, that costs no address arithmetic.
    top = base + row.to(tl.int64) * key
    # ONCE: the distance of the row below is worked out once a level, for which the backward has no register.
    bottom = top + width.to(tl.int64) * key if ONCE else base + (row + width).to(tl.int64) * key
    return read(top, in00), read(top + key, in01), read(bottom, in10), read(bottom + key, in11)


@triton.jit
def add(pointers, addend, here):
    # relaxed: the default order puts a fence around every reduction
    tl.atomic_add(pointers, addend, mask=here, sem="relaxed")


@triton.jit
def add_corners(base, row, width, key, in00, in01, in10, in11, s00, s01, s10, s11, addend):
    """Add `addend` times each corner's coefficient to its row."""
    top = base + row.to(tl.int64) * key
    bottom = base + (row + width).to(tl.int64) * key
    add(top, s00 * addend, in00)
    add(top + key, s01 * addend, in01)
    add(bottom, s10 * addend, in10)
    add(bottom + key, s11 * addend, in11)


@triton.jit
def record(targets, parts, at, first, step, row, width, right, below, in00, in01, in10, in11):
    """Record for sample `at` the four rows it adds to, numbered in the whole of value, and their coefficients."""
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
    """The threads of a row, [1, threads]. A tensor [rows, threads] has the layout of sums over channels, so that the first
    thread stores them without an exchange. Triton 3.7.1 gives a store of [rows, channels] at one address another layout."""
    HELD: tl.constexpr = LANE if LANE < _MOST_HELD else _MOST_HELD
    return tl.arange(0, COLUMNS // HELD)[None, :]


@triton.jit
def by_lane(t, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr):
    """[ROWS, COLUMNS] -> [ROWS, threads of a row]: the sums within each thread."""
    HELD: tl.constexpr = LANE if LANE < _MOST_HELD else _MOST_HELD
    return tl.sum(tl.reshape(t, (ROWS, COLUMNS // HELD, HELD)), 2)


@triton.jit
def dots(v00, v01, v10, v11, g, right, below, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr):
    """Products of g with the sample and with its slopes, summed over channels: [ROWS, 1] each.

    The four corners are combined within lanes, so that three sums cross lanes instead of four.
    """
    sample, dx, dy = slopes(
        by_lane(v00 * g, ROWS, COLUMNS, LANE),
        by_lane(v01 * g, ROWS, COLUMNS, LANE),
        by_lane(v10 * g, ROWS, COLUMNS, LANE),
        by_lane(v11 * g, ROWS, COLUMNS, LANE),
        right,
        below,
    )
    return tl.sum(sample, 1, keep_dims=True), tl.sum(dx, 1, keep_dims=True), tl.sum(dy, 1, keep_dims=True)
