"""Sentences for calls with missing, unknown or too many arguments. Python's own would name the wrong one."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor

from .._operator.description import SAMPLING, Input
from .._operator.rules import fail

F = TypeVar("F", bound=Callable[..., Any])


def explain_arguments(public: F) -> F:
    """Check the names and the number of the arguments of a public function before it is called."""
    parameters = inspect.signature(public).parameters
    names = tuple(parameters)
    required = sum(p.default is p.empty for p in parameters.values())

    @functools.wraps(public)
    def call(*args: Any, **named: Any) -> Any:
        count = len(args) + len(named)
        if count < required or count > len(names) or (named and any(name not in names for name in named)):
            _refuse(public.__name__, names, required, args, named)
        return public(*args, **named)

    return call  # pyright: ignore[reportReturnType]


_NO_STEP = "; mmcv's im2col_step has no use here: MultiScaleDeformableAttnFunction.apply takes and ignores it"


def _refuse(function: str, names: Sequence[str], required: int, args: Sequence[Any], named: Mapping[str, Any]) -> NoReturn:
    for name in named:
        if name not in names:
            _refuse_name(function, names, name)
    count = len(args) + len(named)
    if count > len(names):
        remark = _NO_STEP if len(args) == 6 and isinstance(args[5], int) else ""
        fail(TypeError, function, f"be called with {len(names)} arguments", f"{count}{remark}")
    operator = SAMPLING.get(function.removeprefix("npu_").removesuffix("_function"))
    gap = _gap(operator.tensors, args) if operator else len(args)
    missing = next(name for name in names[gap:required] if name not in named)
    fail(TypeError, missing, f"be given as argument {names.index(missing) + 1} of {function}", f"{count} arguments")


def _refuse_name(function: str, names: Sequence[str], name: str) -> NoReturn:
    like = difflib.get_close_matches(name, names, 1)
    if like and name != "im2col_step":
        fail(TypeError, like[0], "be given by this name", f"the name {name}")
    remark = _NO_STEP if name == "im2col_step" else ""
    fail(TypeError, function, f"be called with {', '.join(names)}", f"the name {name}{remark}")


def _gap(tensors: Sequence[Input], args: Sequence[Any]) -> int:
    """Return the place of the first argument that an operator would not take there: the one that belongs there is missing."""
    return next((i for i, (t, a) in enumerate(zip(tensors, args, strict=False)) if not _fits(t, a)), len(args))


def _fits(t: Input, a: Any) -> bool:
    axes = len(t.axes)
    apart = sum(len(axis.split(" * ")) for axis in t.axes)
    return isinstance(a, Tensor) and a.dim() in (axes, apart) and a.is_floating_point() <= (t.elements != "index")
