"""The operators with logits, as compositions: compute locations and weights from the outputs of linear layers, and
call a bare operator.

References, kernels and exporters share this program and differ in the bare operator. Computations are in float64 if a floating
input is float64, else in float32. The backward propagates the gradients of locations and weights to the inputs. The gradients
of an invalid sample are exactly 0. Make every factor of such a gradient finite first, because 0 x infinity is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import geometry
from .description import OPERATORS

F = TypeVar("F", bound=Callable[..., Any])
Gradients = tuple[Tensor | None, ...]


def compute_dtype(*inputs: Any) -> torch.dtype:
    """Return float64 if an input is float64, else float32."""
    return torch.float64 if any(isinstance(t, Tensor) and t.dtype == torch.float64 for t in inputs) else torch.float32


def autocast_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype of an output under autocast: float32 if value has 16 bits."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def empty_gradients(tensors: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Return uninitialised memory for the gradients of tensors; an empty tensor where `mask` is False."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed else t.new_empty((0,))
        for t, needed in zip(tensors, mask, strict=True)
    ]


def autocasts(device: str) -> bool:
    # Older torch.compile cannot trace is_autocast_available. All devices of torch.compile have autocast.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device)


def without_autocast(function: F) -> F:
    """Decorate a function, so that it runs outside autocast and computes in the dtypes of its tensors."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        # Torch 2.6 cannot compile `next` with a default.
        device = [*(a.device.type for a in (*args, *named.values()) if isinstance(a, Tensor)), "cpu"][0]
        if not autocasts(device):
            return function(*args, **named)
        with torch.autocast(device, enabled=False):
            return function(*args, **named)

    return call  # pyright: ignore[reportReturnType]


def _finite(t: Tensor) -> Tensor:
    return torch.where(t.isfinite(), t, 0)


def _softmax_gradient(weights: Tensor, grad_weights: Tensor, axis: int) -> Tensor:
    return weights * (grad_weights - (weights * grad_weights).sum(axis, keepdim=True))


class MultiScale:
    """location = reference + offset / (W, H), or the box's centre + offset * (w, h) / (2 * num_points)."""

    def __init__(self, shapes: Tensor, reference: Tensor, offsets: Tensor, logits: Tensor, reference_axis: str = "level"):
        self.shapes, self.reference, self.offsets, self.logits = shapes, reference, offsets, logits
        self.levels, self.points = offsets.shape[3:5]
        self.by_point = reference_axis == "point"
        self.repeats = self.points // reference.shape[2] if self.by_point else 1
        if self.repeats != 1:
            reference = reference.repeat(1, 1, self.repeats, 1)
        reference = reference[:, :, None, None] if self.by_point else reference[:, :, None, :, None]
        # `centre` and `box` broadcast over [bs, queries, heads, levels, points, 2].
        self.centre, self.box = reference[..., :2], reference[..., 2:]
        self.locations, self.weights = self.samples()

    def samples(self) -> tuple[Tensor, Tensor]:
        step = self.offsets * self.box / (2 * self.points) if self.box.shape[-1] else self.offsets / self.size()
        weights = self.logits.flatten(3).softmax(-1).unflatten(3, (self.levels, self.points))
        return self.centre + step, weights

    def size(self) -> Tensor:
        return self.shapes.flip(-1)[:, None].to(self.offsets.dtype)

    def gradients(self, mask: Sequence[bool], grad_locations: Tensor, grad_weights: Tensor) -> Gradients:
        grad_reference = grad_offsets = grad_logits = None
        has_boxes = bool(self.box.shape[-1])
        if mask[1]:
            parts = [grad_locations.sum_to_size(self.centre.shape)]
            if has_boxes:
                parts.append((grad_locations * _finite(self.offsets) / (2 * self.points)).sum_to_size(self.box.shape))
            by_repeat = torch.cat(parts, -1).flatten(2, -2)  # [bs, queries, levels or points, 2 or 4]
            grad_reference = by_repeat.unflatten(2, (self.repeats, self.reference.shape[2])).sum(2)
        if mask[2]:
            box_step = grad_locations * _finite(self.box) / (2 * self.points) if has_boxes else None
            grad_offsets = grad_locations / self.size() if box_step is None else box_step
        if mask[3]:
            grad_logits = _softmax_gradient(self.weights.flatten(3), grad_weights.flatten(3), -1)
        return grad_reference, grad_offsets, grad_logits


NEAREST = 1e-5  # the least depth; smaller depths, and points behind a camera, are clamped to it


