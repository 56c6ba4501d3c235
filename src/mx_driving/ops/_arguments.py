"""The arguments of public functions: prepare them before a call, and explain a wrong argument after the kernel's error."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._dispatch import distributed
from .._operator import checks, limits
from .._operator.description import SAMPLING, Input, Operator
from .._operator.rules import fail

F = TypeVar("F", bound=Callable[..., Any])


def prepare(operator: Operator, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check a call against the open atlas_limits(), and return its inputs. Our Autograd kernel prepares DTensors, but inference
    mode skips this kernel. So prepare DTensors here in inference mode."""
    if limits.open_releases:
        if not torch.compiler.is_compiling():
            checks.check_call(operator, *inputs)
        limits.hold(operator.name, *inputs)
    return distributed.prepare(inputs, operator.shared) if distributed.skips_autograd() else inputs


def explain_arguments(public: F, check: Callable[..., None] | None = None) -> F:
    """Decorate a public function: every wrong argument raises a TypeError or a ValueError with the argument's name.

    Check the names and the number of arguments here, because Python's messages would name the wrong argument. Leave all other
    checks to the kernel. After an error of the kernel, run `check` to raise the sentence about the wrong argument.

    Args:
        check: Takes the arguments of `public`, and raises the sentence. It includes the checks that `public` itself makes, in
            their order. If an operator has the name of `public`, the default is the check of this operator, and the decorator
            prepares the call, too.
    """
    signature, operator = inspect.signature(public), SAMPLING.get(public.__name__)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = tuple(p.name for p in parameters)
    most = len(names) if len(names) == len(signature.parameters) else sys.maxsize
    required = sum(p.default is p.empty for p in parameters)
    if operator:
        check = functools.partial(checks.check_call, operator)
    releases, modules = limits.open_releases, sys.modules

    @functools.wraps(public)
    def call(*args: Any, **named: Any) -> Any:
        if named or not required <= len(args) <= most:
            _check_binding(public.__name__.removeprefix("_"), names, required, most, args, named)
        try:
            if operator and (releases or (distributed.MODULE in modules and distributed.skips_autograd())):
                args, named = prepare(operator, _bind(signature, args, named)), {}
            return public(*args, **named) if named else public(*args)
        except Exception:
            if check and not torch.compiler.is_compiling():
                try:
                    check(*_bind(signature, args, named))
                except (TypeError, ValueError) as refusal:
                    raise refusal from None
            raise

    return call  # pyright: ignore[reportReturnType]


def _bind(signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    bound = signature.bind(*args, **named)
    bound.apply_defaults()
    return bound.args


_NO_STEP = "; mmcv's im2col_step has no use here: MultiScaleDeformableAttnFunction.apply takes and ignores it"


def _check_binding(
    function: str, names: Sequence[str], required: int, most: int, args: Sequence[Any], named: Mapping[str, Any]
) -> None:
    """Check that a call gives every required argument, and no argument twice or under an unknown name."""
    for name in named:
        if name not in names:
            like = difflib.get_close_matches(name, names, 1)
            if like and name != "im2col_step":
                fail(TypeError, like[0], "be given by this name", f"the name {name}")
            remark = _NO_STEP if name == "im2col_step" else ""
            fail(TypeError, function, f"be called with {', '.join(names)}", f"the name {name}{remark}")
    for name in names[: len(args)]:
        if name in named:
            fail(TypeError, name, "be given once", f"argument {names.index(name) + 1} of {function} and the name {name}")
    count = len(args) + len(named)
    if count > most:
        remark = _NO_STEP if len(args) == 6 and isinstance(args[5], int) else ""
        fail(TypeError, function, f"be called with {most} arguments", f"{count}{remark}")
    if all(name in named for name in names[len(args) : required]):
        return
    # The caller has probably left out the first argument that does not fit its parameter.
    operator = SAMPLING.get(function.removeprefix("npu_").removesuffix("_function"))
    pairs = zip(operator.tensors, args, strict=False) if operator else ()
    gap = next((i for i, (t, a) in enumerate(pairs) if not _fits(t, a)), len(args))
    missing = next(name for name in names[gap:required] if name not in named)
    fact = f"{count} arguments" + (f", {', '.join(named)} by name" if count >= required else "")
    fail(TypeError, missing, f"be given as argument {names.index(missing) + 1} of {function}", fact)


def _fits(t: Input, a: Any) -> bool:
    """Return whether an argument has the number of axes of its parameter, and a dtype of its kind."""
    axes = len(t.axes)
    apart = sum(len(axis.split(" * ")) for axis in t.axes)
    return isinstance(a, Tensor) and a.dim() in (axes, apart) and a.is_floating_point() <= (t.elements != "index")


def rename_once(named: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments under our names, and refuse two names of one argument. `names`: another library's name -> ours."""
    renamed: dict[str, Any] = {}
    for name, a in named.items():
        ours = names.get(name, name)
        if ours in renamed:
            fail(TypeError, ours, "be given once", f"another name of this argument, too: {', '.join(named)}")
        renamed[ours] = a
    return renamed
