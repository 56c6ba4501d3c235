"""`Fit` says which calls of a function or class a form answers. A stand-in is the function that answers them by an operator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _torch_private
from ._attention import READ, Attention
from ._code import Code
from ._forms import AUTOGRAD, FUNCTION, MODULE, Form, find_role
from ._parameters import Parameters
from ._search import Candidate, describe
from .known import Values


@dataclass(frozen=True)
class Fit:
    """A form for a function or class, and the conditions on the calls that it serves.

    Attributes:
        owner: the class of the layer. Subclasses with the same methods are served, too.
        flags: attributes of the layer that its code reads, except sizes and linear layers -> the values that the form serves.
        options: parameters without a role -> the values that the form serves.
        holders: attributes of the layer that hold its core.
        cores: the functions and classes that these attributes may hold.
        methods: names of the layer's methods that its forward calls.
        widths: last sides of the reference points that the form serves.
        masked: whether the form serves a mask.
        starts: whether the code reads level_start_index. A core in plain torch takes the levels one after the other.
    """

    form: Form
    owner: type | None = None
    flags: Values = field(default_factory=dict)
    options: Values = field(default_factory=dict)
    holders: tuple[str, ...] = ()
    cores: tuple[Any, ...] = ()
    methods: tuple[str, ...] = ()
    widths: tuple[int, ...] = (2, 4)
    masked: bool = True
    starts: bool = True

    def serves(self, layer: Any, arguments: Mapping[str, Any]) -> bool:
        """Return whether the form answers a call. If not, the original code of the function or layer runs."""
        if self.form.kind == MODULE and not self._knows(layer):
            return False
        if not all(_has_value(arguments[name], values) for name, values in self.options.items()):
            return False
        if not self.masked and arguments.get("mask") is not None:
            return False
        reference = arguments.get("reference")
        return (reference is None or reference.shape[-1] in self.widths) and self.form.serves(layer, arguments)

    def _knows(self, layer: Any) -> bool:
        """Return whether a layer's methods, flags and cores are those that the form serves."""
        if not isinstance(layer, self.owner):  # type: ignore[arg-type]
            return False
        if any(name in layer.__dict__ for name in ("forward", *self.methods)):
            return False
        kind = type(layer)
        if kind is not self.owner and any(getattr(kind, name) is not getattr(self.owner, name) for name in self.methods):
            return False
        if not all(_has_value(getattr(layer, name, None), values) for name, values in self.flags.items()):
            return False
        return all(self._knows_core(getattr(layer, name)) for name in self.holders)

    def _knows_core(self, core: Any) -> bool:
        """Return whether `core`, an attribute of a layer, is one of `self.cores`, without hooks or other changes."""
        if isinstance(core, functools.partial):
            return core.func in self.cores and not core.args and core.keywords in ({}, {"method": "default"})
        if core in self.cores:
            return True
        return type(core) in self.cores and "forward" not in core.__dict__ and not _torch_private.has_hooks(core)


def _has_value(value: Any, values: Any) -> bool:
    return isinstance(value, (bool, int, float, str, type(None))) and value in values


def make_fit(form: Any, candidate: Candidate, code: Code, flags: Values, cores: tuple[Any, ...] = ()) -> Fit:
    """Return the fit of a form for a candidate. It serves layers with these flags, and calls with default options."""
    parameters, is_attention = candidate.parameters, isinstance(form, Attention)
    names = [name for name in parameters.read if not form.reads_all and find_role(name) not in form.roles]
    holders = code.attributes - READ - form.reads - set(flags) if is_attention else ()
    return Fit(
        form,
        candidate.original if form.kind == MODULE else None,
        flags,
        {name: (parameters.defaults[name],) for name in names},
        tuple(sorted(holders)),
        (*code.cores, *cores),
        tuple(sorted(code.methods)),
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
    names = _select_names(fit, parameters)
    bind = parameters.binder({name: name if name in fit.options else find_role(name) for name in names})

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        arguments, layer = bind(args[bound:], kwargs), args[0] if bound else None
        if arguments is None or _is_exported_by_tracing() or not fit.serves(layer, arguments):
            return fallback(*args, **kwargs)
        return form.answer(layer, arguments)

    return call


def _is_exported_by_tracing() -> bool:
    """Return whether torch.onnx's older exporter, by tracing, runs. It does not know our operators."""
    return _torch_private.is_tracing() and torch.onnx.is_in_onnx_export()


def _select_names(fit: Fit, parameters: Parameters) -> list[str]:
    """Return the parameters that a form gets: those that the code reads, and the table of shapes even if the code reads only a
    list of shapes. To make the table from the list would take time."""
    names = parameters.all if fit.form.reads_all else parameters.read
    tables = [name for name in parameters.all if find_role(name) == "shapes"] if fit.form.kind != FUNCTION else []
    names = [name for name in parameters.all if name in names or name in tables]
    return [name for name in names if fit.starts or find_role(name) != "starts"]
