"""Which layers of a model call what `patch` replaced, read from the code of their classes."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

from ._attention import LINEAR_LAYERS
from ._parameters import collect_words, find_source, list_attributes, unwrap

_DEPTH = 4  # functions between a layer's forward and a core: mmcv's have two


def find_layers(model: torch.nn.Module, replaced: list[Any]) -> tuple[list[str], list[str]]:
    """Return the names of the layers that call a replaced thing, and of the attention modules that do not.

    A layer inside another one of them is not counted beside it.
    """
    ids, calling, others = {id(thing) for thing in replaced}, [], []
    for name, module in model.named_modules():
        if any(name.startswith(f"{layer}.") for layer in calling):
            continue
        if any(id(base) in ids for base in type(module).__mro__) or _reaches(module, ids):
            calling.append(name)
        elif all(hasattr(module, layer) for layer in LINEAR_LAYERS):
            others.append(name)
    return calling, others


def _reaches(module: torch.nn.Module, ids: set[int]) -> bool:
    """Return whether the code of a module, without that of the modules in it, names one of these things."""
    seen: set[int] = set()
    things = [inspect.getattr_static(type(module), "forward")]
    for _ in range(_DEPTH):
        functions = [t for t in map(unwrap, things) if isinstance(t, types.FunctionType) and id(t) not in seen]
        seen |= set(map(id, functions))
        own = [function for function in functions if function.__module__.partition(".")[0] != "torch"]
        things = [thing for function in own for thing in _list_named(function, module)]
        if any(id(thing) in ids for thing in things):
            return True
    return False


def _list_named(function: Any, module: torch.nn.Module) -> Iterator[Any]:
    """Return the functions and classes that a function's code names: global ones, those of a global Python module, and the
    attributes of its layer."""
    names, own = collect_words(function), getattr(find_source(function), "__globals__", {})
    spaces = [own, vars(module), *(vars(own[name]) for name in names if isinstance(own.get(name), types.ModuleType))]
    for name in names:
        things = [space[name] for space in spaces if name in space]
        yield from map(_resolve, [*things, *list_attributes(type(module), name)])


def _resolve(thing: Any) -> Any:
    """Return what is called in the end: the function of a partial one, the class of an autograd function's `apply`."""
    while isinstance(thing, functools.partial):
        thing = thing.func
    owner = getattr(thing, "__self__", None)
    return owner if isinstance(owner, type) else unwrap(thing)
