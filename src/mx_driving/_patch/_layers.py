"""Find the layers of a model that sample, and the cores that the code of a layer names."""

from __future__ import annotations

import contextlib
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


def find_layers(model: torch.nn.Module, is_served: Callable[[Any, Any], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the layers that call an operator now, and of those that sample by their own code.

    Args:
        is_served: takes a function or class, and a layer or None. Says whether the function is replaced, and answers the
            layer's call by an operator.

    A layer calls an operator if its forward is replaced and serves the layer, or if all cores that it calls are replaced.
    Layers inside a layer that samples are not counted.
    """

    def is_core_served(core: Any) -> bool:
        if not isinstance(core, torch.nn.Module):
            return is_served(core, None)
        # A core that is a layer may have a forward of its own, such as a wrapper.
        forward = core.__dict__.get("forward", inspect.getattr_static(type(core), "forward"))
        return any(is_served(function, core) for function in _search(list(_list_callables(forward)), type(core), {})[1])

    served: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{layer}." if layer else "") for layer in (*served, *others)):
            continue
        forward = module.__dict__.get("forward", inspect.getattr_static(type(module), "forward"))
        attributes = {**vars(module), **dict(module.named_children())}
        cores, functions = _search(list(_list_callables(forward)), type(module), attributes)
        # On a CPU a layer calls the cores in plain torch, if it has any.
        plain = [core for core in cores if not (isinstance(core, type) and issubclass(core, torch.autograd.Function))]
        cores = cores if not plain or any(p.is_cuda for p in module.parameters()) else plain
        if any(is_served(f, module) for f in functions) or (cores and all(map(is_core_served, cores))):
            served.append(name)
        elif cores or is_core(type(module)) or all(hasattr(module, layer) for layer in LINEAR_LAYERS):
            others.append(name)
    return tuple(served), tuple(others)


def _list_callables(function: Any) -> Iterator[Any]:
    """Return a function, and the functions that it holds: below decorators, in partial objects, defaults, closures and the
    attributes of callable objects."""
    waiting, seen = [function], set()
    while waiting:
        member = waiting.pop()
        member = getattr(member, "__func__", member)  # of a bound, static or class method
        is_partial = isinstance(member, (functools.partial, functools.partialmethod))
        if id(member) in seen or not (callable(member) or is_partial) or isinstance(member, (type, torch.nn.Module)):
            continue
        seen.add(id(member))
        if is_partial:
            waiting += [member.func, *member.args, *member.keywords.values()]
        elif isinstance(member, types.FunctionType):
            yield member
            waiting += [*(member.__defaults__ or ()), *(member.__kwdefaults__ or {}).values()]
            waiting += _list_contents(member)
        else:
            waiting += getattr(member, "__dict__", {}).values()
        if unwrap(member) is not member:  # The original of a replaced function is no wrapped function.
            waiting.append(getattr(member, "__wrapped__", None))


def _list_contents(function: Any) -> Iterator[Any]:
    """Return the contents of a function's closure."""
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # The cell is empty.
            yield cell.cell_contents


def list_cores(kind: type) -> list[Any]:
    """Return the cores whose names are in the code of a class's forward and constructor. Skip the code of inner layers.

    The search reads bytecode, so it also works for classes whose code has no key.
    """
    members = [inspect.getattr_static(kind, name, None) for name in ("forward", "__init__")]
    return [type(core) if isinstance(core, torch.nn.Module) else core for core in _search(members, kind, {})[0]]


def _search(members: list[Any], kind: type, attributes: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the cores that functions name, and the functions that were read. `attributes`: the attributes of an instance."""
    cores: list[Any] = []
    read: dict[int, Any] = {}
    for _ in range(_DEPTH):
        functions = [unwrap(member) for member in members if isinstance(member, _FUNCTIONS)]
        functions = [f for f in functions if id(f) not in read and str(f.__module__).partition(".")[0] != "torch"]
        read |= {id(f): f for f in functions}
        named = [member for function in functions for member in _list_named(function, kind, attributes)]
        cores += [member for member in named if is_core(type(member) if isinstance(member, torch.nn.Module) else member)]
        members = [member for member in named if not isinstance(member, torch.nn.Module) and not is_core(member)]
    return cores, list(read.values())


def _list_named(function: Any, kind: type, attributes: Mapping[str, Any]) -> Iterator[Any]:
    """Return the objects that a function's code names: globals, members of the Python modules among its globals, and attributes
    of the layer, and the functions that these objects hold. The name `forward` alone, without super() or a class, is the
    forward of another layer."""
    names, own = collect_words(function), getattr(find_source(function), "__globals__", {})
    spaces = [own, attributes, *(vars(own[name]) for name in names if isinstance(own.get(name), types.ModuleType))]
    held = [*_list_contents(function)]
    calls_base = "super" in names or any(b.__name__ in names or any(b is other for other in held) for b in kind.__mro__)
    for name in names:
        members = [space[name] for space in spaces if name in space]
        members += list_attributes(kind, name) if name != "forward" or calls_base else []
        for member in members:
            bound = member.__self__ if isinstance(member, (types.MethodType, types.BuiltinMethodType)) else None
            if isinstance(bound, type):  # the `apply` of an autograd function
                yield bound
            elif isinstance(member, (type, torch.nn.Module)):
                yield member
            else:
                yield from map(unwrap, _list_callables(member))
