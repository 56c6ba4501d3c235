"""deformable_aggregation on a GPU: a program owns an anchor (backward: one of its points) and a tile [groups, channels].

A program reads up to 32 locations at once and then visits those that lie inside their image, one after the other.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._operator.description import OPERATORS, empty_gradients
from . import deterministic, launch
from .sampling import ADDED, RECORDED, add_corners, bilinear, coefficients, corners, dots, level, record

_OPERATOR = OPERATORS["deformable_aggregation"]
# A kernel is not compiled anew for other values of these.
_VARYING = ["anchors", "num_keys", "batch_stride", "key_stride"]


@triton.jit
def _seen_bits(locations, first, count):
    """An int32 whose bit k is set if location `first + k` lies strictly inside the image, for k < min(count, 32). A NaN does
    not lie inside."""
    k = tl.arange(0, 32)
    at = 2 * (first + tl.minimum(k, count - 1))  # reads need no mask
    x = tl.load(locations + at).to(tl.float32)
    y = tl.load(locations + at + 1).to(tl.float32)
    return tl.sum(tl.where((k < count) & (x > 0) & (x < 1) & (y > 0) & (y < 1), 1 << k, 0), 0)


@triton.jit
def _lowest(bits):
    """The index of the lowest set bit, which is the exponent of that bit as a float, and the other bits."""
    bit = bits & -bits
    return ((bit.to(tl.float32).to(tl.int32, bitcast=True) >> 23) & 255) - 127, bits ^ bit


@triton.jit
def _location(locations, at):
    """A location as two tensors [1, 1]."""
    x = tl.load(locations + 2 * at + tl.zeros((1, 1), tl.int32)).to(tl.float32)
    return x, tl.load(locations + 2 * at + tl.zeros((1, 1), tl.int32) + 1).to(tl.float32)


@triton.jit
def _sample(x, y, shapes, starts, map, num_keys):
    """The size of one map, and the bilinear sample of the point on it, as tensors [1, 1]."""
    height, width, start = level(shapes, starts, map)
    valid, pixel, right, below, in00, in01, in10, in11 = bilinear(
        x * width - 0.5, y * height - 0.5, height, width, start, num_keys
    )
    return height, width, valid, pixel, right, below, in00, in01, in10, in11


@triton.jit(do_not_specialize=_VARYING)
def _forward(
    features, shapes, starts, locations, weights, output,
    anchors, num_keys, batch_stride: tl.int64, key_stride: tl.int64,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr, UNROLL: tl.constexpr,
):  # fmt: skip
    anchor = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    c = group * WIDTH + column
    inside = (group < GROUPS) & (column < WIDTH)
    base = features + (anchor // anchors * batch_stride) * LANE + c
    key = KEY if KEY > 0 else key_stride * LANE
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, POINTS * CAMS, 32):
        bits = _seen_bits(locations, anchor * (POINTS * CAMS) + first, POINTS * CAMS - first)
        part = tl.zeros((ROWS, COLUMNS), tl.float32)  # of 32 locations: one long sum would lose digits
        while bits != 0:
            k, bits = _lowest(bits)
            at = anchor * (POINTS * CAMS) + first + k
            x, y = _location(locations, at)
            for s in tl.range(SCALES, loop_unroll_factor=UNROLL):
                _, width, valid, pixel, right, below, in00, in01, in10, in11 = _sample(
                    x, y, shapes, starts, (first + k) % CAMS * SCALES + s, num_keys
                )
                weight = tl.load(weights + (at * SCALES + s) * GROUPS + group, mask=group < GROUPS, other=0.0).to(tl.float32)
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
    grad, features, shapes, starts, locations, weights, grad_features, grad_locations, grad_weights, targets, parts,
    anchors, num_keys, batch_stride: tl.int64, key_stride: tl.int64,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr, KEY: tl.constexpr,
    VALUE: tl.constexpr, LOCATIONS: tl.constexpr, WEIGHTS: tl.constexpr,
):  # fmt: skip
    """Write nothing for a camera that does not see the point: the caller has set all gradients to zero."""
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
                at = (point * CAMS + cam) * SCALES + s + tl.zeros((1, 1), tl.int64)
                if VALUE == RECORDED:
                    record(targets, parts, at, batch * num_keys, 1, pixel, width, right, below, in00, in01, in10, in11)
                weight = tl.load(weights + at * GROUPS + group, mask=group < GROUPS, other=0.0).to(tl.float32)
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
    shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, samples: tuple[int, ...], gpu: launch.Gpu, backward: bool
) -> launch.Plan:
    """Return the plan for feature maps of this layout, sampled at `samples` = (points, cameras, scales, groups)."""
    points, cams, scales, groups = samples
    width = shape[2] // groups
    layout = launch.layout(shape, stride, itemsize, width)
    per_thread = min(layout.lane, launch.MOST_HELD) if backward else layout.lane
    tile = launch.grouped_tile(groups, width, per_thread, gpu.lanes)
    sizes = {"POINTS": points, "CAMS": cams, "SCALES": scales, "GROUPS": groups, "WIDTH": width}
    if not backward:
        sizes["UNROLL"] = launch.unroll(scales)
    return launch.plan(layout, tile, 64 if gpu.capped and not backward else None, **sizes)


def forward(
    feature_maps: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weight: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    bs, num_keys, channels = feature_maps.shape
    anchors = locations.shape[1]
    launch.check(*_OPERATOR.tables, shapes, starts, num_keys)
    output = feature_maps.new_empty((bs, anchors, channels), dtype=dtype)
    if not output.numel() or not weight.numel() or not num_keys:
        return output.zero_()
    value = launch.packed(feature_maps)
    plan = _plan(value.shape, value.stride(), value.element_size(), weight.shape[2:], launch.gpu(), False)
    tensors = (value, shapes.contiguous(), starts.contiguous(), locations.contiguous(), weight.contiguous(), output)
    launch.run(_forward, bs * anchors, tensors, (anchors, num_keys, *plan.strides), plan.options)
    return output


def backward(
    grad: Tensor, feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor, mask: list[bool]
) -> tuple[Tensor, ...]:
    bs, num_keys, _ = feature_maps.shape
    anchors, points, cams, groups = *locations.shape[1:4], weight.shape[5]
    launch.check(*_OPERATOR.tables, shapes, starts, num_keys)
    others = [g.zero_() for g in empty_gradients((locations, weight), mask[1:])]
    if not grad.numel() or not weight.numel() or not num_keys:
        return (empty_gradients((feature_maps,), mask[:1])[0].zero_(), *others)
    value = launch.packed(feature_maps)
    plan = _plan(value.shape, value.stride(), value.element_size(), weight.shape[2:], launch.gpu(), True)
    grad, weight = grad.contiguous(), weight.contiguous()
    sums = deterministic.Sums(feature_maps, mask[0], _OPERATOR.rows * weight.numel() // groups)
    tensors = (grad, value, shapes.contiguous(), starts.contiguous(), locations.contiguous(), weight)
    tensors += (sums.buffer, *others, sums.targets, sums.parts)
    flags = {"VALUE": sums.how, "LOCATIONS": mask[1], "WEIGHTS": mask[2]}
    launch.run(_backward, bs * anchors * points, tensors, (anchors, num_keys, *plan.strides), plan.options, **flags)
    return (sums.finish(grad, weight, points * cams * starts.shape[1], groups), *others)
