"""deformable_aggregation_with_logits on a GPU: a kernel makes locations and weights, and the bare operator's kernel sums.

In the backward another kernel makes the gradients of key points and logits from those of locations and weights. A
program owns an anchor and up to 64 of its groups. The gradient of projection, which few models need, is plain torch.
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
from .softmax import read_pair, store_pair

_NAME = "deformable_aggregation_with_logits"
_NEAREST = tl.constexpr(composition.NEAREST)
_ELEMENTS = 1024  # of a tile of logits
_PAIRS = 128  # of a tile of points and cameras
_MOST_CAMERAS = 1024  # are plain torch beyond
_MOST_GROUPS = 64  # of a program
_THREADS = 256


@triton.jit
def _anchor(GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the program's anchor, whether its groups are the first, and the rows and groups of its tile."""
    blocks: tl.constexpr = (GROUPS + COLUMNS - 1) // COLUMNS
    block = tl.program_id(0) % blocks
    anchor = (tl.program_id(0) // blocks).to(tl.int64)
    return anchor, block == 0, tl.arange(0, ROWS)[:, None], block * COLUMNS + tl.arange(0, COLUMNS)[None, :]


@triton.jit
def _read_logits(logits, anchor, row, group, SAMPLES: tl.constexpr, GROUPS: tl.constexpr):
    """Return logits in float32, and whether they exist: -inf where not."""
    here = (row < SAMPLES) & (group < GROUPS)
    at = (anchor * SAMPLES + row) * GROUPS + group
    return tl.load(logits + at, mask=here, other=-float("inf")).to(tl.float32), here


@triton.jit
def _greatest(
    logits, anchor, rows, group, SAMPLES: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return the greatest logit of each group."""
    greatest = tl.full((ROWS, COLUMNS), -float("inf"), tl.float32)
    for first in range(0, SAMPLES, ROWS):
        logit, _here = _read_logits(logits, anchor, first + rows, group, SAMPLES, GROUPS)
        greatest = tl.maximum(greatest, logit)
    return tl.max(greatest, 0, keep_dims=True)


@triton.jit
def _of_weights(
    pair_scale, anchor, row, group, here,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Return which weights belong to rows of logits, and what a softmax is multiplied with.

    Rows of logits are [cam, scale, pts], those of weights [pts, cam, scale].
    """
    point, map = row % POINTS, row // POINTS
    at = ((anchor * POINTS + point) * (CAMS * SCALES) + map) * GROUPS + group
    if SCALED:
        pair = (anchor * CAMS + map // SCALES) * POINTS + point
        scale = tl.load(pair_scale + pair + 0 * group, mask=here, other=0.0).to(tl.float32)
    else:
        scale = tl.full((1, 1), 1.0, tl.float32)
    return at, scale


@triton.jit
def _read_row(projection, at, here):
    """Return four numbers of a matrix."""
    return (
        tl.load(projection + at, mask=here, other=0.0).to(tl.float32),
        tl.load(projection + at + 1, mask=here, other=0.0).to(tl.float32),
        tl.load(projection + at + 2, mask=here, other=0.0).to(tl.float32),
        tl.load(projection + at + 3, mask=here, other=0.0).to(tl.float32),
    )


@triton.jit
def _project(points, projection, image_size, point, camera, here, SIZED: tl.constexpr):
    """Return where a camera sees a point, (u, v) / depth; the depth, at least that of the nearest; whether the point is
    farther; and the size of the image."""
    x = tl.load(points + 3 * point, mask=here, other=0.0).to(tl.float32)
    y = tl.load(points + 3 * point + 1, mask=here, other=0.0).to(tl.float32)
    z = tl.load(points + 3 * point + 2, mask=here, other=0.0).to(tl.float32)
    a, b, c, d = _read_row(projection, 16 * camera, here)
    u = a * x + b * y + c * z + d
    a, b, c, d = _read_row(projection, 16 * camera + 4, here)
    v = a * x + b * y + c * z + d
    a, b, c, d = _read_row(projection, 16 * camera + 8, here)
    depth = a * x + b * y + c * z + d
    farther = depth >= _NEAREST
    depth = tl.where(depth < _NEAREST, _NEAREST, depth)  # a NaN stays
    if SIZED:
        width = tl.load(image_size + 2 * camera, mask=here, other=1.0).to(tl.float32)
        height = tl.load(image_size + 2 * camera + 1, mask=here, other=1.0).to(tl.float32)
    else:
        width = tl.full((1, 1), 1.0, tl.float32)
        height = width
    return tl.div_rn(u, depth), tl.div_rn(v, depth), depth, farther, width + 0 * u, height + 0 * u


@triton.jit(do_not_specialize=["anchors"])
def _forward(
    points, projection, logits, image_size, pair_scale, locations, weights, anchors,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, SIZED: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS_OF_PAIRS: tl.constexpr,
):  # fmt: skip
    samples: tl.constexpr = POINTS * CAMS * SCALES
    anchor, is_first, rows, group = _anchor(GROUPS, ROWS, COLUMNS)
    if is_first:
        cam = tl.arange(0, COLUMNS_OF_PAIRS)[None, :]
        for first in range(0, POINTS, PAIRS):
            p = first + tl.arange(0, PAIRS)[:, None]
            here = (p < POINTS) & (cam < CAMS)
            camera = anchor // anchors * CAMS + cam
            x, y, _depth, _farther, width, height = _project(
                points, projection, image_size, anchor * POINTS + p, camera, here, SIZED
            )
            store_pair(locations, (anchor * POINTS + p) * CAMS + cam, tl.div_rn(x, width), tl.div_rn(y, height), here)
    top = _greatest(logits, anchor, rows, group, samples, GROUPS, ROWS, COLUMNS)
    powers = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, samples, ROWS):
        logit, _here = _read_logits(logits, anchor, first + rows, group, samples, GROUPS)
        powers += tl.exp(logit - top)
    inverse = 1.0 / tl.sum(powers, 0, keep_dims=True)
    for first in range(0, samples, ROWS):
        logit, here = _read_logits(logits, anchor, first + rows, group, samples, GROUPS)
        at, scale = _of_weights(pair_scale, anchor, first + rows, group, here, POINTS, CAMS, SCALES, GROUPS, SCALED)
        tl.store(weights + at, tl.exp(logit - top) * inverse * scale, mask=here)


@triton.jit
def _finite(t):
    return tl.where(t - t == 0, t, 0.0)


@triton.jit
def _differentiate_points(
    points, projection, image_size, grad_locations, grad_points, anchor, batch,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SIZED: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    cam = tl.arange(0, COLUMNS)[None, :]
    for first in range(0, POINTS, PAIRS):
        p = first + tl.arange(0, PAIRS)[:, None]
        here = (p < POINTS) & (cam < CAMS)
        point, camera = anchor * POINTS + p, batch * CAMS + cam
        x, y, depth, farther, width, height = _project(points, projection, image_size, point, camera, here, SIZED)
        x_of_image, y_of_image = tl.div_rn(x, width), tl.div_rn(y, height)
        seen = here & (x_of_image > 0) & (x_of_image < 1) & (y_of_image > 0) & (y_of_image < 1)
        grad_u, grad_v = read_pair(grad_locations, point * CAMS + cam, here=here)
        # infinity and NaN are replaced first, because 0 times them is NaN
        depth = tl.where(seen, depth, 1.0)
        grad_u = tl.where(seen, grad_u / (width * depth), 0.0)
        grad_v = tl.where(seen, grad_v / (height * depth), 0.0)
        grad_depth = tl.where(seen & farther, -(grad_u * tl.where(seen, x, 0.0) + grad_v * tl.where(seen, y, 0.0)), 0.0)
        for axis in tl.static_range(3):
            at = projection + 16 * camera + axis
            total = grad_u * _finite(tl.load(at, mask=here, other=0.0).to(tl.float32))
            total += grad_v * _finite(tl.load(at + 4, mask=here, other=0.0).to(tl.float32))
            total += grad_depth * _finite(tl.load(at + 8, mask=here, other=0.0).to(tl.float32))
            total = tl.sum(total, 1, keep_dims=True).to(grad_points.dtype.element_ty)
            tl.store(grad_points + 3 * point + axis, total, mask=p < POINTS)


@triton.jit(do_not_specialize=["anchors"])
def _backward(
    points, projection, logits, image_size, pair_scale, grad_locations, grad_weights, grad_points, grad_logits, anchors,
    POINTS: tl.constexpr, CAMS: tl.constexpr, SCALES: tl.constexpr, GROUPS: tl.constexpr, SIZED: tl.constexpr,
    SCALED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS_OF_PAIRS: tl.constexpr,
    OF_POINTS: tl.constexpr, OF_LOGITS: tl.constexpr,
):  # fmt: skip
    samples: tl.constexpr = POINTS * CAMS * SCALES
    anchor, is_first, rows, group = _anchor(GROUPS, ROWS, COLUMNS)
    if OF_POINTS and is_first:
        _differentiate_points(
            points, projection, image_size, grad_locations, grad_points, anchor, anchor // anchors,
            POINTS, CAMS, SIZED, PAIRS, COLUMNS_OF_PAIRS,
        )  # fmt: skip
    if OF_LOGITS:
        top = _greatest(logits, anchor, rows, group, samples, GROUPS, ROWS, COLUMNS)
        powers = tl.zeros((ROWS, COLUMNS), tl.float32)
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, samples, ROWS):
            logit, here = _read_logits(logits, anchor, first + rows, group, samples, GROUPS)
            at, scale = _of_weights(pair_scale, anchor, first + rows, group, here, POINTS, CAMS, SCALES, GROUPS, SCALED)
            power = tl.exp(logit - top)
            powers += power
            products += power * (tl.load(grad_weights + at, mask=here, other=0.0) * scale)
        inverse = 1.0 / tl.sum(powers, 0, keep_dims=True)
        mean = tl.sum(products, 0, keep_dims=True) * inverse
        for first in range(0, samples, ROWS):
            logit, here = _read_logits(logits, anchor, first + rows, group, samples, GROUPS)
            at, scale = _of_weights(pair_scale, anchor, first + rows, group, here, POINTS, CAMS, SCALES, GROUPS, SCALED)
            grad = tl.load(grad_weights + at, mask=here, other=0.0) * scale
            grad = tl.exp(logit - top) * inverse * (grad - mean)
            at = (anchor * samples + first + rows) * GROUPS + group
            tl.store(grad_logits + at, grad.to(grad_logits.dtype.element_ty), mask=here)


class _Samples:
    """What `composition.Aggregation` computes, of inputs in the dtypes that they have."""

    def __init__(
        self, points: Tensor, projection: Tensor, logits: Tensor, image_size: Tensor | None, pair_scale: Tensor | None
    ) -> None:
        self.inputs = points, projection, logits, image_size, pair_scale
        bs, anchors, cams, scales, pts, groups = logits.shape
        self.locations = logits.new_empty((bs, anchors, pts, cams, 2), dtype=torch.float32)
        self.weights = logits.new_empty((bs, anchors, pts, cams, scales, groups), dtype=torch.float32)
        self._run(_forward, self.locations, self.weights)

    def gradients(self, mask: Sequence[bool], grad_locations: Tensor, grad_weights: Tensor) -> composition.Gradients:
        grad_points, grad_logits = (
            torch.empty_like(t if needed else t[:0], memory_format=torch.contiguous_format)
            for t, needed in ((self.inputs[0], mask[1]), (self.inputs[2], mask[3]))
        )
        if mask[1] or mask[3]:
            gradients = grad_locations, grad_weights, grad_points, grad_logits
            self._run(_backward, *gradients, OF_POINTS=mask[1], OF_LOGITS=mask[3])
        only, grad_projection = [False, False, True, False], None
        if mask[2]:
            _, grad_projection, _ = _in_torch(*self.inputs).gradients(only, grad_locations, grad_weights)
        return grad_points if mask[1] else None, grad_projection, grad_logits if mask[3] else None

    def _run(self, kernel: Any, *tensors: Tensor, **flags: int) -> None:
        points, projection, logits, image_size, pair_scale = self.inputs
        bs, anchors, cams, scales, pts, groups = logits.shape
        columns, cameras = min(_MOST_GROUPS, triton.next_power_of_2(groups)), triton.next_power_of_2(cams)
        options = {"POINTS": pts, "CAMS": cams, "SCALES": scales, "GROUPS": groups}
        options |= {"SIZED": image_size is not None, "SCALED": pair_scale is not None}
        options |= {"ROWS": _ELEMENTS // columns, "COLUMNS": columns}
        options |= {
            "PAIRS": max(1, _PAIRS // cameras),
            "COLUMNS_OF_PAIRS": cameras,
            "num_warps": _THREADS // launch.gpu().lanes,
        }
        inputs = (points, projection, logits, *(logits if t is None else t for t in (image_size, pair_scale)))
        inputs = [t.contiguous() for t in inputs]
        launch.run(kernel, bs * anchors * -(-groups // columns), (*inputs, *tensors), (anchors,), options, **flags)


def _in_torch(*inputs: Tensor | None) -> composition.Aggregation:
    return composition.Aggregation(None, *(t if t is None else t.float() for t in inputs))  # pyright: ignore[reportArgumentType]


def _make_samples(
    shapes: Tensor,
    points: Tensor,
    projection: Tensor,
    logits: Tensor,
    image_size: Tensor | None = None,
    pair_scale: Tensor | None = None,
) -> Any:
    usual = logits.numel() and projection.shape[1] <= _MOST_CAMERAS
    return (_Samples if usual else _in_torch)(points, projection, logits, image_size, pair_scale)


def forward(value: Tensor, shapes: Tensor, starts: Tensor, *inputs: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    samples = _make_samples(shapes, *inputs)  # pyright: ignore[reportArgumentType]
    return deformable_aggregation.forward(value, shapes, starts, samples.locations, samples.weights, dtype)


backward = composition.backward(_NAME, deformable_aggregation.backward, _make_samples)
