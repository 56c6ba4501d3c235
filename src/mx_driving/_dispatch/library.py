"""Schemas, fakes, gradients, and which kernel serves which device. The dispatcher chooses; nothing is tried and caught."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import _backends, _checks, _composition, reference
from .._operators import OPERATORS, Operator, gradients
from . import decompositions, flops, transforms

# Kernels for the CPU are registered in C++ here. A program may have registered schemas so, too; these are taken back.
_BY_CTYPES = _backends.native.why_by_ctypes() is not None
_library = torch.library.Library("mx_driving", "DEF")


def _op(name: str) -> Any:
    return getattr(torch.ops.mx_driving, name).default


def _define(operator: Operator) -> None:
    name, wanted = operator.name, len(operator.differentiable)
    tensors = (f"Tensor{'?' * (i in operator.optional)} {tensor}" for i, tensor in enumerate(operator.inputs))
    inputs = ", ".join((*tensors, *operator.options))
    results = ", ".join(["Tensor"] * wanted)
    tags = (torch.Tag.pt2_compliant_tag,)
    _library.define(f"{name}({inputs}) -> Tensor", tags=tags)
    backward = f"{name}_backward(Tensor grad_output, {inputs}, bool[{wanted}] output_mask) -> ({results})"
    _library.define(backward, tags=tags)


def _check_of(name: str, backward: bool) -> Callable[..., None]:
    """The check that every kernel and fake begins with, because torch.ops can be called without a public function."""
    return functools.partial(_checks.inputs.backward, name) if backward else _checks.inputs.INPUTS[name]


def _reference(name: str, backward: bool) -> Callable[..., Any]:
    """The reference. It checks what index tensors hold first on a CPU, where reading them is free, or if data checks are on."""
    run, check = getattr(reference, name + "_backward" if backward else name), _check_of(name, backward)

    def kernel(*args: Any) -> Any:
        named = zip(OPERATORS[name].inputs, args[backward:], strict=False)
        _checks.rules.tensors(*((tensor, a) for tensor, a in named if a is not None))
        check(*args)
        if args[backward].device.type == "cpu" or _checks.data.enabled():
            _checks.inputs.contents(OPERATORS[name], args[backward : len(args) - backward])
        return run(*args)

    return kernel


def _composed(name: str, backward: bool, device: Callable[..., Any]) -> Callable[..., Any]:
    """An operator with logits over what serves its bare operator on a device."""
    bare, check = device(OPERATORS[name].bare, backward), _check_of(name, backward)
    run = (_composition.backward if backward else _composition.forward)(name, bare)

    def kernel(*args: Any) -> Any:
        check(*args)
        return run(*args)

    return kernel


def _cpu(name: str, backward: bool) -> Callable[..., Any]:
    """The native kernel by ctypes, or the reference for what it does not serve."""
    native, plain, check = _backends.native.kernel(name, backward), _reference(name, backward), _check_of(name, backward)

    def kernel(*args: Any) -> Any:
        check(*args)
        return (native if _backends.native.why_not() is None and _backends.native.serves(args[backward]) else plain)(*args)

    return kernel


def _cuda(name: str, backward: bool) -> Callable[..., Any]:
    """The Triton kernel, imported at the first call, or the reference for what it does not serve.

    An operator with logits has no Triton kernel of its own.
    """
    if OPERATORS[name].bare:
        return _composed(name, backward, _cuda)
    plain, check = _reference(name, backward), _check_of(name, backward)
    places = [backward + i for i, t in enumerate(OPERATORS[name].tensors) if t.elements != "index"]

    def kernel(*args: Any) -> Any:
        check(*args)
        if _backends.triton.why_not() is None and _backends.triton.serves(*(args[i] for i in places)):
            return _backends.triton.kernel(name, backward)(*args)
        return plain(*args)

    return kernel


def _output_like(name: str, args: tuple[Any, ...]) -> Tensor:
    _checks.inputs.INPUTS[name](*args)
    return args[0].new_empty(_checks.inputs.OUTPUT_SHAPE[name](*args))


def _gradients_like(name: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    _checks.inputs.backward(name, *args)
    _, *inputs, mask = args
    return tuple(gradients([inputs[i] for i in OPERATORS[name].differentiable], mask))


def gradient(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The formula of an operator: what is saved, its inputs alone, and the call of its backward."""
    places, count = OPERATORS[name].differentiable, len(OPERATORS[name].inputs)
    has_options = bool(OPERATORS[name].options)
    backward_op = _op(name + "_backward")
    below = transforms.below_autograd(backward_op, _explained(name, True))

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.options = inputs[count:]

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        mask = [ctx.needs_input_grad[i] for i in places]
        options = ctx.options if has_options else ()
        run = backward_op if torch.compiler.is_compiling() or torch.is_grad_enabled() or transforms.transformed() else below
        found = run(grad, *ctx.saved_tensors, *options, mask)
        by_input: list[Tensor | None] = [None] * (count + len(options))
        for i, wanted, g in zip(places, mask, found, strict=True):
            by_input[i] = g if wanted else None
        return tuple(by_input)

    return setup_context, backward


