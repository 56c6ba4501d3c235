"""Replace the code of a function, or the methods of an autograd function, in place.

A function and the forward of a module get another `__code__`, below their decorators. So all references to the function call
the new code, and decorators still wrap it. An autograd function gets an `apply` that calls the operator. It also gets a forward
and a backward, because torch.compile reads these two and ignores `apply`.
"""

from __future__ import annotations

import functools
import types
import uuid
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from .._foreign.shapes import sampling_inputs
from .._foreign.stand_ins import differentiable
from .._operator.description import POOL, SamplingInputs
from ._fit import Fit, make_stand_in
from ._forms import AUTOGRAD
from ._parameters import STAND_IN, Parameters, unwrap

# `_get_key` of a function -> its stand-in. Entries stay when a patch ends, because another thread may be about to call them.
SERVED: dict[str, Callable[..., Any]] = {}
_PROCESS = uuid.uuid4().hex
_OWN = "the own code"  # in _SOURCE: a placeholder for the code object of the original
# - `function.__code__ = code` needs as many free variables as the function has. A nested function is compiled to get them: code
#   made by CodeType.replace(co_freevars=...) crashes debuggers.
# - The new code has the function's parameters, because decorators such as mmcv's read them.
# - cloudpickle sends a function of __main__ by value, so the new code may run in another process. SERVED has no entry for it
#   there, and the new code runs the function's original code.
_SOURCE = f"""
def make({{free}}):
    def stand_in{{parameters}}:
        from {__name__} import SERVED, run_own_code
        if {{key!r}} in SERVED:
            return SERVED[{{key!r}}]({{arguments}})
        return run_own_code({_OWN!r}, globals(), ({{cells}}))({{arguments}})
        {{free}}
"""


def find_holder(original: Any) -> Any:
    """Return the object to change: the class of an autograd function, or the function below the decorators."""
    if isinstance(original, type) and not issubclass(original, torch.autograd.Function):
        return unwrap(vars(original)["forward"])
    return original


def replace(fit: Fit, holder: Any) -> Callable[[], None]:
    """Change an object in place. Return a function that changes it back."""
    if fit.form.kind == AUTOGRAD:
        originals, replacements = dict(vars(holder)), _make_methods(fit.form, holder)
    else:
        original = _copy_function(holder)
        SERVED[_get_key(holder)] = make_stand_in(original, fit, original)
        originals = {"__code__": holder.__code__}
        replacements = {"__code__": _make_code(holder), "__wrapped__": original}  # find_source reads __wrapped__.
    for name, value in replacements.items():
        setattr(holder, name, value)
    return functools.partial(_give_back, holder, originals, replacements)


def add_fit(fit: Fit, function: types.FunctionType) -> None:
    """Let a replaced forward also serve another class that shares it."""
    stand_in: Any = SERVED[_get_key(function)]
    SERVED[_get_key(function)] = make_stand_in(stand_in.__wrapped__, fit, stand_in)


def _give_back(holder: Any, originals: dict[str, Any], replacements: dict[str, Any]) -> None:
    for name, value in replacements.items():
        if vars(holder).get(name, value) is not value:  # A wrapper that other code has put over a method stays.
            continue
        if name in originals:
            setattr(holder, name, originals[name])
        else:
            delattr(holder, name)


def _copy_function(function: types.FunctionType) -> types.FunctionType:
    own = function.__globals__, function.__name__, function.__defaults__, function.__closure__
    original = types.FunctionType(function.__code__, *own)
    original.__kwdefaults__ = function.__kwdefaults__
    return original


def _make_code(function: types.FunctionType) -> types.CodeType:
    """Return code that calls the function's stand-in. The function keeps its own globals and closure."""
    code, names = function.__code__, Parameters(function)
    arguments = ", ".join([*names.names, *(f"{name}={name}" for name in names.keyword_only), *names.variadic])
    words = {"free": ", ".join(code.co_freevars), "parameters": names, "key": _get_key(function), "arguments": arguments}
    nested = compile(_SOURCE.format(**words, cells="".join(f"{name}, " for name in code.co_freevars)), STAND_IN, "exec")
    for _ in range(2):
        nested = next(constant for constant in nested.co_consts if isinstance(constant, types.CodeType))
    constants = tuple(code if constant == _OWN else constant for constant in nested.co_consts)
    return nested.replace(co_name=code.co_name, co_consts=constants)


def _get_key(function: types.FunctionType) -> str:
    return f"{_PROCESS}-{id(function)}"


