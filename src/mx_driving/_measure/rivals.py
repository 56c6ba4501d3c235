"""Implementations of a workload: ours, the bare operator if ours has logits, and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._operator import composition
from .._operator.description import OPERATORS
from . import plain
from .report import BARE, OURS
from .timing import Call
from .workloads import Args, Workload


class Rival(NamedTuple):
    """An implementation, its arguments, and the indices of differentiable arguments."""

    function: Callable[..., Tensor]
    args: Args
    differentiable: tuple[int, ...]


def plain_form(operator: str) -> Callable[..., Tensor]:
    """Return the operator in plain torch. For an operator with logits, compute softmax and locations first."""
    bare = OPERATORS[operator].bare
    return composition.forward(operator, getattr(plain, bare)) if bare else getattr(plain, operator)


def recorded(function: Callable[..., Tensor], args: Args, differentiable: tuple[int, ...], grad: Tensor) -> Call:
    """Return a call that runs forward under autograd, then backward, and returns the output and the gradients."""
    leaves = [a.detach().requires_grad_(i in differentiable) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    tensors = [leaves[i] for i in differentiable]

    def run() -> tuple[Tensor, ...]:
        output = function(*leaves)
        return (output.detach(), *torch.autograd.grad(output, tensors, grad))

    return run


def operator_of(name: str, args: Args, differentiable: tuple[int, ...] | None = None) -> Rival:
    indices = OPERATORS[name].differentiable if differentiable is None else differentiable
    return Rival(getattr(torch.ops.mx_driving, name).default, args, indices)


def ours(workload: Workload, args: Args) -> dict[str, Rival]:
    """Return the operator, and for an operator with logits also the bare operator on computed locations and weights."""
    implementations = {OURS: operator_of(workload.operator, args, workload.learned)}
    if workload.row.bare:
        implementations[BARE] = operator_of(*workload.bare(args))
    return implementations
