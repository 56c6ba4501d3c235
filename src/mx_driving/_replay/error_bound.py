"""Compute a call again: by the reference in any dtype, by our kernels, or with a known mistake. Compute the allowed error of
each result, and errors in units of the allowed error."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._agreement import entry_differences, largest_magnitude, rounding_limit
from .._operator import geometry
from .._operator.description import OPERATORS
from .calls import RecordedCall

_DRAWS = 4  # rounding errors are random: the device's may be so many times as large as those of our float32 results
_LATTICE = 16  # ulps; a position this close to a pixel centre may be on the centre's other side in float32
# Queries are computed in parts. A part has at most this many elements in the samples of one level, because the reference keeps
# several copies of these samples.
NUMBERS = 2**22
Core = Callable[..., Tensor]
Results = dict[str, Tensor]


class _Reference(torch.autograd.Function):
    """The reference's forward and backward as an autograd function. In our backward, the gradients of an invalid sample are
    exactly zero. If autograd differentiated the forward, they would not be."""

    @staticmethod
    def forward(ctx: Any, operator: str, *arguments: Any) -> Tensor:  # pyright: ignore
        count = len(OPERATORS[operator].inputs)
        ctx.operator, ctx.sizes = operator, arguments[count:]
        ctx.save_for_backward(*arguments[:count])
        return getattr(reference, operator)(*arguments)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore
        indices = OPERATORS[ctx.operator].differentiable
        mask = [ctx.needs_input_grad[1 + i] for i in indices]
        gradients = getattr(reference, ctx.operator + "_backward")(grad, *ctx.saved_tensors, *ctx.sizes, mask)
        by_index = {i: g for i, g, needed in zip(indices, gradients, mask, strict=True) if needed}
        return (None, *(by_index.get(i) for i in range(len(ctx.needs_input_grad) - 1)))


def make_core(operator: str) -> Core:
    """Return the operator's reference as a differentiable function."""
    return lambda *arguments: _Reference.apply(operator, *arguments)


