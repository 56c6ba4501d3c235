"""deformable_aggregation on a GPU: a program computes an anchor (backward: a point of an anchor), as a tile [groups, channels].

A program reads up to 32 locations at once, and then visits the locations inside their image, one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import triton
import triton.language as tl

from ..._operator.description import OPERATORS
from . import launch
from .sampler import Kernels
from .sampling import ADDED, RECORDED, add_corners, bilinear, coefficients, corners, dots, level, power, record

# Kernels are not specialized for these arguments, so a call with new values compiles nothing.
_VARYING = ["anchors", "num_keys", "batch_stride", "key_stride"]


@triton.jit
def _seen_bits(locations, first, count):
    """Return an int32. Bit k is set if location `first + k` lies strictly inside the image, for k < min(count, 32). NaN is not
    inside."""
    k = tl.arange(0, 32)
    at = 2 * (first + tl.minimum(k, count - 1))  # clamped, so that reads need no mask
    x = tl.load(locations + at).to(tl.float32)
    y = tl.load(locations + at + 1).to(tl.float32)
    return tl.sum(tl.where((k < count) & (x > 0) & (x < 1) & (y > 0) & (y < 1), 1 << k, 0), 0)


@triton.jit
def _lowest(bits):
    """Return the index of the lowest set bit (the exponent of this bit as a float), and the other bits."""
    bit = bits & -bits
    return ((bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127, bits ^ bit


@triton.jit
def _location(locations, at):
    """Return x and y of a location as tensors [1, 1]."""
    x = tl.load(locations + 2 * at + tl.zeros((1, 1), tl.int32)).to(tl.float32)
    return x, tl.load(locations + 2 * at + tl.zeros((1, 1), tl.int32) + 1).to(tl.float32)


@triton.jit
def _sample(x, y, shapes, starts, map, num_keys):
    """Return the size of a map, and the results of `bilinear` for the point on this map, as tensors [1, 1]."""
    height, width, start = level(shapes, starts, map)
    valid, pixel, right, below, in00, in01, in10, in11 = bilinear(
        x * width - 0.5, y * height - 0.5, height, width, start, num_keys
    )
    return height, width, valid, pixel, right, below, in00, in01, in10, in11


@triton.jit
def _row(pair, anchor, point, cam, s, POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, LOGITS: tl.constexpr):
    """Return the row of a sample in weights [bs * anchor * pts * cam, scale], or in logits [bs * anchor, cam, scale, pts]."""
    return ((anchor * CAMS + cam) * SCALES + s) * POINTS + point if LOGITS else pair * SCALES + s


@triton.jit
def _read_groups(pointers, group, GROUPS: tl.constexpr):
    return tl.load(pointers + group, mask=group < GROUPS, other=0.0).to(tl.float32)


@triton.jit
def _start(sums, anchor, group, GROUPS: tl.constexpr, LOGITS: tl.constexpr):
    """Return the greatest logit and the inverse of the softmax's sum for each group of an anchor; without LOGITS, zeros."""
    if LOGITS:
        top = _read_groups(sums + 2 * anchor * GROUPS, group, GROUPS)
        inverse = _read_groups(sums + (2 * anchor + 1) * GROUPS, group, GROUPS)
    else:
        top = tl.zeros((1, 1), tl.float32)
        inverse = top
    return top, inverse