def run_own_code(code: Any, names: dict[str, Any], contents: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function that runs the original code of a replaced function. `contents`: the values of its closure."""
    return types.FunctionType(code, names, closure=tuple(map(types.CellType, contents)))


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t


def _read_casts(forward: Any, known: str) -> Callable[..., tuple[Tensor, ...]]:
    """Return a function that casts inputs as the autograd function of `forward` does.

    It casts first by custom_fwd's `cast_inputs`, and then to the dtype that `known` names. "value" is value's dtype, "" none.
    It is a plain function, because torch.compile takes callable objects only from torch 2.13 on.
    """
    device_type, under_autocast = "cpu", None
    while hasattr(forward, "__wrapped__"):
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
        if {"device_type", "cast_inputs"} <= set(cells):
            device_type, under_autocast = cells["device_type"].cell_contents, cells["cast_inputs"].cell_contents
        forward = forward.__wrapped__
    always = getattr(torch, known) if known not in ("", "value") else None

    def casts(*inputs: Tensor) -> tuple[Tensor, ...]:
        if under_autocast is not None and torch.is_autocast_enabled(device_type):
            kept = (torch.float64,)  # custom_fwd casts neither float64 nor tensors on another device.
            inputs = tuple(i if i.dtype in kept or i.device.type != device_type else _cast(i, under_autocast) for i in inputs)
        dtype = inputs[0].dtype if known == "value" else always
        return inputs if dtype is None else tuple(_cast(i, dtype) for i in inputs)

    return casts


def _make_methods(form: Any, kind: Any) -> dict[str, staticmethod]:
    """Return the new methods of an autograd function."""
    apply, forward, backward = (_wrap_function if form.foreign.operator == POOL else _wrap_operator)(form, kind)
    wrapped = functools.wraps(kind.forward)(forward), functools.wraps(kind.backward)(backward)
    return {name: staticmethod(m) for name, m in zip(("apply", "forward", "backward"), (apply, *wrapped), strict=True)}


def _wrap_operator(form: Any, kind: Any) -> tuple[Callable[..., Any], ...]:
    casts, run, operator = _read_casts(kind.forward, form.casts), differentiable(form.foreign), form.foreign.operator
    words = [word for word in form.foreign.words.split() if word != "step"]
    count = len(words)

    def apply(*args: Any) -> Tensor:
        return run(*casts(*args[:count]))

    def forward(ctx: Any, *args: Any) -> Tensor:
        inputs = casts(*args[:count])
        ctx.shapes = [i.shape for i in inputs]
        ctx.save_for_backward(*sampling_inputs(operator, dict(zip(words, inputs, strict=True))))
        with _dispatch.functions.without_graph():
            return run(*inputs)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        has_needs = isinstance(getattr(ctx, "needs_input_grad", None), tuple)
        needed = dict(zip(words, ctx.needs_input_grad, strict=False)) if has_needs else {}
        needs = tuple([needed.get(word, False) for word in SamplingInputs._fields]) if has_needs else None
        gradients = _dispatch.functions.backward(ctx, operator, grad_output, needs)
        by_word = dict(zip(SamplingInputs._fields, gradients, strict=False))
        own = [by_word.get(word) for word in words]
        own = [g if g is None else g.view(shape) for g, shape in zip(own, ctx.shapes, strict=True)]
        return (*own, *[None] * (len(ctx.needs_input_grad) - count if has_needs else 0))

    return apply, forward, backward


def _wrap_function(form: Any, kind: Any) -> tuple[Callable[..., Any], ...]:
    """Return the methods for a pool, which takes several operations. Backward runs them again and differentiates them."""
    run = differentiable(form.foreign)

    def apply(*args: Any) -> Tensor:
        return run(*args)

    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.is_tensor = [isinstance(a, Tensor) for a in args]
        with _dispatch.functions.without_graph():
            return run(*args)

    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        saved, needs_grad = iter(ctx.saved_tensors), ctx.needs_input_grad
        args = [next(saved).detach() if is_tensor else a for a, is_tensor in zip(ctx.others, ctx.is_tensor, strict=True)]
        leaves = [a.requires_grad_() for a, needed in zip(args, needs_grad, strict=True) if needed]
        with torch.enable_grad():
            outputs = run(*args)
            outputs = outputs if isinstance(outputs, tuple) else (outputs,)
            gradients = iter(torch.autograd.grad(outputs[0], leaves, grad_outputs[0]))  # A second output has no gradient.
        return tuple(next(gradients) if needed else None for needed in needs_grad)

    return apply, forward, backward
