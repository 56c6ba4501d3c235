"""Computes a call again: by the reference in any dtype, by our kernels, and with a mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ... import reference
from ..._operator import geometry
from ..._operator.description import OPERATORS
from .calls import RecordedCall, arguments

NUMBERS = 2**22  # at a time: the reference keeps all samples of a level in memory, several times over
SOME = 605  # queries that stand for all where the largest term is looked for
Core = Callable[..., Tensor]
Results = dict[str, Tensor]


class _Reference(torch.autograd.Function):
    """The reference with the gradients that it defines: an invalid sample gives exactly zero."""

    @staticmethod
    def forward(ctx: Any, operator: str, *inputs: Tensor) -> Tensor:  # pyright: ignore
        ctx.operator = operator
        ctx.save_for_backward(*inputs)
        return getattr(reference, operator)(*arguments(OPERATORS[operator], inputs))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        row, inputs = OPERATORS[ctx.operator], ctx.saved_tensors
        mask = [ctx.needs_input_grad[1 + i] for i in row.differentiable]
        gradients = getattr(reference, row.name + "_backward")(grad, *arguments(row, inputs), mask)
        by_input = {i: g for i, g, needed in zip(row.differentiable, gradients, mask, strict=True) if needed}
        return (None, *(by_input.get(i) for i in range(len(inputs))))


def core_of(operator: str) -> Core:
    return lambda *inputs: _Reference.apply(operator, *inputs)


def compute(
    call: RecordedCall,
    dtype: torch.dtype | None,
    form: Core | None = None,
    queries: Tensor | None = None,
    differentiable: tuple[int, ...] | None = None,
) -> Results:
    """Return the output and, where there is a grad_output, the gradients.

    Args:
        dtype: of the inputs; None leaves them as they were recorded.
        form: the function that computes the output; None is the reference.
        queries: only these, in the output and in every gradient.
        differentiable: indices of the inputs whose gradients are computed; None is all that have one.
    """
    form, inputs, grad = form or core_of(call.row.name), list(call.inputs), call.grad_output
    if queries is not None:
        inputs, grad = _take_queries(call, inputs, queries), grad[:, queries] if grad is not None else None
    if dtype is not None:
        inputs = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
        grad = grad.to(dtype) if grad is not None else None
    if differentiable is None or grad is None:
        differentiable = () if grad is None else call.row.differentiable
    step, parts, sums = _queries_at_a_time(call), [], {}
    for begin in range(0, max(1, call.num_queries if queries is None else len(queries)), step):
        part = slice(begin, begin + step)
        grad_part = grad[:, part] if grad is not None else None
        parts.append(_differentiate(call, form, _take_queries(call, inputs, part), grad_part, differentiable))
        for name in [name for name in parts[-1] if not call.is_by_query(name)]:  # sums over queries, such as grad_value
            sums[name] = sums.get(name, 0) + parts[-1].pop(name)
    return {**{name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}, **sums}


def _queries_at_a_time(call: RecordedCall) -> int:
    if call.row.kind == "pooling":
        *_, ranks_bev, sizes = call.inputs
        return max(1, NUMBERS // max(1, ranks_bev.numel(), int(sizes.prod())))
    bs, _, *channels = call.inputs[0].shape
    points = call.sampling.locations.shape[2 if call.row.kind == "aggregation" else 4]
    return max(1, NUMBERS // max(1, bs * points * math.prod(channels)))


def _take_queries(call: RecordedCall, inputs: list[Tensor], queries: Tensor | slice) -> list[Tensor]:
    return [t[:, queries] if has_axis else t for t, has_axis in zip(inputs, call.has_queries(), strict=True)]


def _differentiate(
    call: RecordedCall, form: Core, inputs: list[Tensor], grad: Tensor | None, differentiable: tuple[int, ...]
) -> Results:
    leaves = [t.detach().requires_grad_(i in differentiable) for i, t in enumerate(inputs)]
    output = form(*leaves)
    results = {"output": output.detach()}
    if grad is not None and differentiable:
        tensors = [leaves[i] for i in differentiable]
        gradients = torch.autograd.grad(output, tensors, grad.to(output.dtype), allow_unused=True)
        for i, leaf, gradient in zip(differentiable, tensors, gradients, strict=True):
            results["grad_" + call.input_names[i]] = torch.zeros_like(leaf) if gradient is None else gradient
    return results


def compute_by_kernel(call: RecordedCall) -> Results:
    """Return the results of our kernel that serves the CPU."""
    results = {"output": getattr(torch.ops.mx_driving, call.row.name).default(*call.arguments)}
    if call.grad_output is not None:
        backward = getattr(torch.ops.mx_driving, call.row.name + "_backward").default
        gradients = backward(call.grad_output, *call.arguments, [True] * len(call.gradients))
        results.update(zip(call.gradients, gradients, strict=True))
    return results


def largest_sums(call: RecordedCall) -> dict[str, float]:
    """Return the largest sum of absolute values of terms of each result: the results of the call of absolute values."""
    inputs, grad = list(call.inputs), call.grad_output
    for i in (0, call.row.weights):
        inputs[i] = _magnitude(inputs[i])
    grad = _magnitude(grad) if grad is not None else None
    absolute = replace(call, inputs=tuple(inputs), grad_output=grad)
    sums = {name: _largest(t) for name, t in compute(absolute, torch.float64).items()}
    if "grad_locations" in sums:
        sums["grad_locations"] = max(_largest_slope(_some_queries(absolute), axis) for axis in (0, 1))
    return sums


def _some_queries(call: RecordedCall) -> RecordedCall:
    """Return at most SOME queries, evenly spread: enough for a largest term, which more queries could only raise."""
    step = -(-call.num_queries // SOME) or 1
    inputs = tuple(_take_queries(call, list(call.inputs), slice(None, None, step)))
    return replace(call, inputs=inputs, grad_output=call.grad_output[:, ::step] if call.grad_output is not None else None)


def _magnitude(t: Tensor) -> Tensor:
    return torch.where(t.isfinite(), t.double().abs(), 0)


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def _largest_slope(call: RecordedCall, axis: int) -> float:
    """Return the largest size * weight * |corner . g|, summed over the two corners of a sample's slope: the gradient that the
    weight would have at the whole pixels before and behind the sample. Scales of an aggregation share their locations, and
    are taken one after another."""
    total: Any = 0.0
    value, shapes, starts, locations, weights = (t.double() if t.is_floating_point() else t for t in call.inputs)
    locations = torch.where(counted_samples(call)[..., None], locations, torch.nan)
    sides = shapes.double().flip(-1)[..., axis]
    for scale in range(sides.shape[1]) if call.row.kind == "aggregation" else (None,):
        size = sides[:, None] if scale is None else sides[:, scale]
        maps = (shapes, starts, weights)
        if scale is not None:
            maps = (shapes[:, scale, None], starts[:, scale, None], weights[:, :, :, :, scale, None])
        before = (locations[..., axis] * size - 0.5).floor()
        for step in (0, 1):
            moved = locations.clone()
            moved[..., axis] = torch.where(locations[..., axis].isfinite(), (before + step + 0.5) / size, torch.nan)
            one = replace(call, inputs=(value, *maps[:2], moved, maps[2]))
            slopes = compute(one, torch.float64, differentiable=(call.row.weights,))["grad_weights"]
            terms = (size[:, None, None] if call.row.kind == "aggregation" else size) * maps[2] * slopes
            total = total + (terms.sum((-1, -2)) if call.row.kind == "aggregation" else terms)
    return _largest(total)


def counted_samples(call: RecordedCall) -> Tensor:
    """Return True for each sample on its map; of an aggregation, for each pair of a point and a camera that sees it."""
    locations = call.sampling.locations
    if call.row.kind == "aggregation":
        return geometry.inside(locations)
    size = call.sampling.shapes.double().flip(-1)[:, None]
    at = locations.double() if call.row.integer_locations else geometry.pixels(locations.double(), size)
    return geometry.on_map(at, size)
