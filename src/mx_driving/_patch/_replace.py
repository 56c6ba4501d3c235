"""Replace the code of a function, or the methods of an autograd function, in place.

A plain function and a forward of a module get another `__code__`, below their decorators: whoever holds the function, under any
name, calls the new code, and wrappers go on to wrap it. An autograd function gets an `apply` that calls the operator, and a
forward and a backward, because torch.compile reads those two and ignores `apply`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from ._forms import AUTOGRAD, MODULE, Form, map_to_roles
from ._parameters import STAND_IN, Parameters, unwrap

# What new code calls, by the function's id. An entry stays when a patch ends: another thread may be about to call it.
SERVED: dict[int, Callable[..., Any]] = {}
# A function takes only code with as many free variables as its own. Code whose bytecode does not begin with them, as
# CodeType.replace makes it, ends the process in a debugger. Decorators, such as mmcv's, ask code for its parameters.
_SOURCE = f"""
def make({{free}}):
    def stand_in{{parameters}}:
        from {__name__} import SERVED
        return SERVED[{{key}}]({{arguments}})
        {{free}}
"""
_WIDTHS = {"half": 16, "float16": 16, "float": 32, "float32": 32, "double": 64, "float64": 64}  # names of casts in code


def find_holder(thing: Any) -> Any:
    """Return the object to change: an autograd function's class, or the function below the decorators."""
    if isinstance(thing, type) and not issubclass(thing, torch.autograd.Function):
        return unwrap(vars(thing)["forward"])
    return thing


def replace(form: Form, holder: Any) -> Callable[[], None]:
    """Change an object in place, and return a function that changes it back."""
    if form.kind == AUTOGRAD:
        originals, replacements = dict(vars(holder)), _make_methods(form, holder)
    else:
        originals, replacements = {"__code__": holder.__code__}, {"__code__": _make_code(form, holder)}
        replacements["__wrapped__"] = SERVED[id(holder)].__wrapped__  # for find_source
    for name, value in replacements.items():
        setattr(holder, name, value)
    return functools.partial(_give_back, holder, originals, replacements)


def add_form(form: Form, function: types.FunctionType) -> None:
    """Let a replaced forward serve another class, too, which shares it with the first."""
    SERVED[id(function)] = make_stand_in(SERVED[id(function)], form)


def _give_back(holder: Any, originals: dict[str, Any], replacements: dict[str, Any]) -> None:
    for name, value in replacements.items():
        if vars(holder).get(name, value) is not value:  # a wrapper that others have put over a method stays
            continue
        if name in originals:
            setattr(holder, name, originals[name])
        else:
            delattr(holder, name)


def _make_code(form: Form, function: types.FunctionType) -> types.CodeType:
    """Return code that calls what SERVED has for the function, which keeps its own globals and closure."""
    code = function.__code__
    original = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    original.__kwdefaults__ = function.__kwdefaults__
    SERVED[id(function)] = make_stand_in(original, form)
    names, free = Parameters(function), ", ".join(code.co_freevars)
    arguments = ", ".join([*names.names, *(f"{name}={name}" for name in names.keyword_only), *names.variadic])
    source = _SOURCE.format(free=free, parameters=names, key=id(function), arguments=arguments)
    nested = compile(source, STAND_IN, "exec")
    for _ in range(2):
        nested = next(constant for constant in nested.co_consts if isinstance(constant, types.CodeType))
    return nested.replace(co_name=code.co_name)


def make_stand_in(original: Callable[..., Any], form: Form) -> Callable[..., Any]:
    """Return a function with the original's parameters. The original answers what the form does not serve."""
    bound = int(form.kind == MODULE)
    parameters = Parameters(original, bound)
    bind = parameters.binder(parameters.all if form.reads_all else parameters.read)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        named_arguments, module = bind(args[bound:], kwargs), args[0] if bound else None
        if named_arguments is not None:
            arguments = map_to_roles(named_arguments)
            if form.serves(module, arguments):
                return form.answer(module, arguments)
        return original(*args, **kwargs)

    return call


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    return t.to(dtype) if t.is_floating_point() else t


