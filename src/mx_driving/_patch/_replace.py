"""Decide which calls of a function or class a form answers (`Fit`), and replace the code in place.

A function and the forward of a module get another `__code__`, below their decorators. So all references to the function call
the new code, and decorators still wrap it. An autograd function gets an `apply` that calls the operator. It also gets a forward
and a backward, because torch.compile reads these two and ignores `apply`.
"""

from __future__ import annotations

import functools
import inspect
import types
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _dispatch, _torch_private
from .._foreign.stand_ins import sampling_inputs
from .._operator.description import POOL, SamplingInputs
from ._attention import READ, Attention
from ._code import Code
from ._forms import AUTOGRAD, FUNCTION, MODULE, Form, find_role
from ._parameters import PLAIN, STAND_IN, Parameters, is_autograd, unwrap
from ._search import Candidate, describe
from .known import Values

# The key of a change -> the stand-in. Entries stay when a patch ends, because another thread may be about to call them.
SERVED: dict[str, Callable[..., Any]] = {}
_PROCESS = uuid.uuid4().hex
_OWN = "the own code"  # in _SOURCE: a placeholder for the code object of the original
# - `function.__code__ = code` needs as many free variables in `code` as the function has. So compile a nested function:
#   CodeType.replace(co_freevars=...) makes code that crashes debuggers.
# - The new code has the function's parameters, because decorators such as mmcv's read them.
# - cloudpickle sends a function of __main__ by value, so the new code may run in another process. SERVED of that process has no
#   entry for the function, so the new code runs the original code.
_SOURCE = f"""
def make({{free}}):
    def stand_in{{parameters}}:
        from {__name__} import SERVED, run_own_code
        if {{key!r}} in SERVED:
            return SERVED[{{key!r}}]({{arguments}})
        return run_own_code({_OWN!r}, globals(), ({{cells}}))({{arguments}})
        {{free}}
"""


@dataclass(frozen=True)
class Fit:
    """A form for a function or class, and the conditions on the calls that it serves.

    Attributes:
        code: what the original code reaches. The form serves calls as long as nothing of this changes.
        owner: the class of the layer. Subclasses with the same methods are served, too.
        flags: attributes of the layer that its code reads, except sizes and linear layers -> the values that the form serves.
        options: parameters without a role -> the values that the form serves.
        holders: attributes of the layer that hold its core.
        cores: the functions and classes that these attributes may hold, and those that the code calls.
        widths: sizes of the last axis of reference points that the form serves.
        masked: whether the form serves a mask.
        starts: whether the code reads level_start_index. Cores in plain torch often assume levels without gaps instead.
        starts_on_cpu: the same on a CPU. Some modules call a core in plain torch there, and an autograd function on a GPU.
    """

    form: Form
    code: Code = field(default_factory=Code)
    owner: type | None = None
    flags: Values = field(default_factory=dict)
    options: Values = field(default_factory=dict)
    holders: tuple[str, ...] = ()
    cores: tuple[Any, ...] = ()
    widths: tuple[int, ...] = (2, 4)
    masked: bool = True
    starts: bool = True
    starts_on_cpu: bool = True

    def make_check(self) -> Callable[[Any], bool]:
        """Return a function that says whether the form serves a call of a layer now: if nothing that the code reaches has
        changed, if the form serves the layer's class, flags and cores, and if no attribute of the layer hides a method."""
        is_unchanged = self.code.watch(self.owner, self.cores)
        owner, cores, holders, methods, flags = self.owner, self.cores, self.holders, self.code.methods, [*self.flags.items()]

        def serves(layer: Any) -> bool:
            if owner is not None:
                if not isinstance(layer, owner) or not methods.isdisjoint(layer.__dict__):
                    return False
                for name, values in flags:
                    if not _has_value(getattr(layer, name, None), values):
                        return False
                for name in holders:
                    core = getattr(layer, name)
                    if isinstance(core, functools.partial):
                        if core.func not in cores or core.args or core.keywords not in ({}, {"method": "default"}):
                            return False
                    elif type(core) in cores:
                        if "forward" in core.__dict__ or _torch_private.has_hooks(core):
                            return False
                    elif core not in cores:
                        return False
            return is_unchanged(type(layer))

        return serves


