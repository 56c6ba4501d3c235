"""geometric_kernel_attention on a GPU: the kernels. attention.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._operator.description import OPERATORS
from . import attention
from .attention import VARYING, tile_of
from .sampling import _MOST_ROWS, ADDED, RECORDED, add, by_lane, exists, level, read, record_one


@triton.jit
def _nearest(location, size):
    """The location, truncated and clamped to 0..size - 1; a NaN becomes 0.

    It is clamped before it is converted, because int32 does not hold every location.
    """
    location = tl.where(location > 0, location, 0)
    if location.dtype.is_floating():
        # clamped to the bound of all sizes first: float32 holds that one, but not every size
        location = tl.minimum(location.to(tl.float32), _MOST_ROWS)
    else:
        location = tl.minimum(location.to(tl.int64), size)
    return tl.minimum(location.to(tl.int32), size - 1)


@triton.jit
def _pixel(locations, at, height, width, start, num_keys):
    """The row of the pixel at a location, and whether it may be read."""
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
):  # fmt: skip
    _, _, here, row, c, base = tile_of(value, queries, batch_stride, head_stride, HEADS, ROWS, COLUMNS, LANE)
    channel = c < CHANNELS
    key = KEY if KEY > 0 else key_stride * LANE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for l in range(LEVELS):
        height, width, start = level(shapes, starts, l)
        for p in tl.range(POINTS, loop_unroll_factor=UNROLL):
            at = row * (LEVELS * POINTS) + (l * POINTS + p)
            pixel, inside = _pixel(locations, at, height, width, start, num_keys)
            weight = tl.load(weights + at).to(tl.float32)
            total += weight * read(base + pixel.to(tl.int64) * key, inside & channel)
    tl.store(output + row * CHANNELS + c, total.to(output.dtype.element_ty), mask=here & channel)


@triton.jit(do_not_specialize=VARYING)
def _backward(
    grad, value, shapes, starts, reference, locations, weights, grad_value, grad_weights, targets, parts,
    queries, num_keys, batch_stride: tl.int64, key_stride: tl.int64, head_stride: tl.int64,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr, UNROLL: tl.constexpr,
    VALUE: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    batch, head, here, row, c, base = tile_of(value, queries, batch_stride, head_stride, HEADS, ROWS, COLUMNS, LANE)
    channel = c < CHANNELS
    key = KEY if KEY > 0 else key_stride * LANE
    first = batch * num_keys * HEADS + head
    grad_base = grad_value + first * CHANNELS + c
    g = tl.load(grad + row * CHANNELS + c, mask=here & channel, other=0.0).to(tl.float32)
    for l in range(LEVELS):
        height, width, start = level(shapes, starts, l)
        for p in tl.range(POINTS, loop_unroll_factor=UNROLL):
            at = row * (LEVELS * POINTS) + (l * POINTS + p)
            pixel, inside = _pixel(locations, at, height, width, start, num_keys)
            if VALUE == RECORDED:
                record_one(targets, parts, at, first, HEADS, pixel, 1.0, inside & here)
            inside = inside & here & channel
            if WEIGHTS:
                product = read(base + pixel.to(tl.int64) * key, inside) * tl.where(inside, g, 0.0)
                dot = tl.sum(by_lane(product, ROWS, COLUMNS, LANE), 1, keep_dims=True)
                tl.store(grad_weights + at, dot.to(grad_weights.dtype.element_ty), mask=here)
            if VALUE == ADDED:
                weight = tl.load(weights + at).to(tl.float32)
                add(grad_base + pixel.to(tl.int64) * (HEADS * CHANNELS), weight * g, inside)


_kernels = attention.Kernels(OPERATORS["geometric_kernel_attention"], _forward, _backward, ("WEIGHTS",), {})
forward, backward = _kernels.forward_of, _kernels.backward_of
