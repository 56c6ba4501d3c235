"""Compute a call again: by the reference in any dtype, by our kernels, or with a known mistake."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import reference
from .._operator.description import OPERATORS
from .calls import RecordedCall

# Queries are computed in parts. A part has at most this many elements in the samples of one level, because the reference keeps
# several copies of these samples.
NUMBERS = 2**22
Core = Callable[..., Tensor]
Results = dict[str, Tensor]


class _Reference(torch.autograd.Function):
    """The reference's forward and backward as an autograd function. Autograd's backward of the forward would not do: in ours,
    the gradients of an invalid sample are exactly zero."""

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
    """Return the results of our CPU kernel. If inputs have 16 bits and the recorded output more, the call ran under autocast:
    the operator read 16 bits, and computed and returned float32. So convert the inputs to float32, which is exact."""
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
