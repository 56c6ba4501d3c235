"""The operators as autograd functions, for callers that call forward and backward directly or derive classes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._operator.description import OPERATORS
from .registered import REGISTERED


class OperatorFunction(torch.autograd.Function):
    """An operator as an autograd function.

    `apply` calls the public function, unless a derived class overrides forward or backward. torch.func and forward mode support
    the public function, but no autograd function whose forward takes a ctx.
    """

    public: Callable[..., Tensor]

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Call the public function; keywords are allowed. If a derived class overrides forward or backward, run its methods
        instead."""
        base = next(c for c in cls.__mro__ if "public" in vars(c))
        if cls.forward is base.forward and cls.backward is base.backward:
            return cls.public(*args, **kwargs)
        return super().apply(*args, **kwargs)


def without_graph() -> contextlib.AbstractContextManager[Any]:
    """Return torch.no_grad(): a caller that calls forward and backward directly needs no graph. During compilation, return a
    null context, because torch.export would keep no_grad in its program, and the program would have no gradient."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch.no_grad()


def forward(ctx: Any, public: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Save the inputs in ctx, and return the output."""
    ctx.save_for_backward(*inputs)
    with without_graph():
        return public(*inputs)


def backward(ctx: Any, operator: str, grad_output: Tensor, needs: Any = None) -> tuple[Tensor | None, ...]:
    """Return a gradient or None for every input of forward. `ctx` is torch's, or any object with saved_tensors. If ctx belongs
    to a function with other inputs, pass `needs` in place of ctx.needs_input_grad."""
    registered = REGISTERED[operator]
    needs = needs or getattr(ctx, "needs_input_grad", None)
    if isinstance(needs, tuple):
        gradients = registered.differentiate(ctx, (grad_output,), needs)
        return (*gradients, *[None] * (len(needs) - len(gradients)))
    with torch.no_grad():
        return registered.differentiate(ctx, (grad_output,), [True] * registered.count)


def backward_as_compiled(operator: str, gather: type[list[Tensor]] | type[tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Return a backward like that of a compiled extension: it takes the five inputs and grad_output, and returns all gradients.

    The function ignores further arguments: mmcv's im2col_step, and the tensors of zeros that callers of the vendor's backward
    of aggregation pass for the gradients.
    """
    backward_op = getattr(torch.ops.mx_driving, operator + "_backward").default
    mask = [True] * len(OPERATORS[operator].differentiable)

    def function(
        value: Tensor,
        shapes: Tensor,
        starts: Tensor,
        locations: Tensor,
        weights: Tensor,
        grad_output: Tensor,
        *unused: Any,
        im2col_step: int = 64,
    ) -> Any:
        return gather(backward_op(grad_output, value, shapes, starts, locations, weights, mask))

    function.__name__ = f"{operator}_backward"
    return function
