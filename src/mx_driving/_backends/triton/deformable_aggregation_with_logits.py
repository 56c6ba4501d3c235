"""deformable_aggregation_with_logits on a GPU: a first kernel computes locations and the sums of the softmax. The bare
operator's kernel computes weights from logits, only for samples that a camera sees.

In the backward, a third kernel computes the gradients of key points and logits from those of locations and weights. A program
of the first or third kernel has an anchor and up to 64 of the anchor's groups. Plain torch computes the gradient of projection,
which few models need. In deterministic mode, plain torch also computes the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._operator import composition
from . import deformable_aggregation, launch
from .deformable_aggregation import kernels
from .sampler import Samples
from .sampling import power, read_pair, store_pair

_NAME = "deformable_aggregation_with_logits"
_NEAREST = tl.constexpr(composition.NEAREST)
_ELEMENTS = 1024  # elements of a tile of logits
_PAIRS = 128  # (point, camera) pairs of a tile
_MOST_GROUPS = 64  # groups of a program
_THREADS = 256


@triton.jit
def _anchor(GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return (anchor, is_first_block_of_groups, row indices, group indices) of this program."""
    blocks: tl.constexpr = (GROUPS + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) % blocks
    anchor = (tl.program_id(0) // blocks).to(tl.int64)
    return anchor, block == 0, tl.arange(0, ROWS)[:, None], block * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _read_logits(logits, anchor, row, group, SAMPLES: tl.constexpr, GROUPS: tl.constexpr):
    """Return logits in float32 (-inf where they do not exist), their indices, and a mask of logits that exist."""
    here = (row < SAMPLES) & (group < GROUPS)
    at = (anchor * SAMPLES + row) * GROUPS + group
    return tl.load(logits + at, mask=here, other=-float("inf")).to(tl.float32), at, here


@triton.jit
def _pairs(anchor, first, POINTS: tl.constexpr, CAMS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the points and cameras of a tile, and a mask of pairs that exist. Other pairs repeat the last point or camera."""
    p, cam = first + tl.arange(0, PAIRS)[:, None], tl.arange(0, COLUMNS)[None, :]
    here = (p < POINTS) & (cam < CAMS)
    return anchor * POINTS + tl.minimum(p, POINTS - 1), tl.minimum(cam, CAMS - 1), here


@triton.jit
def _multiply(projection, at, x, y, z):
    """Return the product of the matrix row at index `at` and (x, y, z, 1)."""
    a, b = tl.load(projection + at).to(tl.float32), tl.load(projection + at + 1).to(tl.float32)
    c, d = tl.load(projection + at + 2).to(tl.float32), tl.load(projection + at + 3).to(tl.float32)
    return a * x + b * y + c * z + d


@triton.jit
def _project(points, projection, image_size, point, camera, SIZED: tl.constexpr):
    """Return u / depth, v / depth, the depth of points (at least _NEAREST), a mask of points that are at least this far, and
    the width and height of the image (1 without SIZED)."""
    x, y = tl.load(points + 3 * point).to(tl.float32), tl.load(points + 3 * point + 1).to(tl.float32)
    z = tl.load(points + 3 * point + 2).to(tl.float32)
    depth = _multiply(projection, 16 * camera + 8, x, y, z)
    farther = depth >= _NEAREST
    depth = tl.where(depth < _NEAREST, _NEAREST, depth)  # `where` keeps NaN
    u = tl.div_rn(_multiply(projection, 16 * camera, x, y, z), depth)
    v = tl.div_rn(_multiply(projection, 16 * camera + 4, x, y, z), depth)
    width = tl.zeros_like(u) + 1.0
    height = width
    if SIZED:
        width *= tl.load(image_size + 2 * camera).to(tl.float32)
        height *= tl.load(image_size + 2 * camera + 1).to(tl.float32)
    return u, v, depth, farther, width, height


@triton.jit(do_not_specialize=["anchors"])
def _normalise(
    points, projection, logits, image_size, locations, sums, anchors,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, SIZED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS_OF_PAIRS: tl.constexpr,
):  # fmt: skip
    samples: tl.constexpr = POINTS * CAMS * SCALES
    anchor, is_first, rows, group = _anchor(GROUPS, ROWS, COLUMNS)
    if is_first:
        for first in range(0, POINTS, PAIRS):
            point, cam, here = _pairs(anchor, first, POINTS, CAMS, PAIRS, COLUMNS_OF_PAIRS)
            camera = anchor // anchors * CAMS + cam
            u, v, _depth, _farther, width, height = _project(points, projection, image_size, point, camera, SIZED)
            store_pair(locations, point * CAMS + cam, tl.div_rn(u, width), tl.div_rn(v, height), here)
    greatest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for first in range(0, samples, ROWS):
        logit, _at, _here = _read_logits(logits, anchor, first + rows, group, samples, GROUPS)
        greatest = tl.maximum(greatest, logit)
    top = tl.max(greatest, 0, keep_dims=True)
    powers = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, samples, ROWS):
        logit, _at, _here = _read_logits(logits, anchor, first + rows, group, samples, GROUPS)
        powers += power(logit, top)
    tl.store(sums + 2 * anchor * GROUPS + group, top, mask=group < GROUPS)
    tl.store(sums + (2 * anchor + 1) * GROUPS + group, 1.0 / tl.sum(powers, 0, keep_dims=True), mask=group < GROUPS)


@triton.jit
def _finite(t):
    return tl.where(t - t == 0, t, 0.0)


@triton.jit
def _differentiate_points(
    points, projection, image_size, grad_locations, grad_points, anchor, batch,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SIZED: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    for first in range(0, POINTS, PAIRS):
        point, cam, here = _pairs(anchor, first, POINTS, CAMS, PAIRS, COLUMNS)
        camera = batch * CAMS + cam
        u, v, depth, farther, width, height = _project(points, projection, image_size, point, camera, SIZED)
        x, y = tl.div_rn(u, width), tl.div_rn(v, height)
        seen = here & (x > 0) & (x < 1) & (y > 0) & (y < 1)
        grad_u, grad_v = read_pair(grad_locations, point * CAMS + cam)
        # where a camera does not see the point, replace infinity and NaN before multiplying, because 0 x infinity is NaN
        depth = tl.where(seen, depth, 1.0)
        grad_u = tl.where(seen, grad_u / (width * depth), 0.0)
        grad_v = tl.where(seen, grad_v / (height * depth), 0.0)
        grad_depth = tl.where(seen & farther, -(grad_u * tl.where(seen, u, 0.0) + grad_v * tl.where(seen, v, 0.0)), 0.0)
        for axis in tl.static_range(3):
            at = projection + 16 * camera + axis
            total = grad_u * _finite(tl.load(at).to(tl.float32)) + grad_v * _finite(tl.load(at + 4).to(tl.float32))
            total += grad_depth * _finite(tl.load(at + 8).to(tl.float32))
            total = tl.sum(total, 1, keep_dims=True).to(grad_points.dtype.element_ty)
            tl.store(grad_points + 3 * point + axis, total, mask=first + tl.arange(0, PAIRS)[:, None] < POINTS)


@triton.jit
def _read_weights(
    logits, grad_weights, pair_scale, top, inverse, anchor, first, group,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, SCALED: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Return softmax weights of rows from `first` (0 where they do not exist), their gradients, their indices, and a mask."""
    row = first + tl.arange(0, ROWS)
    logit, at, here = _read_logits(logits, anchor, row[:, None], group, POINTS * CAMS * SCALES, GROUPS)
    grad = tl.load(grad_weights + at, mask=here, other=0.0)
    if SCALED:
        # load a single axis, because a load of [ROWS, 1] would give the tile another layout
        pair = (anchor * CAMS + row // (SCALES * POINTS)) * POINTS + row % POINTS
        grad *= tl.load(pair_scale + pair, mask=row < POINTS * CAMS * SCALES, other=0.0).to(tl.float32)[:, None]
    return tl.where(here, power(logit, top) * inverse, 0.0), grad, at, here


@triton.jit(do_not_specialize=["anchors"])
def _backward(
    points, projection, logits, image_size, sums, pair_scale, grad_locations, grad_weights, grad_points, grad_logits, anchors,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, SIZED: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS_OF_PAIRS: tl.constexpr,
    OF_POINTS: tl.constexpr, OF_LOGITS: tl.constexpr,
):  # fmt: skip
    samples: tl.constexpr = POINTS * CAMS * SCALES
    anchor, is_first, _rows, group = _anchor(GROUPS, ROWS, COLUMNS)
    if OF_POINTS:  # noqa: SIM102 -- a compile-time constant outside, a run-time value inside
        if is_first:
            _differentiate_points(
                points, projection, image_size, grad_locations, grad_points, anchor, anchor // anchors,
                POINTS, CAMS, SIZED, PAIRS, COLUMNS_OF_PAIRS,
            )  # fmt: skip
    if OF_LOGITS:
        top = tl.load(sums + 2 * anchor * GROUPS + group, mask=group < GROUPS, other=0.0)
        inverse = tl.load(sums + (2 * anchor + 1) * GROUPS + group, mask=group < GROUPS, other=0.0)
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, samples, ROWS):
            weight, grad, _at, _here = _read_weights(
                logits, grad_weights, pair_scale, top, inverse, anchor, first, group,
                POINTS, CAMS, SCALES, GROUPS, SCALED, ROWS,
            )  # fmt: skip
            products += weight * grad
        mean = tl.sum(products, 0, keep_dims=True)
        for first in range(0, samples, ROWS):
            weight, grad, at, here = _read_weights(
                logits, grad_weights, pair_scale, top, inverse, anchor, first, group,
                POINTS, CAMS, SCALES, GROUPS, SCALED, ROWS,
            )  # fmt: skip
            tl.store(grad_logits + at, (weight * (grad - mean)).to(grad_logits.dtype.element_ty), mask=here)


def _run(kernel: Any, logits: Tensor, tensors: Sequence[Tensor], **flags: int) -> None:
    """Launch a program for every anchor and every block of groups."""
    if not logits.numel():
        return
    bs, anchors, cams, scales, pts, groups = logits.shape
    columns, cameras = min(_MOST_GROUPS, triton.next_power_of_2(groups)), triton.next_power_of_2(cams)
    options = {"POINTS": pts, "CAMS": cams, "SCALES": scales, "GROUPS": groups}
    options |= {"ROWS": _ELEMENTS // columns, "COLUMNS": columns, "num_warps": _THREADS // launch.gpu().lanes}
    options |= {"PAIRS": max(1, _PAIRS // cameras), "COLUMNS_OF_PAIRS": cameras}
    programs = bs * anchors * -(-groups // columns)
    launch.run(kernel, programs, [t.contiguous() for t in tensors], (anchors,), options, **flags)


def _normalised(
    points: Tensor, projection: Tensor, logits: Tensor, image_size: Tensor | None = None, pair_scale: Tensor | None = None
) -> Samples:
    bs, anchors, cams, scales, pts, groups = logits.shape
    locations, sums = (logits.new_empty((bs, anchors, *shape), dtype=torch.float32) for shape in ((pts, cams, 2), (2, groups)))
    size = projection if image_size is None else image_size
    _run(_normalise, logits, (points, projection, logits, size, locations, sums), SIZED=image_size is not None)
    flags = {"LOGITS": True, "SCALED": pair_scale is not None}
    scale = logits if pair_scale is None else pair_scale
    return Samples((locations, sums, scale, logits), (pts, cams, scales, groups), flags)


def forward(*inputs: Any, dtype: torch.dtype | None = None) -> Tensor:
    return kernels.sum_samples(inputs[:3], _normalised(*inputs[3:]), dtype)


def backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients. `args` are the inputs and output_mask."""
    *tables, points, projection, logits, image_size, pair_scale, mask = args
    if mask[0] and torch.are_deterministic_algorithms_enabled():
        return composition.backward(_NAME, deformable_aggregation.backward)(grad, *args)
    samples = _normalised(points, projection, logits, image_size, pair_scale)
    locations, sums, scale, _ = samples.tensors
    needed = (mask[0], mask[1] or mask[2], mask[3])
    shapes = zip((locations.shape, logits.shape), needed[1:], strict=True)
    others = [logits.new_empty(shape if needs else 0, dtype=torch.float32) for shape, needs in shapes]
    grad_value, *others = kernels.differentiate(grad, tables, samples, others, needed)
    grad_points = points.new_zeros(points.shape if mask[1] else 0)
    grad_logits = logits.new_empty(logits.shape if mask[3] else 0)
    if mask[1] or mask[3]:
        size = projection if image_size is None else image_size
        tensors = (points, projection, logits, size, sums, scale, *others, grad_points, grad_logits)
        flags = {"SIZED": image_size is not None, "SCALED": pair_scale is not None, "OF_POINTS": mask[1], "OF_LOGITS": mask[3]}
        _run(_backward, logits, tensors, **flags)
    grad_projection = projection.new_empty(0)
    if mask[2]:
        inputs = (t if t is None else t.float() for t in (points, projection, logits, image_size, pair_scale))
        gradients = composition.Aggregation(None, *inputs).gradients([False, False, True, False], *others)  # pyright: ignore
        (grad_projection,) = composition.like_inputs(gradients[1:2], (projection,))
    return grad_value, grad_points, grad_projection, grad_logits
