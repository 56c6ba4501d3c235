"""The arguments of public functions: their names and number, and the check of an operator's inputs."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor

from .._backends.triton import from_cpp
from .._dispatch import distributed
from .._operator import checks, limits
from .._operator.description import OPERATORS, SAMPLING, Input
from .._operator.rules import fail

_PLAIN = {Tensor, torch.nn.Parameter}
_GPU_IN_PYTHON = from_cpp.why_not() is not None  # C++ can raise RuntimeError alone
F = TypeVar("F", bound=Callable[..., Any])


def check(operator: str, *inputs: Any) -> tuple[Any, ...]:
    """Check the inputs of a public function, and return them as its operator takes them.

    In a graph the fake kernel checks inputs; limits are checked everywhere. Level tables on a CPU are read here, so that a
    fault is a ValueError. There are millions of ranks: the kernel reads them.
    """
    row, compiling, limited = OPERATORS[operator], torch.compiler.is_compiling(), limits.enforced()
    if not compiling and (limited or not _kernel_in_python(inputs)):
        checks.check_inputs(row, *inputs)
        if row.kind != "pooling":
            checks.check_tables(row, inputs)
    if limited:
        limits.hold(operator, *inputs)
    if not compiling and torch.is_inference_mode_enabled():  # our Autograd kernel, which prepares inputs elsewhere, is skipped
        return distributed.prepare(inputs, row.shared)
    return inputs


def _kernel_in_python(inputs: Sequence[Any]) -> bool:
    """Return whether the operator's own check, of a kernel in Python, says the same of plain tensors off the CPU: a GPU's call
    is checked once. torch.vmap would change their shapes first."""
    value = inputs[0]
    plain = _GPU_IN_PYTHON and type(value) in _PLAIN and not value.is_cpu and _PLAIN.issuperset(map(type, inputs))
    return plain and not torch._C._are_functorch_transforms_active()


def explain_arguments(public: F) -> F:
    """Check the names and the number of the arguments of a public function before it is called. Python's sentences would name
    the wrong argument."""
    parameters = [p for p in inspect.signature(public).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    names = tuple(p.name for p in parameters)
    most = len(names) if len(names) == len(inspect.signature(public).parameters) else sys.maxsize
    required = sum(p.default is p.empty for p in parameters)

    @functools.wraps(public)
    def call(*args: Any, **named: Any) -> Any:
        if not named and required <= len(args) <= most:
            return public(*args)
        if not required <= len(args) + len(named) <= most or any(name not in names for name in named):
            _refuse(public.__name__.removeprefix("_"), names, required, args, named)
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