class Aggregation:
    """location = (u, v) / max(d, 1e-5) / image_size, where (u, v, d) is the projection of a key point into a camera."""

    def __init__(
        self,
        shapes: Tensor,
        points: Tensor,
        projection: Tensor,
        logits: Tensor,
        image_size: Tensor | None = None,
        pair_scale: Tensor | None = None,
    ):
        self.points = points[:, :, :, None, None]  # broadcasts over [bs, anchor, pts, cam, 3, 3]
        self.matrix = projection[:, None, None, :, :3]
        self.image_size = None if image_size is None else image_size[:, None, None]
        self.pair_scale = _over_weights(pair_scale)
        projected = (self.matrix[..., :3] * self.points).sum(-1) + self.matrix[..., 3]
        self.in_front = projected[..., 2:] >= NEAREST
        self.depth = projected[..., 2:].clamp(min=NEAREST)
        self.plane = projected[..., :2] / self.depth
        self.locations = self.plane if self.image_size is None else self.plane / self.image_size
        self.softmax, self.weights = self.softmax_weights(logits, pair_scale)

    @staticmethod
    def softmax_weights(logits: Tensor, pair_scale: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the softmax [bs, anchor, cam * scale * pts, group], and the weights [bs, anchor, pts, cam, scale, group]."""
        softmax = logits.flatten(2, 4).softmax(2)
        weights = softmax.unflatten(2, logits.shape[2:5]).permute(0, 1, 4, 2, 3, 5)
        scale = _over_weights(pair_scale)
        return softmax, weights if scale is None else weights * scale

    def gradients(self, mask: Sequence[bool], grad_locations: Tensor, grad_weights: Tensor) -> Gradients:
        grad_points = grad_projection = grad_logits = None
        if mask[1] or mask[2]:
            # the gradient of (u, v, d), 0 where the camera does not see the point
            seen = geometry.inside(self.locations)[..., None]
            grad_plane = grad_locations if self.image_size is None else grad_locations / self.image_size
            depth, plane = torch.where(seen, self.depth, 1), torch.where(seen, self.plane, 0)
            grad_depth = torch.where(self.in_front, -(grad_plane * plane).sum(-1, keepdim=True), 0)
            grad_projected = torch.where(seen, torch.cat([grad_plane, grad_depth], -1) / depth, 0)[..., None]
            if mask[1]:
                grad_points = (grad_projected * _finite(self.matrix[..., :3])).sum((3, 4))
            if mask[2]:
                points = torch.cat([self.points, torch.ones_like(self.points[..., :1])], -1)
                grad_projection = torch.nn.functional.pad((grad_projected * _finite(points)).sum((1, 2)), (0, 0, 0, 1))
        if mask[3]:
            scaled = grad_weights if self.pair_scale is None else grad_weights * self.pair_scale
            grad_logits = _softmax_gradient(self.softmax, scaled.permute(0, 1, 3, 4, 2, 5).flatten(2, 4), 2)
        return grad_points, grad_projection, grad_logits


def _over_weights(pair_scale: Tensor | None) -> Tensor | None:
    """Return pair_scale in a shape that broadcasts over [bs, anchor, pts, cam, scale, group]."""
    return None if pair_scale is None else pair_scale.transpose(2, 3)[..., None, None]


class Geometric:
    """pixel = reference * (W, H) + window, rounded half to even."""

    def __init__(self, shapes: Tensor, reference: Tensor, window: Tensor, logits: Tensor):
        self.locations = self.pixels(shapes, reference, window)
        self.weights = logits.flatten(3).softmax(-1).unflatten(3, (shapes.shape[0], window.shape[0]))

    @staticmethod
    def pixels(shapes: Tensor, reference: Tensor, window: Tensor) -> Tensor:
        """Return the pixels, [bs, queries, heads, levels, points, 2]."""
        centre = reference[:, :, :, None] * shapes.flip(-1).to(reference.dtype)
        return (centre[..., None, :] + window).round()

    def gradients(self, mask: Sequence[bool], grad_weights: Tensor) -> Gradients:
        return (_softmax_gradient(self.weights.flatten(3), grad_weights.flatten(3), -1) if mask[1] else None,)


_RULES: dict[str, Any] = {
    "multi_scale_deformable_attn_with_logits": MultiScale,
    "deformable_aggregation_with_logits": Aggregation,
    "geometric_kernel_attention_with_logits": Geometric,
}


def like_inputs(
    gradients: Iterable[Tensor | None], inputs: Sequence[Tensor], mask: Sequence[bool] | None = None
) -> tuple[Tensor, ...]:
    """Return contiguous gradients in the shapes and dtypes of their inputs. In place of None, and where `mask` is False, return
    empty tensors, as the dispatcher requires."""
    return tuple(
        g.reshape(t.shape).to(t.dtype).contiguous() if g is not None and needed else t.new_empty(0)
        for g, t, needed in zip(gradients, inputs, mask or [True] * len(inputs), strict=True)
    )


def _samples(operator: str, value: Any, shapes: Tensor, _starts: Any, *inputs: Any) -> Any:
    """Return the samples of an operator's inputs, in the compute dtype of inputs and value."""
    dtype = compute_dtype(value, *inputs)
    return _RULES[operator](shapes, *(t.to(dtype) if isinstance(t, Tensor) else t for t in inputs))


def bare_inputs(operator: str, *inputs: Any) -> tuple[Any, ...]:
    """Return the inputs of the bare operator. Value and starts may be None where only locations and weights matter."""
    samples = _samples(operator, *inputs)
    return *inputs[:3], samples.locations, samples.weights


def forward(operator: str, bare: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the operator with logits as a function that computes locations and weights and then calls `bare`."""
    return lambda *args: bare(*bare_inputs(operator, *args))


def backward(operator: str, bare: Callable[..., Any]) -> Callable[..., tuple[Tensor, ...]]:
    """Return the backward as a function of grad_output, the inputs and output_mask. `bare` is the backward of the bare
    operator."""

    def run(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
        *inputs, mask = args
        samples = _samples(operator, *inputs)
        tensors = (*inputs[:3], samples.locations, samples.weights)
        # the gradient of locations is needed for reference points and for offsets
        bare_mask = [mask[0], mask[1] or mask[2], mask[3]] if len(mask) == 4 else list(mask)
        grad_value, *grad_samples = bare(grad, *tensors, bare_mask)
        gradients = samples.gradients(mask, *grad_samples)
        return grad_value, *like_inputs(gradients, [inputs[i] for i in OPERATORS[operator].differentiable[1:]])

    return run