def _read_casts(forward: Any) -> Callable[..., tuple[Tensor, ...]]:
    """Return the casts of an autograd function: the `cast_inputs` of torch.amp.custom_fwd, then those in forward's code.

    The casts are a function, not an object that can be called: torch.compile takes such an object only from torch 2.13 on.
    """
    device_type, under_autocast = "cpu", None
    while hasattr(forward, "__wrapped__"):
        cells = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
        if {"device_type", "cast_inputs"} <= set(cells):
            device_type, under_autocast = cells["device_type"].cell_contents, cells["cast_inputs"].cell_contents
        forward = forward.__wrapped__
    names = forward.__code__.co_names
    always = next((getattr(torch, f"float{_WIDTHS[n]}") for n in names if n in _WIDTHS), None)
    to_value = "type_as" in names

    def casts(*inputs: Tensor) -> tuple[Tensor, ...]:
        if under_autocast is not None and torch.is_autocast_enabled(device_type):
            kept = (torch.float64,)  # custom_fwd casts neither these nor tensors on another device
            inputs = tuple(i if i.dtype in kept or i.device.type != device_type else _cast(i, under_autocast) for i in inputs)
        dtype = inputs[0].dtype if to_value else always
        return inputs if dtype is None else tuple(_cast(i, dtype) for i in inputs)

    return casts


def _make_methods(form: Any, kind: Any) -> dict[str, staticmethod]:
    """Return the new methods of an autograd function, by name."""
    run = _dispatch.functions.as_compiled(form.run)
    apply, forward, backward = (_wrap_operator if form.inputs else _wrap_function)(form, run, kind)
    wrapped = functools.wraps(kind.forward)(forward), functools.wraps(kind.backward)(backward)
    return {name: staticmethod(m) for name, m in zip(("apply", "forward", "backward"), (apply, *wrapped), strict=True)}


def _wrap_operator(form: Any, run: Callable[..., Tensor], kind: Any) -> tuple[Callable[..., Any], ...]:
    casts = _read_casts(kind.forward)
    operator_inputs, operator = form.inputs, form.run.__name__  # torch 2.6 compiles no function that reads a form

    def apply(*args: Any) -> Tensor:
        return run(*operator_inputs(*casts(*args[:5])))  # without im2col_step

    def forward(ctx: Any, *args: Any) -> Tensor:
        inputs = casts(*args[:5])
        ctx.shapes = [i.shape for i in inputs]
        return _dispatch.functions.forward(ctx, run, *operator_inputs(*inputs))

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        gradients = _dispatch.functions.backward(ctx, operator, grad_output)
        own = [g if g is None else g.view(shape) for g, shape in zip(gradients[: len(ctx.shapes)], ctx.shapes, strict=True)]
        return (*own, *gradients[len(own) :])

    return apply, forward, backward


def _wrap_function(form: Any, run: Callable[..., Tensor], kind: Any) -> tuple[Callable[..., Any], ...]:
    """Return methods that run a function of several operators. Backward runs it again, and differentiates it."""

    def apply(*args: Any) -> Tensor:
        return run(*args)

    def forward(ctx: Any, *args: Any) -> Tensor:
        ctx.save_for_backward(*(a for a in args if isinstance(a, Tensor)))
        ctx.others = [None if isinstance(a, Tensor) else a for a in args]
        ctx.is_tensor = [isinstance(a, Tensor) for a in args]
        with _dispatch.functions.without_graph():
            return run(*args)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        saved, needs_grad = iter(ctx.saved_tensors), ctx.needs_input_grad
        args = [next(saved).detach() if there else a for a, there in zip(ctx.others, ctx.is_tensor, strict=True)]
        leaves = [a.requires_grad_() for a, needed in zip(args, needs_grad, strict=True) if needed]
        with torch.enable_grad():
            gradients = iter(torch.autograd.grad(run(*args), leaves, grad_output))
        return tuple(next(gradients) if needed else None for needed in needs_grad)

    return apply, forward, backward
