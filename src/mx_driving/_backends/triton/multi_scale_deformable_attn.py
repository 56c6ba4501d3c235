"""multi_scale_deformable_attn on a GPU: the kernels. sampler.py launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from ..._operator.description import OPERATORS
from .sampler import VARYING, Kernels, plan, tile_of
from .sampling import (
    ADDED,
    RECORDED,
    add_corners,
    bilinear,
    by_lane,
    coefficients,
    corners,
    dots,
    level,
    locate,
    read_pair,
    record,
    start_row,
    store_pair,
    threads,
    weigh,
)

OF_LOCATIONS, OF_OFFSETS = 1, 2  # the input whose gradient the kernel writes to `grad_locations`
_OF_LOCATIONS = tl.constexpr(OF_LOCATIONS)


@triton.jit
def _read_sample(
    reference, locations, weights, query, at, l, p, height, width, top, scale, zero,
    POINTS: tl.constexpr, REFERENCES: tl.constexpr, BY_POINT: tl.constexpr, BOX: tl.constexpr,
):  # fmt: skip
    """Return the weight of a sample, its pixel (x, y), and how many pixels (across, down) an offset of 1 moves it.

    With REFERENCES, `locations` are offsets and `weights` are logits.
    """
    if REFERENCES:
        index = query * REFERENCES + (p if BY_POINT else l) % REFERENCES
        x, y, across, down = locate(reference, index, height, width, zero, POINTS, BOX)
        offset_x, offset_y = read_pair(locations, at, zero)
        x += offset_x * across
        y += offset_y * down
    else:
        x = tl.load(locations + 2 * at).to(tl.float32) * width - 0.5
        y = tl.load(locations + 2 * at + 1).to(tl.float32) * height - 0.5
        across, down = width, height
    weight = weigh(weights, at, top, scale, REFERENCES)
    return weight, x, y, across, down


@triton.jit(do_not_specialize=VARYING)
def _forward(
    value, shapes, starts, reference, locations, weights, output,
    queries, num_keys, batch_stride: tl.int64, key_stride: tl.int64, head_stride: tl.int64,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr, UNROLL: tl.constexpr,
    REFERENCES: tl.constexpr, BY_POINT: tl.constexpr, BOX: tl.constexpr,
):  # fmt: skip
    _, _, here, row, c, base = tile_of(value, queries, batch_stride, head_stride, HEADS, ROWS, COLUMNS, LANE)
    channel = c < CHANNELS
    key = KEY if KEY > 0 else key_stride * LANE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    top, scale, zero = start_row(weights, row, c, REFERENCES, LEVELS * POINTS, ROWS, COLUMNS)
    for l in range(LEVELS):
        height, width, start = level(shapes, starts, l)
        for p in tl.range(POINTS, loop_unroll_factor=UNROLL):
            at = row * (LEVELS * POINTS) + (l * POINTS + p)
            weight, x, y, _across, _down = _read_sample(
                reference, locations, weights, row // HEADS, at, l, p, height, width, top, scale, zero,
                POINTS, REFERENCES, BY_POINT, BOX,
            )  # fmt: skip
            valid, pixel, right, below, in00, in01, in10, in11 = bilinear(x, y, height, width, start, num_keys, LEAST=True)
            in00, in01, in10, in11 = in00 & channel, in01 & channel, in10 & channel, in11 & channel
            v00, v01, v10, v11 = corners(base, pixel, width, key, in00, in01, in10, in11, ONCE=True)
            s00, s01, s10, s11 = coefficients(right, below, tl.where(valid, weight, 0.0))
            total += s00 * v00
            total += s01 * v01
            total += s10 * v10
            total += s11 * v11
    tl.store(output + row * CHANNELS + c, total.to(output.dtype.element_ty), mask=here & channel)


@triton.jit(do_not_specialize=VARYING)
def _backward(
    grad, value, shapes, starts, reference, locations, weights, grad_value, grad_locations, grad_weights, targets, parts,
    queries, num_keys, batch_stride: tl.int64, key_stride: tl.int64, head_stride: tl.int64,
    HEADS: tl.constexpr, CHANNELS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr, UNROLL: tl.constexpr,
    REFERENCES: tl.constexpr, BY_POINT: tl.constexpr, BOX: tl.constexpr,
    VALUE: tl.constexpr, LOCATIONS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    batch, head, here, row, c, base = tile_of(value, queries, batch_stride, head_stride, HEADS, ROWS, COLUMNS, LANE)
    channel = c < CHANNELS
    key = KEY if KEY > 0 else key_stride * LANE
    first = batch * num_keys * HEADS + head
    grad_base = grad_value + first * CHANNELS + c
    top, scale, zero = start_row(weights, row, c, REFERENCES, LEVELS * POINTS, ROWS, COLUMNS)
    g = tl.load(grad + row * CHANNELS + c, mask=here & channel, other=0.0).to(tl.float32)
    if REFERENCES:
        # Coordinates are combined with `zero` (see `start_row`). The `zero` of `start_row` has a copy per channel, so ptxas
        # would compute each coordinate twice. Replace it by a `zero` without copies, from `g` summed within threads.
        zero = (tl.sum(by_lane(g, ROWS, COLUMNS, LANE), 1, keep_dims=True).to(tl.int32, bitcast=True) & 1) >> 1
    thread = threads(COLUMNS, LANE)
    for l in range(LEVELS):
        height, width, start = level(shapes, starts, l)
        for p in tl.range(POINTS, loop_unroll_factor=UNROLL):
            at = row * (LEVELS * POINTS) + (l * POINTS + p)
            weight, x, y, across, down = _read_sample(
                reference, locations, weights, row // HEADS, at, l, p, height, width, top, scale, zero,
                POINTS, REFERENCES, BY_POINT, BOX,
            )  # fmt: skip
            valid, pixel, right, below, in00, in01, in10, in11 = bilinear(x, y, height, width, start, num_keys, LEAST=True)
            valid = valid & here
            in00, in01, in10, in11 = in00 & here, in01 & here, in10 & here, in11 & here
            if VALUE == RECORDED:
                record(targets, parts, at, first, HEADS, pixel, width, right, below, in00, in01, in10, in11)
            weight = tl.where(valid, weight, 0.0)
            in00, in01, in10, in11 = in00 & channel, in01 & channel, in10 & channel, in11 & channel
            if LOCATIONS or WEIGHTS:
                v00, v01, v10, v11 = corners(base, pixel, width, key, in00, in01, in10, in11)
                sample, dx, dy = dots(v00, v01, v10, v11, g, right, below, ROWS, COLUMNS, LANE)
                if WEIGHTS:
                    sample = (tl.where(valid, sample, 0.0) + 0.0 * thread).to(grad_weights.dtype.element_ty)
                    tl.store(grad_weights + at + 0 * thread, sample, mask=here & (thread == 0))
                if LOCATIONS:
                    if LOCATIONS == _OF_LOCATIONS:
                        across, down = width, height
                    dx = tl.where(valid, dx * weight * across, 0.0) + 0.0 * thread
                    dy = tl.where(valid, dy * weight * down, 0.0) + 0.0 * thread
                    store_pair(grad_locations, at + 0 * thread, dx, dy, here & (thread == 0))
            if VALUE == ADDED:
                s00, s01, s10, s11 = coefficients(right, below, weight)
                add_corners(grad_base, pixel, width, HEADS * CHANNELS, in00, in01, in10, in11, s00, s01, s10, s11, g)


_BARE = {"REFERENCES": 0, "BY_POINT": False, "BOX": False}
_GRADIENTS = "LOCATIONS", "WEIGHTS"
kernels = Kernels(OPERATORS["multi_scale_deformable_attn"], _forward, _backward, _GRADIENTS, plan, 3, _BARE)
forward, backward = kernels.forward_of, kernels.backward_of
