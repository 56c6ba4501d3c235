"""A call once more: by the reference in any dtype, by our kernels, and in any way that a suspect has of doing it wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _geometry, reference
from .._operators import OPERATORS
from .calls import Call, given

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
        return getattr(reference, operator)(*given(OPERATORS[operator], inputs))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        row = OPERATORS[ctx.operator]
        mask = [ctx.needs_input_grad[1 + i] for i in row.differentiable]
        found = getattr(reference, ctx.operator + "_backward")(grad, *given(row, ctx.saved_tensors), mask)
        by_place = {i: g for i, g, wanted in zip(row.differentiable, found, mask, strict=True) if wanted}
        return (None, *(by_place.get(i) for i in range(len(ctx.saved_tensors))))


def core(operator: str) -> Core:
    return lambda *inputs: _Reference.apply(operator, *inputs)


def computed(
    call: Call,
    dtype: torch.dtype | None,
    form: Core | None = None,
    queries: Tensor | None = None,
    learned: tuple[int, ...] | None = None,
) -> Results:
    """The output and, where there is a grad_output, the gradients.

    Args:
        dtype: of the inputs; None leaves them as they were recorded.
        form: how; None is the reference.
        queries: only these, in the output and in every gradient.
        learned: places of the inputs whose gradients are computed; None is all that have one.
    """
    form, row = form or core(call.row.name), call.row
    inputs, grad = list(call.inputs), call.grad_output
    if queries is not None:
        inputs = _some(call, inputs, queries)
        grad = grad[:, queries] if grad is not None else None
    if dtype is not None:
        inputs = [t.to(dtype) if t.is_floating_point() else t for t in inputs]
        grad = grad.to(dtype) if grad is not None else None
    step = _at_a_time(call)
    begins = range(0, max(1, call.queries if queries is None else len(queries)), step)
    learned = () if grad is None else row.differentiable if learned is None else learned
    parts: list[Results] = []
    total: Results = {}  # what is a sum over queries, such as the gradient of value
    for begin in begins:
        parts.append(_chunk(call, learned, form, inputs, grad, slice(begin, begin + step)))
        for name in [name for name in parts[-1] if not call.by_query(name)]:
            total[name] = total.get(name, 0) + parts[-1].pop(name)
    return {**{name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}, **total}


def _at_a_time(call: Call) -> int:
    """How many queries are computed together."""
    if not call.row.samples:
        *_, ranks_bev, sizes = call.inputs
        return max(1, NUMBERS // max(1, ranks_bev.numel(), int(sizes.prod())))
    bs, _, *channels = call.inputs[0].shape
    points = call.sampling.locations.shape[2 if call.row.grouped else 4]
    return max(1, NUMBERS // max(1, bs * points * math.prod(channels)))


def _some(call: Call, inputs: list[Tensor], queries: Tensor | slice) -> list[Tensor]:
    return [t[:, queries] if along else t for t, along in zip(inputs, call.along_queries(), strict=True)]


def _chunk(
    call: Call, learned: tuple[int, ...], form: Core, inputs: list[Tensor], grad: Tensor | None, queries: slice
) -> Results:
    some = _some(call, inputs, queries)
    leaves = [t.detach().requires_grad_(place in learned) for place, t in enumerate(some)]
    output = form(*leaves)
    found = {"output": output.detach()}
    if grad is not None and learned:
        wanted = [leaves[place] for place in learned]
        gradients = torch.autograd.grad(output, wanted, grad[:, queries].to(output.dtype), allow_unused=True)
        for place, leaf, gradient in zip(learned, wanted, gradients, strict=True):
            found["grad_" + call.places[place]] = torch.zeros_like(leaf) if gradient is None else gradient
    return found


def by_kernel(call: Call) -> Results:
    """Our own, whichever serves the CPU."""
    name, args = call.row.name, given(call.row, call.inputs)
    found = {"output": getattr(torch.ops.mx_driving, name).default(*args)}
    if call.grad_output is not None:
        backward = getattr(torch.ops.mx_driving, name + "_backward").default
        gradients = backward(call.grad_output, *args, [True] * len(call.gradients))
        found.update(zip(call.gradients, gradients, strict=True))
    return found


def scales(call: Call) -> dict[str, float]:
    """The largest sum of absolute values of terms, of each result: the same call of absolute values."""
    inputs, grad = list(call.inputs), call.grad_output
    for place in (0, call.row.weights):
        inputs[place] = _magnitude(inputs[place])
    grad = _magnitude(grad) if grad is not None else None
    absolute = Call(call.name, call.about, tuple(inputs), call.results, grad)
    found = computed(absolute, torch.float64)
    largest = {name: _largest(t) for name, t in found.items()}
    if "grad_locations" in largest:
        some = _some_queries(absolute)
        largest["grad_locations"] = max(_slope_scale(some, axis) for axis in (0, 1))
    return largest


def _some_queries(call: Call) -> Call:
    """At most SOME queries, evenly spread: enough for a largest term, which more queries could only raise."""
    value, shapes, starts, *of_queries = call.inputs
    step = -(-of_queries[0].shape[1] // SOME) or 1
    grad = call.grad_output[:, ::step] if call.grad_output is not None else None
    return Call(call.name, call.about, (value, shapes, starts, *(t[:, ::step] for t in of_queries)), {}, grad)


def _magnitude(t: Tensor) -> Tensor:
    return torch.where(t.isfinite(), t.double().abs(), 0)


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def _slope_scale(call: Call, axis: int) -> float:
    """The largest of size * weight * |corner . g| over the two corners of a sample's slope: what the weight's gradient would be
    at the whole pixels before and behind it."""
    total: Any = 0.0
    sides = call.sampling.shapes.double().flip(-1)[..., axis]
    for tables, size in each_map(call, sides):
        locations = sampled(call, tables).double()
        before = (locations[..., axis] * size - 0.5).floor()
        for step in (0, 1):
            moved = locations.clone()
            moved[..., axis] = torch.where(locations[..., axis].isfinite(), (before + step + 0.5) / size, torch.nan)
            one = restricted(call, tables, moved)
            slopes = computed(one, torch.float64, learned=(call.row.weights,))["grad_weights"]
            pixels_of_map = size[:, None, None] if call.row.grouped else size
            found = pixels_of_map * one.sampling.weights.double() * slopes
            total = total + (found.sum((-1, -2)) if call.row.grouped else found)
    return _largest(total)


def each_map(call: Call, sides: Tensor) -> list[tuple[int | None, Tensor]]:
    """For an aggregation, whose scales share their locations, one scale after another; else all levels at once."""
    if call.row.grouped:
        return [(scale, sides[:, scale]) for scale in range(sides.shape[1])]
    return [(None, sides[:, None])]


def sampled(call: Call, scale: int | None) -> Tensor:
    """The locations, NaN where the sample does not count."""
    locations = call.sampling.locations.double()
    return torch.where(counts(call)[..., None], locations, torch.nan)


def restricted(call: Call, scale: int | None, locations: Tensor) -> Call:
    value, shapes, starts, _, weights = call.inputs
    if scale is not None:
        shapes, starts, weights = shapes[:, scale : scale + 1], starts[:, scale : scale + 1], weights[:, :, :, :, scale, None]
    return Call(call.name, call.about, (value, shapes, starts, locations, weights), {}, call.grad_output)


def pixels(call: Call) -> tuple[Tensor, Tensor]:
    """Where the samples of an attention operator are, [..., 2], and the sizes of their maps, (width, height)."""
    locations, size = call.sampling.locations.double(), call.sampling.shapes.double().flip(-1)[:, None]
    return (locations if call.row.integer_locations else _geometry.pixels(locations, size)), size


def counts(call: Call) -> Tensor:
    """True for each sample on its map; of an aggregation, for each pair of a point and a camera that sees it."""
    if call.row.grouped:
        locations = call.sampling.locations
        return _geometry.inside(locations)
    at, size = pixels(call)
    return _geometry.on_map(at, size)