def compute(call: RecordedCall, dtype: torch.dtype, core: Core | None = None, queries: Tensor | None = None) -> Results:
    """Return the output and, if the call has a grad_output, the gradients.

    Args:
        dtype: the dtype to which floating inputs are converted.
        core: the function that computes the output; None is the reference.
        queries: indices of the queries to compute; None for all. Sums such as grad_value are over these queries.
    """
    core = core or make_core(call.description.name)
    differentiable = () if call.grad_output is None else call.description.differentiable
    if call.description.kind == "pooling":
        numbers_of_query = max(call.inputs[4].numel(), math.prod(call.sizes))
    else:
        points = call.sampling.locations.shape[2 if call.description.kind == "aggregation" else 4]
        numbers_of_query = len(call.inputs[0]) * points * math.prod(call.inputs[0].shape[2:])
    parts, sums = [], {}
    most = max(1, NUMBERS // max(1, numbers_of_query))
    for part in (torch.arange(call.num_queries) if queries is None else queries).split(most):
        inputs = [t[:, part] if has_axis else t for t, has_axis in zip(call.inputs, call.has_queries, strict=True)]
        inputs = [t.detach().to(dtype) if t.is_floating_point() else t for t in inputs]
        leaves = [t.requires_grad_(i in differentiable) for i, t in enumerate(inputs)]
        output = core(*leaves, *call.sizes)
        results = {"output": output.detach()}
        if call.grad_output is not None:
            tensors, grad = [leaves[i] for i in differentiable], call.grad_output[:, part].to(output.dtype)
            product = (output * grad).sum()  # autograd.grad with grad_outputs would import sympy: 1.3 s
            gradients = torch.autograd.grad(product, tensors, allow_unused=True, materialize_grads=True)
            results.update(zip(call.gradients, gradients, strict=True))
        for name in [name for name in results if not call.is_by_query(name)]:  # such as grad_value, a sum over queries
            sums[name] = sums.get(name, 0) + results.pop(name)
        parts.append(results)
    return {**{name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}, **sums}


def compute_by_kernel(call: RecordedCall) -> Results:
    """Return the results of our CPU kernel. If inputs have 16 bits and the recorded output has more, the call ran under
    autocast: the operator read 16 bits, and computed and returned float32. So convert the inputs to float32, which is exact."""
    inputs, dtype = call.inputs, call.results.get("output", call.grad_output).dtype  # pyright: ignore
    if dtype.itemsize > 2:
        inputs = [t.to(dtype) if t.is_floating_point() and t.dtype.itemsize == 2 else t for t in inputs]
    results = {"output": getattr(torch.ops.mx_driving, call.description.name).default(*inputs, *call.sizes)}
    if call.grad_output is not None:
        backward = getattr(torch.ops.mx_driving, call.description.name + "_backward").default
        gradients = backward(call.grad_output, *inputs, *call.sizes, [True] * len(call.gradients))
        results.update(zip(call.gradients, gradients, strict=True))
    return results


def as_attention(v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Convert the inputs of aggregation to those of attention: groups become heads, the maps of all cameras become levels, and
    points off the image are sampled, too. Return the inputs of attention unchanged."""
    if s.dim() == 2:
        return v, s, t, l, w
    groups, scales = w.shape[-1], s.shape[1]
    at = l.permute(0, 1, 3, 2, 4)[:, :, None, :, None].expand(-1, -1, groups, -1, scales, -1, -1).flatten(3, 4)
    weights = w.permute(0, 1, 5, 3, 4, 2).flatten(3, 4)
    return v.unflatten(2, (groups, -1)), s.flatten(0, 1), t.flatten(), at, weights


class ErrorBound:
    """The float64 results of a call, and the device's errors in units of the allowed error.

    An entry is wrong if its error is more than one unit. The allowed error is relative to the largest entry, because rounding
    errors grow with the sum of an entry's absolute terms, and the largest of these sums is at least as large as any entry. The
    gradient of a location is a difference. Its allowed error is relative to the terms of the difference: size of the map *
    weight * gradient of the weight. If all entries cancel to zero, the allowed error is a multiple of float32's own error.
    """

    def __init__(self, call: RecordedCall) -> None:
        self.call = call
        self.truth = compute(call, torch.float64)
        if call.description.kind == "pooling":
            feat_terms, depth_terms, cell_terms = (int(t.bincount().max()) if t.numel() else 0 for t in call.inputs[2:])
            terms = {"output": cell_terms, "grad_feat": feat_terms, "grad_depth": depth_terms * call.inputs[0].shape[1]}
        else:
            query_terms = math.prod(call.sampling.weights.shape[2:]) * 4
            terms = {"output": query_terms, "grad_value": max(query_terms, call.sampling.locations.numel() // 2)}
        self._num_terms = terms  # the number of terms in the longest sum of a result
        self._compute = torch.float64 if any(t.dtype == torch.float64 for t in call.inputs) else torch.float32
        has_positions = call.description.rows == 4 and call.sampling.shapes.numel()  # only bilinear samples have positions
        self._extent = int(call.sampling.shapes.max()) if has_positions else 0
        self._scales = {name: largest_magnitude(t) for name, t in self.truth.items()}
        if "grad_locations" in self.truth:
            slopes = call.sampling.shapes.amax(-1)[..., None] * call.sampling.weights * self.truth["grad_weights"]
            self._scales["grad_locations"] = max(largest_magnitude(slopes), self._scales["grad_locations"])
        self.float32 = compute(call, torch.float32) if self._compute == torch.float32 else self.truth
        # The gradients of locations that are within rounding of a pixel centre, where the gradient jumps.
        self._on_centres = torch.zeros((), dtype=torch.bool)
        if "grad_locations" in self.truth:
            sizes = call.sampling.shapes.double().flip(-1)
            sizes = (
                sizes.movedim(-2, 0)[:, None, None, None] if call.description.kind == "aggregation" else sizes[None, :, None]
            )
            at = geometry.pixels(call.sampling.locations.double()[None], sizes)
            near = _LATTICE * torch.finfo(self._compute).eps * self._extent
            self._on_centres = ((at - at.round()).abs() <= near).any(0)
        losses = {name: torch.where(self.unsure(name), 0, self.float32[name].double() - t) for name, t in self.truth.items()}
        self._least = {name: 1e-300 + _DRAWS * largest_magnitude(loss) for name, loss in losses.items()}
        self.errors = {name: self.error(name, t, self.truth[name]) for name, t in call.results.items()}
        self.wrong = {name: errors > 1 for name, errors in self.errors.items()}

    def error(
        self, result: str, got: Tensor, expected: Tensor, compute: torch.dtype | None = None, queries: Tensor | None = None
    ) -> Tensor:
        """Return |got - expected| of each entry, in units of the allowed error; infinite if only one of the two is finite.
        `expected` is the truth, or the result that a suspected mistake would give.

        Args:
            compute: the dtype of the sums; by default the operator's: float64 if an input is float64, else float32.
            queries: the queries of `got` and `expected`; None for all.
        """
        extent = self._extent if compute is None else 0  # The extent is for errors of positions: none if `compute` is given.
        magnitude = torch.where(expected.isfinite(), expected.abs(), 0)
        scale = max(self._scales[result], largest_magnitude(expected))
        num_terms = max(1, self._num_terms.get(result, self.call.inputs[0].shape[-1] * 4))
        limit = rounding_limit(got.dtype, compute or self._compute, magnitude, scale, num_terms, extent)
        rounded, got = expected.to(got.dtype).double(), got.double()
        expected = torch.where(rounded.isinf(), rounded, expected)  # if the dtype of `got` cannot hold it, expect infinity
        units = entry_differences(got, expected) / torch.as_tensor(limit, dtype=torch.float64).clamp_min(self._least[result])
        unsure = self.unsure(result)
        unsure = unsure[:, queries] if queries is not None and unsure.dim() else unsure
        return torch.where(unsure & got.isfinite(), 0, units)

    def unsure(self, result: str) -> Tensor:
        """Return True for the gradients of locations that are within rounding of a pixel centre, where the gradient jumps."""
        return self._on_centres if result == "grad_locations" else torch.zeros((), dtype=torch.bool)
