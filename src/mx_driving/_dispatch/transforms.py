"""How autograd and torch.func see an operator: reverse mode, forward mode and vmap, in the dispatcher's own places.

`torch.library.register_autograd` would do for reverse mode alone: its kernels refuse torch.func.grad and, worse, drop a
forward-mode tangent without a word.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction

from .. import _checks
from .._operators import Operator
from . import distributed

Formula = Callable[..., Any]


def below_autograd(op: Any, explain: Formula) -> Formula:
    """An operator that leaves its Autograd kernel out."""

    def call(*args: Any) -> Any:
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)
        except RuntimeError as error:
            problem = error
        return explain(problem, *args)

    return call


def transformed() -> bool:
    """Whether something beside reverse mode needs the Autograd kernel."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def directly(operator: Operator, op: Any, below: Formula, setup_context: Formula, backward: Formula) -> Formula:
    """The operator without its Autograd kernel, which is in Python, where this does the same: nothing without a gradient, and
    a function otherwise, unless torch has something between the caller and that kernel."""
    shared = operator.shared
    needs_gradient, are_plain = _checks.inputs.NEEDS_GRADIENT[operator.name], _checks.inputs.ARE_PLAIN[operator.name]
    function = _function(op._opname, below, setup_context, backward)

    def call(*inputs: Any) -> Any:
        if torch.compiler.is_compiling() or transformed():
            return op(*inputs)
        if not (torch.is_grad_enabled() and needs_gradient(*inputs)):
            return below(*distributed.prepared(inputs, shared))
        if are_plain(*inputs) and not _between():
            return function.apply(*inputs)
        return op(*inputs)

    return call


def _between() -> bool:
    """Whether torch changes or records a call of an operator before its Autograd kernel."""
    return (
        torch._C._is_any_autocast_enabled()
        or torch._C._is_tracing()
        or torch._C._len_torch_function_stack() > 0
        or torch._C._len_torch_dispatch_stack() > 0
    )


def _function(name: str, forward: Formula, setup_context: Formula, backward: Formula) -> Any:
    """A function of a single level, named as the operator in the graph of autograd."""
    parts = {"forward": forward, "setup_context": setup_context, "backward": backward}
    if hasattr(torch.autograd.Function, "_compiled_autograd_key"):  # what compiled autograd looks for
        parts["_compiled_autograd_key"] = torch.autograd.Function._compiled_autograd_key
    return type(name, (_SingleLevelFunction,), {part: staticmethod(f) for part, f in parts.items()})


def autograd_kernel(
    operator: Operator, op: Any, setup_context: Formula, backward: Formula, run: Formula, explain: Formula, first: int
) -> Formula:
    """The kernel of an operator's Autograd key; `run` is the operator in differentiable torch.

    `first` is the place of value among the arguments: 0 in an operator, 1 in its backward.

    Reverse mode is a function of a single level: inside the dispatcher torch.func has already taken its levels apart.
    Forward mode goes through `run`, whose operations all have a rule for tangents.
    """

    def below(*args: Any) -> Any:
        *inputs, keyset = args
        try:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & torch._C._after_autograd_keyset, *inputs)
        except RuntimeError as error:
            problem = error
        return explain(problem, *inputs)

    def forward(*args: Any) -> Any:
        if not torch._C._are_functorch_transforms_active():
            return below(*args)
        # autograd turns both modes of differentiation off inside a function's forward, but outer levels still need them
        with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return below(*args)

    function = _function(
        op._opname,
        forward,
        lambda ctx, inputs, output: setup_context(ctx, inputs[:-1], output),
        lambda ctx, *grads: (*backward(ctx, *grads), None),
    )
    shared = tuple(first + i for i in operator.shared)
    needs_gradient = _any_gradient if first else _checks.inputs.NEEDS_GRADIENT[operator.name]

    def kernel(keyset: Any, *args: Any) -> Any:
        args = distributed.prepared(args, shared)
        transformed = torch._C._are_functorch_transforms_active()
        # a compiled torch.func.jvp enters its level, and forward_ad does not notice
        if (transformed or forward_ad._current_level >= 0) and _any_tangent(args):
            return run(*args)
        if not (torch.is_grad_enabled() and needs_gradient(*args)):
            return below(*args, keyset)
        with enable_single_level_autograd_function() if transformed else contextlib.nullcontext():
            return function.apply(*args, keyset)

    return kernel


