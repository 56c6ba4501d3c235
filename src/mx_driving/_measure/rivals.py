"""The implementations that are timed on a workload: our operator and plain torch.

For an operator with logits, the bare operator is timed, too. Its locations and weights are computed before the measurement.
"""

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


def make_plain(operator: str) -> Callable[..., Tensor]:
    """Return the operator in plain torch. For an operator with logits, compute softmax and locations first."""
    bare = OPERATORS[operator].bare
    return composition.forward(operator, getattr(plain, bare)) if bare else getattr(plain, operator)


def make_training_call(function: Callable[..., Tensor], args: Args, differentiable: tuple[int, ...], grad: Tensor) -> Call:
    """Return a call that runs forward under autograd, then backward, and returns the output and the gradients."""
    leaves = [a.detach().requires_grad_(i in differentiable) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    tensors = [leaves[i] for i in differentiable]

    def run() -> tuple[Tensor, ...]:
        output = function(*leaves)
        return (output.detach(), *torch.autograd.grad(output, tensors, grad))

    return run


def make_rival(operator: str, args: Args, differentiable: tuple[int, ...] | None = None) -> Rival:
    """Return our operator as an implementation. By default every differentiable input gets a gradient."""
    indices = OPERATORS[operator].differentiable if differentiable is None else differentiable
    return Rival(getattr(torch.ops.mx_driving, operator).default, args, indices)


def make_ours(workload: Workload, args: Args) -> dict[str, Rival]:
    """Return the operator, and for an operator with logits also the bare operator on computed locations and weights."""
    implementations = {OURS: make_rival(workload.operator, args, workload.differentiable)}
    if workload.description.bare:
        implementations[BARE] = make_rival(*workload.bare(args))
    return implementations
