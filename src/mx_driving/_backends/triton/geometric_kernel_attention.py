"""geometric_kernel_attention on a GPU: the kernels. sampler.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._operator.description import OPERATORS
from .sampler import VARYING, Kernels, plan, tile_of
from .sampling import (
    _MOST_ROWS,
    ADDED,
    RECORDED,
    add,
    by_lane,
    exists,
    level,
    read,
    read_pair,
    record_one,
    start_row,
    weigh,
)

_WHOLE = tl.constexpr(8388608.0)  # 2**23: float32 numbers from here on are whole


@triton.jit
def _nearest(location, size):
    """Return the location, truncated and clamped to 0..size - 1. NaN becomes 0.

    Clamp the location before the conversion, because int32 does not hold every location.
    """
    location = tl.where(location > 0, location, 0)
    if location.dtype.is_floating():
        # clamp to _MOST_ROWS, the bound of all sizes, because float32 does not hold every size
        location = tl.minimum(location.to(tl.float32), _MOST_ROWS)
    else:
        location = tl.minimum(location.to(tl.int64), size)
    return tl.minimum(location.to(tl.int32), size - 1)


@triton.jit
def _round(t):
    """Round to the nearest integer, half to even. The result for a negative number is inexact, but at most 0."""
    return tl.where(t < _WHOLE, (t + _WHOLE) - _WHOLE, t)


@triton.jit
def _scale(x, size):
    """Return x * size, rounded to float32. The maximum keeps ptxas from fusing this product with the addition of the window."""
    return tl.maximum(x * size, -1.0 * _MOST_ROWS)


@triton.jit
def _read_reference(reference, row, zero, LOGITS: tl.constexpr):
    """Return the reference point of a row; without LOGITS, zeros."""
    if LOGITS:
        x, y = read_pair(reference, row, zero)
    else:
        x = tl.zeros((1, 1), tl.float32)
        y = x
    return x, y


@triton.jit
def _pixel(locations, at, p, x, y, height, width, start, num_keys, LOGITS: tl.constexpr):
    """Return the row of a sample's pixel in value, and whether this row may be read.

    With LOGITS, `locations` are the window, and (x, y) is the pixel of the reference point.
    """
    if LOGITS:
        i = _nearest(_round(x + tl.load(locations + 2 * p).to(tl.float32)), width)
        j = _nearest(_round(y + tl.load(locations + 2 * p + 1).to(tl.float32)), height)
    else:
        i = _nearest(tl.load(locations + 2 * at), width)
        j = _nearest(tl.load(locations + 2 * at + 1), height)
    row = start + j * width + i
    return row, (width > 0) & exists(row, num_keys)


@triton.jit(do_not_specialize=VARYING)
def _forward(
    value, shapes, starts, reference, locations, weights, output,
    queries, num_keys, batch_stride: tl.int64, key_stride: tl.int64, head_stride: tl.int64,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr, UNROLL: tl.constexpr,
    LOGITS: tl.constexpr,
):  # fmt: skip
    _, _, here, row, c, base = tile_of(value, queries, batch_stride, head_stride, HEADS, ROWS, COLUMNS, LANE)
    channel = c < CHANNELS
    key = KEY if KEY > 0 else key_stride * LANE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    top, scale, zero = start_row(weights, row, c, LOGITS, LEVELS * POINTS, ROWS, COLUMNS)
    reference_x, reference_y = _read_reference(reference, row, zero, LOGITS)
    for l in range(LEVELS):
        height, width, start = level(shapes, starts, l)
        x, y = _scale(reference_x, width), _scale(reference_y, height)
        for p in tl.range(POINTS, loop_unroll_factor=UNROLL):
            at = row * (LEVELS * POINTS) + (l * POINTS + p)
            pixel, inside = _pixel(locations, at, p, x, y, height, width, start, num_keys, LOGITS)
            weight = weigh(weights, at, top, scale, LOGITS)
            total += weight * read(base + pixel.to(tl.int64) * key, inside & channel)
    tl.store(output + row * CHANNELS + c, total.to(output.dtype.element_ty), mask=here & channel)


@triton.jit(do_not_specialize=VARYING)
def _backward(
    grad, value, shapes, starts, reference, locations, weights, grad_value, grad_weights, targets, parts,
    queries, num_keys, batch_stride: tl.int64, key_stride: tl.int64, head_stride: tl.int64,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr, UNROLL: tl.constexpr,
    LOGITS: tl.constexpr, VALUE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    batch, head, here, row, c, base = tile_of(value, queries, batch_stride, head_stride, HEADS, ROWS, COLUMNS, LANE)
    channel = c < CHANNELS
    key = KEY if KEY > 0 else key_stride * LANE
    first = batch * num_keys * HEADS + head
    grad_base = grad_value + first * CHANNELS + c
    g = tl.load(grad + row * CHANNELS + c, mask=here & channel, other=0.0).to(tl.float32)
    top, scale, zero = start_row(weights, row, c, LOGITS, LEVELS * POINTS, ROWS, COLUMNS)
    reference_x, reference_y = _read_reference(reference, row, zero, LOGITS)
    for l in range(LEVELS):
        height, width, start = level(shapes, starts, l)
        x, y = _scale(reference_x, width), _scale(reference_y, height)
        for p in tl.range(POINTS, loop_unroll_factor=UNROLL):
            at = row * (LEVELS * POINTS) + (l * POINTS + p)
            pixel, inside = _pixel(locations, at, p, x, y, height, width, start, num_keys, LOGITS)
            if VALUE == RECORDED:
                record_one(targets, parts, at, first, HEADS, pixel, 1.0, inside & here)
            inside = inside & here & channel
            if WEIGHTS:
                product = read(base + pixel.to(tl.int64) * key, inside) * tl.where(inside, g, 0.0)
                dot = tl.sum(by_lane(product, ROWS, COLUMNS, LANE), 1, keep_dims=True)
                tl.store(grad_weights + at, dot.to(grad_weights.dtype.element_ty), mask=here)
            if VALUE == ADDED:
                weight = weigh(weights, at, top, scale, LOGITS)
                add(grad_base + pixel.to(tl.int64) * (HEADS * CHANNELS), weight * g, inside)


_OPERATOR = OPERATORS["geometric_kernel_attention"]
kernels = Kernels(_OPERATOR, _forward, _backward, ("WEIGHTS",), plan, 3, {"LOGITS": False})
forward, backward = kernels.forward_of, kernels.backward_of