def _any_gradient(*args: Any) -> bool:
    return any(isinstance(a, Tensor) and a.requires_grad for a in args)


def _any_tangent(args: tuple[Any, ...]) -> bool:
    return any(isinstance(a, Tensor) and forward_ad.unpack_dual(a, level=0).tangent is not None for a in args)


def _leading(t: Tensor, dim: int | None, size: int, at: int) -> Tensor:
    """The vmapped axis moved to `at`, or a new one of `size` without copying."""
    if dim is not None:
        return t.movedim(dim, at)
    return t.unsqueeze(at).expand(*t.shape[:at], size, *t.shape[at:])


def vmap_rule(operator: Operator, op: Any, first: int) -> Formula:
    """The vmapped axis joins the queries if what all of them see, such as value, is not vmapped, and the batch otherwise."""
    if not operator.samples:
        return _each_by_itself(op)
    shared = tuple(first + i for i in operator.shared)
    seen_by_all = [first + i for i, at in enumerate(operator.axes[operator.queries][:-1]) if at is None]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        dims = [d if isinstance(a, Tensor) else None for a, d in zip(args, in_dims, strict=True)]
        if any(dims[i] is not None for i in shared):
            return _one_by_one(op, info.batch_size, dims, args)
        mask = args[-1] if first else None
        wanted = [first + i for i, needed in zip(operator.differentiable, mask or (), strict=False) if needed]
        at = 0 if any(dims[i] is not None or i in wanted for i in seen_by_all) else 1
        kept = seen_by_all if at else shared
        folded = [
            _leading(a, d, info.batch_size, at).flatten(at, at + 1) if isinstance(a, Tensor) and i not in kept else a
            for i, (a, d) in enumerate(zip(args, dims, strict=True))
        ]
        each = _leading(args[first + 3], dims[first + 3], info.batch_size, at).shape[at + 1]  # batches or queries
        return _unfold(op(*folded), (info.batch_size, each), at, mask)

    return rule


def _each_by_itself(op: Any) -> Formula:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        dims = [d if isinstance(a, Tensor) else None for a, d in zip(args, in_dims, strict=True)]
        return _one_by_one(op, info.batch_size, dims, args)

    return rule


def _unfold(found: Any, sizes: tuple[int, int], at: int, mask: list[bool] | None) -> Any:
    if mask is None:
        return found.unflatten(at, sizes), at
    outputs = tuple(g.unflatten(at, sizes) if wanted else g for g, wanted in zip(found, mask, strict=True))
    return outputs, tuple(at if wanted else None for wanted in mask)


def _one_by_one(op: Any, size: int, dims: list[int | None], args: tuple[Any, ...]) -> Any:
    """Maps of different sizes cannot share a call."""
    if size == 0:
        _checks.rules.fail(ValueError, "in_dims", f"name axes with entries where vmap calls {op._opname} for each", "size 0")
    results = [op(*(a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True))) for i in range(size)]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(r) for r in zip(*results, strict=True)), (0,) * len(results[0])


def register(
    library: torch.library.Library,
    operator: Operator,
    op: Any,
    setup_context: Formula,
    backward: Formula,
    run: Formula,
    explain: Formula,
    first: int,
) -> None:
    kernel = autograd_kernel(operator, op, setup_context, backward, run, explain, first)
    library.impl(op._opname, kernel, "Autograd", with_keyset=True)
    torch.library.register_vmap(f"mx_driving::{op._opname}", vmap_rule(operator, op, first), lib=library)