def _second_gradient(name: str) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The gradient of the backward operator, through the reference's backward written in differentiable torch."""
    run = getattr(reference, name + "_backward")
    places = (0, *(i + 1 for i in OPERATORS[name].differentiable))  # grad_output and the inputs that have a gradient
    count = 1 + len(OPERATORS[name].inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.save_for_backward(*inputs[:count])
        *ctx.options, ctx.mask = inputs[count:]

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = list(ctx.saved_tensors)
        wanted = [i for i in places if ctx.needs_input_grad[i]]

        def first_gradients(*chosen: Tensor) -> tuple[Tensor, ...]:
            for i, t in zip(wanted, chosen, strict=True):
                tensors[i] = t
            found = run(*tensors, *ctx.options, ctx.mask)
            return tuple(g for g, used in zip(found, ctx.mask, strict=True) if used)

        outputs, vjp, *_ = torch.func.vjp(first_gradients, *(tensors[i] for i in wanted))
        given = [g for g, used in zip(grads, ctx.mask, strict=True) if used]
        given = [torch.zeros_like(o) if g is None else g for g, o in zip(given, outputs, strict=True)]
        found = dict(zip(wanted, vjp(tuple(given)), strict=True))
        return (*map(found.get, range(len(tensors) + len(ctx.options))), None)

    return setup_context, backward


def _autocast(name: str, device: str) -> Callable[..., Any]:
    """Inputs in float32 (float64 and integers as they are), whatever dtype autocast runs in."""
    key = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, "AutocastCUDA" if device == "cuda" else "AutocastCPU"))
    op = _op(name)

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return op(*(_to_float32(a) for a in args))

    return kernel


def _to_float32(a: Any) -> Any:
    cast = isinstance(a, Tensor) and a.is_floating_point() and a.dtype != torch.float64
    return a.to(torch.float32) if cast else a


def _explained(name: str, backward: bool) -> Callable[..., Any]:
    """Answers an error of a kernel: with Python's own about the inputs, or with the reference where the kernel cannot serve."""
    plain = _reference(name, backward)

    def explain(error: RuntimeError, *args: Any) -> Any:
        value = args[backward]
        if type(value) in (Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            _check_of(name, backward)(*args)
            if not _backends.native.serves(value):
                return plain(*args)
            _checks.inputs.contents(OPERATORS[name], args[backward : len(args) - backward])
        raise error

    return explain


def _follow_data() -> None:
    """Kernels for the CPU in Python, which look at the data. They stay: a call may run while the checks end."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        for name, operator in OPERATORS.items():
            _library.impl(name, _checks.data.followed(operator, _cpu(name, False)), "CPU")


def _register(operator: Operator) -> None:
    _define(operator)
    name = operator.name
    kernels = [("CompositeExplicitAutograd", _reference), ("CUDA", _cuda)]
    if _BY_CTYPES:
        kernels.append(("CPU", _cpu))
    for key, kernel in kernels:
        _library.impl(name, _checks.data.followed(operator, kernel(name, False)), key)
        _library.impl(name + "_backward", kernel(name, True), key)
    torch.library.register_fake(f"mx_driving::{name}", lambda *args: _output_like(name, args), lib=_library)
    decompositions.register(_op(name), name, lambda *args: _output_like(name, args))
    torch.library.register_fake(f"mx_driving::{name}_backward", lambda *args: _gradients_like(name, args), lib=_library)
    setup, formula = gradient(name)
    explain = _explained(name, False)
    transforms.register(_library, operator, _op(name), setup, formula, getattr(reference, name), explain, first=0)
    setup_second, second_formula = _second_gradient(name)
    reference_backward = getattr(reference, name + "_backward")
    backward_op = _op(name + "_backward")
    explain = _explained(name, True)
    transforms.register(_library, operator, backward_op, setup_second, second_formula, reference_backward, explain, first=1)
    _library.impl(name, _autocast(name, "cpu"), "AutocastCPU")
    _library.impl(name, _autocast(name, "cuda"), "AutocastCUDA")


for _operator in OPERATORS.values():
    _register(_operator)
if not _BY_CTYPES:
    _checks.data.when_enabled(_follow_data)


def public(name: str) -> Callable[..., Tensor]:
    """The operator as its public function calls it: of its inputs and options, which are checked first."""
    check, op = _checks.inputs.INPUTS[name], _op(name)
    below = transforms.below_autograd(op, _explained(name, False))
    run = transforms.directly(OPERATORS[name], op, below, *gradient(name))

    def call(*inputs: Any) -> Tensor:
        check(*inputs)
        if _checks.limits.enforced():
            _checks.limits.hold(name, *inputs)
        return run(*inputs)

    return call


def backends() -> dict[str, dict[str, str]]:
    """Which kernel serves which device, and why if it is the reference.

    Returns a dictionary per device type: operator name -> a sentence. "other" is every device not named. Where the vendor's
    distribution is installed beside this one, every sentence ends with that, and with what to do.

    >>> sorted(backends())
    ['cpu', 'cuda', 'other']
    """
    import mx_driving_portable  # it imports importlib.metadata

    beside = mx_driving_portable.beside()
    end = f"; {beside}" if beside else ""
    other = "reference: there are no kernels for this device"
    return {
        "cpu": dict.fromkeys(OPERATORS, _on_cpu() + end),
        "cuda": {name: _on_cuda(name) + end for name in OPERATORS},
        "other": dict.fromkeys(OPERATORS, other + end),
    }


def _on_cpu() -> str:
    reason = _backends.native.why_not()
    if reason is not None:
        return f"reference: {reason}"
    way = "" if _backends.native.why_by_ctypes() is None else f", called by ctypes ({_backends.native.why_by_ctypes()})"
    return f"native C++, {_backends.native.isa()}, {_backends.native.threads()}{way}; float32, float64, float16, bfloat16"


def _on_cuda(name: str) -> str:
    reason = _backends.triton.why_not()
    if reason is not None:
        return f"reference: {reason}"
    how = "composition over the Triton kernel: " if OPERATORS[name].bare else ""
    label = ", compiled but never run on AMD" if torch.version.hip else ""
    return f"{how}Triton{label}; float32, float16, bfloat16; float64: reference"


flops.register()
