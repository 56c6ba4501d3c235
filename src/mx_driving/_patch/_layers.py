"""Which layers of a model call an operator, and the cores that the code of a layer reaches."""

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
_DEPTH = 4  # functions between a layer's forward and a core: mmcv's have two


def find_layers(model: torch.nn.Module, is_replaced: Callable[[Any], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the layers that call an operator, and of the attention modules that do not.

    A layer calls an operator if its class or all of its cores are replaced. A layer inside such a layer is not counted again.
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
    """Return the cores that a layer calls where it is: on a CPU, the ones in plain torch if it has any."""
    plain = [core for core in cores if not (isinstance(core, type) and issubclass(core, torch.autograd.Function))]
    on_gpu = any(p.is_cuda for p in module.parameters())
    return cores if on_gpu or not plain else plain


def list_cores(kind: type, attributes: Mapping[str, Any] | None = None) -> list[Any]:
    """Return the cores that the forward and the constructor of a class name, without the code of the layers in it.
    `attributes` are those of an instance."""
    found: list[Any] = []
    seen: set[int] = set()
    things = [inspect.getattr_static(kind, name, None) for name in ("forward", "__init__")]
    for _ in range(_DEPTH):
        functions = [unwrap(thing) for thing in things if isinstance(thing, _FUNCTIONS)]
        functions = [function for function in functions if id(function) not in seen]
        seen |= set(map(id, functions))
        own = [function for function in functions if str(function.__module__).partition(".")[0] != "torch"]
        named = [thing for function in own for thing in _list_named(function, kind, attributes or {})]
        found += [thing for thing in named if is_core(thing)]
        things = [thing for thing in named if not is_core(thing)]
    return found


def _list_named(function: Any, kind: type, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Return the functions and classes that a function's code names: global ones, those of a global Python module, and the
    attributes of its layer."""
    names, own = collect_words(function), getattr(find_source(function), "__globals__", {})
    spaces = [own, attributes, *(vars(own[name]) for name in names if isinstance(own.get(name), types.ModuleType))]
    for name in names:
        things = [space[name] for space in spaces if name in space]
        yield from map(_resolve, [*things, *list_attributes(kind, name)])


def _resolve(thing: Any) -> Any:
    """Return what is called in the end: the function of a partial one, the class of a layer or of an autograd function's
    `apply`."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    if isinstance(thing, torch.nn.Module):
        return type(thing)
    if isinstance(thing, (types.MethodType, types.BuiltinMethodType)) and isinstance(thing.__self__, type):
        return thing.__self__
    return unwrap(thing) if isinstance(thing, _FUNCTIONS) else thing
