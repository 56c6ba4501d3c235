"""Other implementations of a workload: plain torch, plain torch compiled, other packages, the bare operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _composition
from .._operators import OPERATORS
from . import plain
from .report import BARE, OURS
from .timing import Call
from .workloads import MULTI_SCALE, Args, Workload


class Rival(NamedTuple):
    """An implementation, what it is given, and which of that has a gradient."""

    function: Callable[..., Tensor]
    args: Args
    differentiable: tuple[int, ...]


def plain_form(operator: str) -> Callable[..., Tensor]:
    """The operator in plain torch; with logits, softmax and the arithmetic of locations before the form of the bare one."""
    bare = OPERATORS[operator].bare
    return _composition.forward(operator, getattr(plain, bare)) if bare else getattr(plain, operator)


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


def _compiled(form: Callable[..., Tensor], operator: str, args: Args) -> Callable[..., Tensor]:
    """What belongs to the whole model, such as its index tables, never changes: people let the compiler see constants."""
    shared = OPERATORS[operator].shared
    given = [i for i, a in enumerate(args) if isinstance(a, Tensor) and i not in shared]

    def of_given(*tensors: Tensor) -> Tensor:
        whole: list[Any] = list(args)
        for i, t in zip(given, tensors, strict=True):
            whole[i] = t
        return form(*whole)

    torch.compiler.reset()
    core = torch.compile(of_given)
    return lambda *args: core(*(args[i] for i in given))


def rivals(workload: Workload, args: Args, peers: bool) -> dict[str, Rival]:
    """Other implementations by name."""
    form = plain_form(workload.operator)
    functions = {"plain torch": form}
    if peers:
        functions["torch.compile"] = _compiled(form, workload.operator, args)
    if peers and workload.operator == MULTI_SCALE:
        try:
            from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore

            functions["torch-ms-deform-attn"] = ms_deform_attn
        except ImportError:
            pass
    return {name: Rival(function, args, workload.learned) for name, function in functions.items()}
