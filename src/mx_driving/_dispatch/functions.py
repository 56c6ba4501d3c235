"""The operators as autograd functions, for code that calls forward and backward itself or derives a class from them."""

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

    `apply` is the public function, unless a derived class has a forward or backward of its own. torch.func and forward mode do
    not go through a Function whose forward takes a ctx; the public function serves them.
    """

    public: Callable[..., Tensor]

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """Call the operator, with arguments by position or by name, and everything that the public function can do."""
        base = next(c for c in cls.__mro__ if "public" in vars(c))
        if cls.forward is base.forward and cls.backward is base.backward:
            return cls.public(*args, **kwargs)
        return super().apply(*args, **kwargs)


def without_graph() -> contextlib.AbstractContextManager[Any]:
    """Return a context without gradients, for a forward outside of `apply` whose caller calls backward itself. torch.export
    keeps no_grad in its program, which would then have no gradient."""
    return contextlib.nullcontext() if torch.compiler.is_compiling() else torch.no_grad()


def forward(ctx: Any, public: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """Save the inputs in ctx, and return the output."""
    ctx.save_for_backward(*inputs)
    with without_graph():
        return public(*inputs)


def backward(ctx: Any, operator: str, grad_output: Tensor, needs: Any = None) -> tuple[Tensor | None, ...]:
    """Return a gradient or None for each input of forward. `ctx` is torch's, or any object with saved_tensors. `needs` says
    which inputs need one, where ctx is of a function that has other inputs."""
    registered = REGISTERED[operator]
    needs = needs or getattr(ctx, "needs_input_grad", None)
    if isinstance(needs, tuple):
        gradients = registered.differentiate(ctx, (grad_output,), needs)
        return (*gradients, *[None] * (len(needs) - len(gradients)))
    with torch.no_grad():
        return registered.differentiate(ctx, (grad_output,), [True] * registered.count)


def autocasts(device: str) -> bool:
    # Older torch.compile cannot ask whether a device has autocast. Every device that it compiles for has.
    available = torch.compiler.is_compiling() or torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device)


def as_compiled(public: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the operator of an extension: autocast does not reach compiled functions, so the output has value's dtype."""

    def function(*inputs: Any, **named: Any) -> Tensor:
        # Torch 2.6 cannot compile next with a default.
        device = [*(i.device.type for i in (*inputs, *named.values()) if isinstance(i, Tensor)), "cpu"][0]
        if not autocasts(device):
            return public(*inputs, **named)
        with torch.autocast(device, enabled=False):
            return public(*inputs, **named)

    return function


def backward_as_compiled(operator: str, gather: type[list[Tensor]] | type[tuple[Tensor, ...]]) -> Callable[..., Any]:
    """Return the backward of an extension: the five inputs and grad_output -> a list or tuple of all gradients.

    Further arguments are not used: mmcv's im2col_step, the vendor's zeros for an aggregation.
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
