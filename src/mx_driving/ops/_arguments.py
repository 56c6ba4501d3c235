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
from .._operator import checks
from .._operator.description import SAMPLING, Operator
from .._operator.rules import fail

F = TypeVar("F", bound=Callable[..., Any])
CALL_CHECKS: list[Callable[..., None]] = []  # called with the operator's name and inputs if a call is legal; usually empty


def prepare(operator: Operator, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Run the CALL_CHECKS, and return the inputs of a call. Our Autograd kernel prepares DTensors, but inference mode skips
    this kernel. So prepare DTensors here in inference mode."""
    if CALL_CHECKS and not torch.compiler.is_compiling():
        checks.check_call(operator, *inputs)
    for check in CALL_CHECKS:
        check(operator.name, *inputs)
    return distributed.prepare(inputs, operator.shared) if distributed.skips_autograd() else inputs


def explain_arguments(public: F, check: Callable[..., None] | None = None) -> F:
    """Decorate a public function: every wrong argument raises a TypeError or a ValueError with the argument's name.

    Check the names and the number of arguments here, because Python's messages would blame another argument. Leave all other
    checks to the kernel. After an error of the kernel, run `check`, whose error names the wrong argument.

    Args:
        check: Takes the arguments of `public`, and raises the error. It includes the checks that `public` itself makes, in
            their order. If `public` has the name of an operator, the decorator uses the operator's check instead, and also
            calls `prepare`.
    """
    signature, operator = inspect.signature(public), SAMPLING.get(public.__name__)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = tuple(p.name for p in parameters)
    most = len(names) if len(names) == len(signature.parameters) else sys.maxsize
    defaults = {p.name: p.default for p in parameters}
    required = sum(p.default is p.empty for p in parameters)
    if operator:
        check = functools.partial(checks.check_call, operator)
    modules = sys.modules

    def bind(args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
        """Return all arguments in their order. torch 2.6 cannot compile inspect.Signature.bind."""
        return (*args, *(named[name] if name in named else defaults[name] for name in names[len(args) :]))

    @functools.wraps(public)
    def call(*args: Any, **named: Any) -> Any:
        if named or not required <= len(args) <= most:
            _check_binding(public.__name__.removeprefix("_"), names, required, most, args, named)
        try:
            if operator and (CALL_CHECKS or (distributed.MODULE in modules and distributed.skips_autograd())):
                args, named = prepare(operator, bind(args, named)), {}
            return public(*args, **named) if named else public(*args)
        except Exception:
            if check and not torch.compiler.is_compiling():
                try:
                    check(*bind(args, named))
                except (TypeError, ValueError) as refusal:
                    raise refusal from None
            raise

    return call  # pyright: ignore[reportReturnType]


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
    count = len(args) + len(named)
    if count > most:
        remark = _NO_STEP if len(args) == 6 and isinstance(args[5], int) else ""
        fail(TypeError, function, f"be called with {most} arguments", f"{count}{remark}")
    for name in names[: len(args)]:
        if name in named:
            fail(TypeError, name, "be given once", f"argument {names.index(name) + 1} of {function} and the name {name}")
    if all(name in named for name in names[len(args) : required]):
        return
    # Find the first argument that does not fit its parameter: the caller has probably left out this parameter.
    operator = SAMPLING.get(function.removeprefix("npu_").removesuffix("_function"))
    pairs = zip(operator.tensors, args, strict=False) if operator else ()
    gap = len(args)
    for i, (t, a) in enumerate(pairs):
        has_axes = isinstance(a, Tensor) and a.dim() in (len(t.axes), len(t.factors))
        if not has_axes or (a.is_floating_point() and t.elements == "index"):
            gap = i
            break
    missing = next(name for name in names[gap:required] if name not in named)
    fact = f"{count} arguments" + (f", {', '.join(named)} by name" if count >= required else "")
    fail(TypeError, missing, f"be given as argument {names.index(missing) + 1} of {function}", fact)


def rename_once(named: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return arguments under our names, and refuse two names of one argument. `names`: another library's name -> ours."""
    renamed: dict[str, Any] = {}
    for name, a in named.items():
        ours = names.get(name, name)
        if ours in renamed:
            fail(TypeError, ours, "be given once", f"another name of this argument, too: {', '.join(named)}")
        renamed[ours] = a
    return renamed


def with_foreign_signatures(public: Callable[..., Tensor], shapes: str, starts: str) -> Callable[..., Tensor]:
    """Return `public` with the arguments of other libraries. `shapes` and `starts` are the index tables' names in `public`.

    Accept an im2col_step and ignore it. Accept the index tables as lists, and with or without "value_" before their names.
    Accept transformers' value_spatial_shapes_list, and use this list if the tensor of shapes is None or missing.
    """
    names = {other + table.removeprefix("value_"): table for table in (shapes, starts) for other in ("", "value_")}

    def call(*args: Any, **named: Any) -> Tensor:
        positional, listed = list(args), named.pop("value_spatial_shapes_list", None)
        pairs = positional[2] if len(positional) > 2 else None
        if isinstance(pairs, (list, tuple)) and pairs and all(isinstance(pair, (list, tuple)) for pair in pairs):
            listed = positional.pop(2)
        if len(positional) == 6 and isinstance(positional[5], int):
            del positional[5]
        named.pop("im2col_step", None)
        named = rename_once(named, names)
        if listed is not None and len(positional) < 2 and named.get(shapes) is None:
            named[shapes] = listed
        if len(positional) > 1 and positional[1] is None:
            positional[1] = listed
        value = positional[0] if positional else named.get("value")
        positional[1:3] = (_as_table(a, value) for a in positional[1:3])
        return public(*positional, **{n: _as_table(a, value) if n in (shapes, starts) else a for n, a in named.items()})

    return call


def _as_table(table: Any, value: Any) -> Any:
    return torch.tensor(table, device=value.device) if isinstance(table, (list, tuple)) and isinstance(value, Tensor) else table
