"""The arguments of public functions: what an operator needs before its call, and the sentence after a refusal."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .._dispatch import distributed
from .._operator import checks, limits
from .._operator.description import SAMPLING, Input, Operator
from .._operator.rules import fail

F = TypeVar("F", bound=Callable[..., Any])


def prepare(operator: Operator, *inputs: Any) -> tuple[Any, ...]:
    """Hold a call to limits, and return its inputs as DTensor needs them, which only inference mode has to do here: it skips
    our Autograd kernel."""
    if limits.open_releases:
        if not torch.compiler.is_compiling():
            checks.check_call(operator, *inputs)
        limits.hold(operator.name, *inputs)
    return distributed.prepare(inputs, operator.shared) if distributed.skips_autograd() else inputs


def explain_arguments(public: F, check: Callable[..., None] | None = None) -> F:
    """Decorate a public function, so that every wrong argument is a TypeError or a ValueError that names it.

    Names and the number of arguments are checked here, because Python's sentences would name the wrong argument. Only the
    kernel checks the arguments. After its error they are gone through again for the sentence.

    Args:
        check: Takes the same arguments, and raises the sentence. The default is the check of the operator with the name of
            `public`, if there is one. The call of such a function is prepared, too.
    """
    signature, operator = inspect.signature(public), SAMPLING.get(public.__name__)
    parameters = [p for p in signature.parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = tuple(p.name for p in parameters)
    most = len(names) if len(names) == len(signature.parameters) else sys.maxsize
    required = sum(p.default is p.empty for p in parameters)
    if operator:
        check = functools.partial(checks.check_call, operator)
    releases, dtensor = limits.open_releases, distributed.CLASSES  # two lists that are usually empty

    @functools.wraps(public)
    def call(*args: Any, **named: Any) -> Any:
        if (named or not required <= len(args) <= most) and not _binds(names, required, most, args, named):
            _refuse(public.__name__.removeprefix("_"), names, required, args, named)
        try:
            if operator and (releases or (dtensor and distributed.skips_autograd())):
                args, named = prepare(operator, *_bind(signature, args, named)), {}
            return public(*args, **named) if named else public(*args)
        except Exception as error:
            if torch.compiler.is_compiling() or hasattr(error, "argument"):
                raise
            if check and (refusal := _find_refusal(check, _bind(signature, args, named))):
                raise refusal from None
            raise

    return call  # pyright: ignore[reportReturnType]


def _binds(names: Sequence[str], required: int, most: int, args: Sequence[Any], named: Mapping[str, Any]) -> bool:
    return required <= len(args) + len(named) <= most and all(name in names for name in named)


def _bind(signature: inspect.Signature, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, ...]:
    bound = signature.bind(*args, **named)
    bound.apply_defaults()
    return bound.args


def _find_refusal(check: Callable[..., None], args: tuple[Any, ...]) -> Exception | None:
    try:
        check(*args)
    except (TypeError, ValueError) as refusal:
        return refusal
    return None


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