@triton.jit
def _weigh(
    weights, row, group, top, inverse, pair_scale, at, GROUPS: tl.constexpr, LOGITS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return the weights of a sample. With LOGITS, `weights` are logits; with SCALED, multiply the softmax by pair_scale."""
    weight = _read_groups(weights + row * GROUPS, group, GROUPS)
    if LOGITS:
        weight = power(weight, top) * inverse
        if SCALED:
            weight *= tl.load(pair_scale + at).to(tl.float32)
    return weight


@triton.jit(do_not_specialize=_VARYING)
def _forward(
    features, shapes, starts, locations, sums, pair_scale, weights, output,
    anchors, num_keys, batch_stride: tl.int64, key_stride: tl.int64,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr, UNROLL: tl.constexpr,
    LOGITS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    anchor = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    c = group * WIDTH + column
    inside = (group < GROUPS) & (column < WIDTH)
    base = features + (anchor // anchors * batch_stride) * LANE + c
    key = KEY if KEY > 0 else key_stride * LANE
    top, inverse = _start(sums, anchor, group, GROUPS, LOGITS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, POINTS * CAMS, 32):
        bits = _seen_bits(locations, anchor * (POINTS * CAMS) + first, POINTS * CAMS - first)
        part = tl.zeros((ROWS, COLUMNS), tl.float32)  # sum over at most 32 locations: a longer float32 sum would lose digits
        while bits != 0:
            k, bits = _lowest(bits)
            point, cam = (first + k) // CAMS, (first + k) % CAMS
            pair = anchor * (POINTS * CAMS) + first + k
            x, y = _location(locations, pair)
            for s in tl.range(SCALES, loop_unroll_factor=UNROLL):
                _, width, valid, pixel, right, below, in00, in01, in10, in11 = _sample(
                    x, y, shapes, starts, cam * SCALES + s, num_keys
                )
                row = _row(pair, anchor, point, cam, s, POINTS, CAMS, SCALES, LOGITS)
                scale = (anchor * CAMS + cam) * POINTS + point
                weight = _weigh(weights, row, group, top, inverse, pair_scale, scale, GROUPS, LOGITS, SCALED)
                v00, v01, v10, v11 = corners(
                    base, pixel, width, key, in00 & inside, in01 & inside, in10 & inside, in11 & inside
                )
                s00, s01, s10, s11 = coefficients(right, below, tl.where(valid, weight, 0.0))
                part += s00 * v00
                part += s01 * v01
                part += s10 * v10
                part += s11 * v11
        total += part
    tl.store(output + anchor * (GROUPS * WIDTH) + c, total.to(output.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_VARYING)
def _backward(
    grad, features, shapes, starts, locations, sums, pair_scale, weights, grad_features, grad_locations, grad_weights,
    targets, parts, anchors, num_keys, batch_stride: tl.int64, key_stride: tl.int64,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr,
    LOGITS: tl.constexpr, SCALED: tl.constexpr, VALUE: tl.constexpr, LOCATIONS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a point's samples in the cameras that see it. The caller has set all gradients to zero."""
    point = tl.program_id(0).to(tl.int64)
    anchor = point // POINTS
    batch = anchor // anchors
    group = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    c = group * WIDTH + column
    inside = (group < GROUPS) & (column < WIDTH)
    base = features + batch * batch_stride * LANE + c
    key = KEY if KEY > 0 else key_stride * LANE
    grad_base = grad_features + batch * num_keys * (GROUPS * WIDTH) + c
    g = tl.load(grad + anchor * (GROUPS * WIDTH) + c, mask=inside, other=0.0).to(tl.float32)
    top, inverse = _start(sums, anchor, group, GROUPS, LOGITS)
    for first in range(0, CAMS, 32):
        bits = _seen_bits(locations, point * CAMS + first, CAMS - first)
        while bits != 0:
            k, bits = _lowest(bits)
            cam = first + k
            x, y = _location(locations, point * CAMS + cam)
            along_x = tl.zeros((ROWS, 1), tl.float32)
            along_y = tl.zeros((ROWS, 1), tl.float32)
            for s in tl.range(SCALES, loop_unroll_factor=1):
                height, width, valid, pixel, right, below, in00, in01, in10, in11 = _sample(
                    x, y, shapes, starts, cam * SCALES + s, num_keys
                )
                at = _row(point * CAMS + cam, anchor, point % POINTS, cam, s, POINTS, CAMS, SCALES, LOGITS)
                at += tl.zeros((1, 1), tl.int64)
                if VALUE == RECORDED:
                    record(targets, parts, at, batch * num_keys, 1, pixel, width, right, below, in00, in01, in10, in11)
                scale = (anchor * CAMS + cam) * POINTS + point % POINTS
                weight = _weigh(weights, at, group, top, inverse, pair_scale, scale, GROUPS, LOGITS, SCALED)
                weight = tl.where(valid, weight, 0.0)
                in00, in01, in10, in11 = in00 & inside, in01 & inside, in10 & inside, in11 & inside
                if LOCATIONS or WEIGHTS:
                    v00, v01, v10, v11 = corners(base, pixel, width, key, in00, in01, in10, in11)
                    sample, dx, dy = dots(v00, v01, v10, v11, g, right, below, ROWS, COLUMNS, LANE)
                    if WEIGHTS:
                        sample = tl.where(valid, sample, 0.0).to(grad_weights.dtype.element_ty)
                        tl.store(grad_weights + at * GROUPS + group, sample, mask=group < GROUPS)
                    along_x += tl.where(valid, weight * dx * width, 0.0)
                    along_y += tl.where(valid, weight * dy * height, 0.0)
                if VALUE == ADDED:
                    s00, s01, s10, s11 = coefficients(right, below, weight)
                    add_corners(grad_base, pixel, width, GROUPS * WIDTH, in00, in01, in10, in11, s00, s01, s10, s11, g)
            if LOCATIONS:
                location = grad_locations + 2 * (point * CAMS + cam)
                tl.store(location, tl.sum(tl.sum(along_x, 1), 0).to(grad_locations.dtype.element_ty))
                tl.store(location + 1, tl.sum(tl.sum(along_y, 1), 0).to(grad_locations.dtype.element_ty))


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, samples: Sequence[int], gpu: launch.Gpu, backward: bool
) -> launch.Plan:
    """Return the plan of a launch for feature maps of this shape and stride. `samples` is (points, cameras, scales, groups)."""
    points, cams, scales, groups = samples
    width = shape[2] // groups
    layout = launch.layout(shape, stride, itemsize, width)
    per_thread = min(layout.lane, launch.MOST_PER_THREAD) if backward else layout.lane
    # a tile of all groups of a row, with as many warps as it needs
    rows, columns = triton.next_power_of_2(groups), triton.next_power_of_2(width)
    tile = launch.Tile(rows, columns, max(1, launch.most_warps(rows * columns, per_thread, gpu.lanes)))
    sizes = {"POINTS": points, "CAMS": cams, "SCALES": scales, "GROUPS": groups, "WIDTH": width}
    if not backward:
        sizes["UNROLL"] = launch.unroll(scales)
    registers = 64 if gpu.capped and not backward else None
    return launch.plan(layout, tile, 1, points if backward else 1, registers, **sizes)


_BARE = {"LOGITS": False, "SCALED": False}
_GRADIENTS = "LOCATIONS", "WEIGHTS"
kernels = Kernels(OPERATORS["deformable_aggregation"], _forward, _backward, _GRADIENTS, _plan, 4, _BARE)
forward, backward = kernels.forward_of, kernels.backward_of
