"""Implementations of a workload: ours, the bare operator beside one with logits, and plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._operator import composition
from .._operator.description import OPERATORS
from . import plain
from .report import BARE, OURS, PLAIN
from .timing import Call
from .workloads import Args, Workload


class Rival(NamedTuple):
    """An implementation, what it is given, and which of that has a gradient."""

    function: Callable[..., Tensor]
    args: Args
    differentiable: tuple[int, ...]


def plain_form(operator: str) -> Callable[..., Tensor]:
    """The operator in plain torch; with logits, softmax and the arithmetic of locations before the form of the bare one."""
    bare = OPERATORS[operator].bare
    return composition.forward(operator, getattr(plain, bare)) if bare else getattr(plain, operator)


def recorded(function: Callable[..., Tensor], args: Args, differentiable: tuple[int, ...], grad: Tensor) -> Call:
    """A forward that autograd records, and all gradients. Gives the output and the gradients."""
    leaves = [a.detach().requires_grad_(i in differentiable) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    wanted = [leaves[i] for i in differentiable]

    def run() -> tuple[Tensor, ...]:
        output = function(*leaves)
        return (output.detach(), *torch.autograd.grad(output, wanted, grad))

    return run


def operator_of(name: str, args: Args, differentiable: tuple[int, ...] | None = None) -> Rival:
    places = OPERATORS[name].differentiable if differentiable is None else differentiable
    return Rival(getattr(torch.ops.mx_driving, name).default, args, places)


def ours(workload: Workload, args: Args) -> dict[str, Rival]:
    """The operator; for one with logits also its bare one, given locations and weights that somebody else has made."""
    found = {OURS: operator_of(workload.operator, args, workload.learned)}
    if workload.row.bare:
        found[BARE] = operator_of(*workload.bare(args))
    return found


def rivals(workload: Workload, args: Args) -> dict[str, Rival]:
    """Other implementations by name: plain torch."""
    return {PLAIN: Rival(plain_form(workload.operator), args, workload.learned)}
