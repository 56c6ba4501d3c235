"""Find the layers of a model that call an operator, and the cores that the code of a layer names."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ._attention import LINEAR_LAYERS
from ._parameters import collect_words, find_source, list_attributes, unwrap
from ._search import is_core

_FUNCTIONS = (types.FunctionType, staticmethod, classmethod)
# How many functions deep the search goes, the layer's forward included. mmcv's layers have two between forward and core.
_DEPTH = 4


def find_layers(model: torch.nn.Module, is_replaced: Callable[[Any], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the layers that call an operator, and of the attention modules that do not.

    A layer calls an operator if its class or all of its cores are replaced. Layers inside such a layer are not counted.
    """
    calling: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{layer}.") for layer in (*calling, *others)):
            continue
        cores = _select_called(list_cores(type(module), {**vars(module), **dict(module.named_children())}), module)
        if any(is_replaced(kind) for kind in type(module).__mro__) or (cores and all(map(is_replaced, cores))):
            calling.append(name)
        elif cores or all(hasattr(module, layer) for layer in LINEAR_LAYERS):
            others.append(name)
    return tuple(calling), tuple(others)


def _select_called(cores: list[Any], module: torch.nn.Module) -> list[Any]:
    """Return the cores that a layer calls on its device. On a CPU it calls those in plain torch, if it has any."""
    plain = [core for core in cores if not (isinstance(core, type) and issubclass(core, torch.autograd.Function))]
    on_gpu = any(p.is_cuda for p in module.parameters())
    return cores if on_gpu or not plain else plain


def list_cores(kind: type, attributes: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the cores whose names are in the code of a class's forward and constructor. Skip the code of inner layers.

    The search reads bytecode, so it also works for classes whose code has no key. `attributes`: the attributes of an instance.
    """
    cores: list[Any] = []
    seen: set[int] = set()
    members = [inspect.getattr_static(kind, name, None) for name in ("forward", "__init__")]
    for _ in range(_DEPTH):
        functions = [unwrap(member) for member in members if isinstance(member, _FUNCTIONS)]
        functions = [f for f in functions if id(f) not in seen and str(f.__module__).partition(".")[0] != "torch"]
        seen |= set(map(id, functions))
        named = [member for function in functions for member in _list_named(function, kind, attributes or {})]
        cores += [member for member in named if is_core(member)]
        members = [member for member in named if not is_core(member)]
    return cores


def _list_named(function: Any, kind: type, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Return the functions and classes that a function's code names: globals, members of the Python modules among its globals,
    and attributes of the layer."""
    names, own = collect_words(function), getattr(find_source(function), "__globals__", {})
    spaces = [own, attributes, *(vars(own[name]) for name in names if isinstance(own.get(name), types.ModuleType))]
    for name in names:
        members = [space[name] for space in spaces if name in space]
        yield from map(_resolve, [*members, *list_attributes(kind, name)])


def _resolve(member: Any) -> Any:
    """Return the function of a functools.partial, the class of a layer, or the class of an autograd function's `apply`."""
    while isinstance(member, functools.partial):
        member = member.func
    if isinstance(member, torch.nn.Module):
        return type(member)
    if isinstance(member, (types.MethodType, types.BuiltinMethodType)) and isinstance(member.__self__, type):
        return member.__self__
    return unwrap(member) if isinstance(member, _FUNCTIONS) else member