def _has_value(value: Any, values: Any) -> bool:
    return isinstance(value, PLAIN) and value in values


def make_fit(form: Any, candidate: Candidate, code: Code, flags: Values, cores: tuple[Any, ...] = ()) -> Fit:
    """Return the fit of a form for a candidate. It serves layers with these flags, and calls with default options."""
    parameters, is_attention = candidate.parameters, isinstance(form, Attention)
    names = [name for name in parameters.read if not form.reads_all and find_role(name) not in form.roles]
    holders = code.attributes - READ - form.reads - set(flags) if is_attention else ()
    return Fit(
        form,
        code,
        candidate.original if form.kind == MODULE else None,
        flags,
        {name: (parameters.defaults[name],) for name in names},
        tuple(sorted(holders)),
        (*code.cores, *cores),
        starts=is_attention or reads_starts(candidate.original),
    )


def reads_starts(core: Any) -> bool:
    """Return whether a core reads level_start_index. Cores in plain torch often assume that levels lie one after the other."""
    candidate = describe(core)
    if candidate is None or candidate.kind == AUTOGRAD:
        return True
    return any(find_role(name) == "starts" for name in candidate.parameters.read)


def make_stand_in(original: Callable[..., Any], fit: Fit, fallback: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the original's parameters that calls the operator.

    The fallback answers a call that the form does not serve. It is the original, or the stand-in of another class.
    """
    form, bound = fit.form, int(fit.form.kind != FUNCTION)
    parameters = Parameters(original, bound)
    # The form gets the arguments that the code reads, and the table of shapes even if the code reads only a list of shapes: to
    # make the table from the list would take time. All other arguments get the name "unread <role>".
    names = set(parameters.all if form.reads_all else parameters.read)
    names |= {name for name in parameters.all if find_role(name) == "shapes" and form.kind != FUNCTION}
    names -= {name for name in names if find_role(name) == "starts" and not fit.starts}
    keys = {n: (n if n in fit.options else find_role(n)) if n in names else f"unread {find_role(n)}" for n in parameters.all}
    places = [*(["self"] if bound else []), *(keys[name] for name in parameters.names)]
    ignores_more = any(v[:2] == "**" and v[2:] not in parameters.names_read for v in parameters.variadic)
    options, widths, masked = [*fit.options.items()], fit.widths, fit.masked
    drops_starts, serves = fit.starts and not fit.starts_on_cpu, fit.make_check()

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments = dict(zip(places, args))  # noqa: B905  (torch 2.6 compiles strict=False as strict=True)
        served = len(args) <= len(places)  # Further arguments would go to *args.
        for name in kwargs:
            if name in keys:
                arguments[keys[name]] = kwargs[name]
            elif not ignores_more:
                served = False
        # The older exporter of torch.onnx, which traces, does not know our operators.
        if not served or (_torch_private.is_tracing() and torch.onnx.is_in_onnx_export()):
            return fallback(*args, **kwargs)
        layer = arguments.pop("self", None)
        served = serves(layer)
        for name, values in options:
            served = served and _has_value(arguments[name], values)
        if not masked and arguments.get("mask") is not None:
            served = False
        reference = arguments.get("reference")
        if reference is not None and reference.shape[-1] not in widths:
            served = False
        if drops_starts and arguments["query"].is_cpu:
            arguments["unread starts"] = arguments.pop("starts", None)
        output = form.answer(layer, arguments) if served else None
        return fallback(*args, **kwargs) if output is None else output

    call.serves = serves  # type: ignore[attr-defined]
    return call


def find_holder(original: Any) -> Any:
    """Return the object to change: the class of an autograd function, or the function below the decorators."""
    if isinstance(original, type) and not is_autograd(original):
        return unwrap(vars(original)["forward"])
    return original


class Change:
    """A function or a class that is changed in place.

    Several module classes may share one forward, so the change has a fit for each class. The change keeps the holder alive, so
    that no other object gets the holder's id.

    Attributes:
        holder: the function, or the class of an autograd function.
        key: the key of the function's stand-in in SERVED.
        code: what the original reaches.
        serving: for each fit, a function that says whether the fit serves a layer's call now.
        originals: for each patch that holds the change, the function or class that the patch replaced.
    """

    def __init__(self, fit: Fit, holder: Any) -> None:
        self.holder, self.key, self.code = holder, f"{_PROCESS}-{id(holder)}", fit.code
        self.serving: list[Callable[[Any], bool]] = []
        self.originals: list[Any] = []
        if fit.form.kind == AUTOGRAD:
            is_unchanged = fit.code.watch(None, fit.cores)
            self.serving.append(is_unchanged)
            self._own, self._ours = dict(vars(holder)), _make_methods(fit.form, holder, is_unchanged)
        else:
            code, defaults = holder.__code__, holder.__defaults__
            self._call = original = types.FunctionType(code, holder.__globals__, holder.__name__, defaults, holder.__closure__)
            original.__kwdefaults__ = holder.__kwdefaults__
            self.add(fit)
            # The new code calls the stand-in. The function keeps its own globals and closure.
            names, free = Parameters(holder), code.co_freevars
            arguments = ", ".join([*names.names, *(f"{name}={name}" for name in names.keyword_only), *names.variadic])
            words = {"free": ", ".join(free), "parameters": names, "key": self.key, "arguments": arguments}
            nested = compile(_SOURCE.format(**words, cells="".join(f"{name}, " for name in free)), STAND_IN, "exec")
            for _ in range(2):
                nested = next(constant for constant in nested.co_consts if isinstance(constant, types.CodeType))
            constants = tuple(code if constant == _OWN else constant for constant in nested.co_consts)
            nested = nested.replace(co_name=code.co_name, co_consts=constants)
            self._own, self._ours = {"__code__": code}, {"__code__": nested, "__wrapped__": original}  # find_source reads it
        self.use(own=False)

    def add(self, fit: Fit) -> None:
        """Serve the layers of a further class with the function's stand-in."""
        self._call = make_stand_in(inspect.unwrap(self._call), fit, self._call)
        SERVED[self.key] = self._call
        self.serving.append(self._call.serves)  # type: ignore[attr-defined]

    def use(self, own: bool) -> None:
        """Put the original code back if `own` is True, else our code."""
        present, wanted = (self._ours, self._own) if own else (self._own, self._ours)
        for name in self._ours:
            value = getattr(self.holder, name) if name == "__code__" else vars(self.holder).get(name)
            if value is not present.get(name):  # Keep an edit, or a wrapper that other code has put over a method.
                continue
            if name in wanted:
                setattr(self.holder, name, wanted[name])
            else:
                delattr(self.holder, name)

    @property
    def holds(self) -> bool:
        """Whether the holder still has our code. An editor's reload puts new code into a function."""
        return not isinstance(self.holder, types.FunctionType) or self.holder.__code__.co_filename == STAND_IN


def run_own_code(code: Any, names: dict[str, Any], contents: tuple[Any, ...]) -> Callable[..., Any]:
    """Return a function that runs the original code of a replaced function. `contents`: the values of its closure."""
    return types.FunctionType(code, names, closure=tuple(map(types.CellType, contents)))


def _make_methods(form: Any, kind: Any, is_unchanged: Callable[[Any], bool]) -> dict[str, Any]:
    """Return the new methods of an autograd function. For a subclass, or after a change of what the code reaches, they run the
    original methods."""
    own_forward, own_backward = kind.forward, kind.backward
    run, answer_forward, answer_backward = (_wrap_function if form.foreign.operator == POOL else _wrap_operator)(form, kind)

    def apply(cls: Any, *args: Any) -> Any:
        is_own = cls is not kind or kind.forward is not forward or kind.backward is not backward
        return super(kind, cls).apply(*args) if is_own or not is_unchanged(None) else run(*args)

    @functools.wraps(own_forward)
    def forward(ctx: Any, *args: Any) -> Any:
        # An own backward reads what the own forward saves. It runs for a subclass, and after `restore` for a caller that has
        # kept this forward.
        is_ours = torch.compiler.is_compiling() or (
            kind.backward is backward and _torch_private.find_forward_class(ctx) in (kind, None)
        )
        ctx.runs_operator = is_ours and is_unchanged(None)
        return answer_forward(ctx, *args) if ctx.runs_operator else own_forward(ctx, *args)

    @functools.wraps(own_backward)
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return answer_backward(ctx, *grad_outputs) if getattr(ctx, "runs_operator", False) else own_backward(ctx, *grad_outputs)

    return {"apply": classmethod(apply), "forward": staticmethod(forward), "backward": staticmethod(backward)}


def _wrap_operator(form: Any, kind: Any) -> tuple[Callable[..., Any], ...]:
    """Return `apply`, forward and backward for an operator that samples."""
    run, operator = form.run, form.foreign.operator
    words = [word for word in form.foreign.words.split() if word != "step"]
    count = len(words)
    device_type, under_autocast, wrapper = "cpu", None, kind.forward
    while hasattr(wrapper, "__wrapped__"):  # such as custom_fwd, whose argument `cast_inputs` casts under autocast
        cells = dict(zip(wrapper.__code__.co_freevars, wrapper.__closure__ or (), strict=True))
        if {"device_type", "cast_inputs"} <= set(cells):
            device_type, under_autocast = cells["device_type"].cell_contents, cells["cast_inputs"].cell_contents
        wrapper = wrapper.__wrapped__
    known = form.casts
    always = getattr(torch, known) if known not in ("", "value") else None

    # A plain function, because torch.compile takes callable objects only from torch 2.13 on.
    def casts(*inputs: Tensor) -> tuple[Tensor, ...]:
        """Cast inputs as the original does: by custom_fwd, then to the dtype that `form.casts` names."""
        if under_autocast is not None and torch.is_autocast_enabled(device_type):
            # custom_fwd casts neither float64 nor tensors on another device.
            floats = [i.is_floating_point() and i.dtype != torch.float64 and i.device.type == device_type for i in inputs]
            inputs = tuple([i.to(under_autocast) if is_cast else i for i, is_cast in zip(inputs, floats)])  # noqa: B905
        dtype = inputs[0].dtype if known == "value" else always
        return inputs if dtype is None else tuple([i.to(dtype) if i.is_floating_point() else i for i in inputs])

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
        # zip stops at the shorter: the call may have further arguments. torch 2.6 compiles strict=False as strict=True.
        needed = dict(zip(words, ctx.needs_input_grad)) if has_needs else {}  # noqa: B905
        needs = tuple([needed.get(word, False) for word in SamplingInputs._fields]) if has_needs else None
        gradients = _dispatch.functions.backward(ctx, operator, grad_output, needs)
        by_word = dict(zip(SamplingInputs._fields, gradients))  # noqa: B905
        own = [by_word.get(word) for word in words]
        own = [g if g is None else g.view(shape) for g, shape in zip(own, ctx.shapes, strict=True)]
        return (*own, *[None] * (len(ctx.needs_input_grad) - count if has_needs else 0))

    return apply, forward, backward


def _wrap_function(form: Any, kind: Any) -> tuple[Callable[..., Any], ...]:
    """Return the methods for a pool, which is several operations. Backward runs the operations again to differentiate them."""
    run = form.run

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

    return run, forward, backward
