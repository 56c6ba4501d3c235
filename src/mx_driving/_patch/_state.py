"""What a layer keeps beside its parameters, and how much of it a trial holds for.

A replacement reads the linear layers and sizes of a module. Whatever else the module keeps may change its numbers: a factor, a
switch, a list, a buffer, an inner layer. No table says which. A trial gives all tensors other numbers and changes every other
thing by itself. What the replacement does not follow must be in use as it was in the trial.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ._parameters import collect_attributes, collect_constants, collect_optional, overrides

_ABSENT = object()
_OWN = frozenset((*dir(torch.nn.Module()), "training"))
_PLAIN = (bool, int, float, str, type(None), type, torch.dtype, types.FunctionType, types.BuiltinFunctionType)
_CONTAINERS = (list, tuple, dict)
SAME, FOLLOWED, DIFFERS, RAISES = "same", "followed", "differs", "raises"
Path = tuple[str, ...]


@dataclass(frozen=True)
class Tried:
    """A layer whose trial agreed: its class, the names in the code of its forward, and what of its state must be the same.

    Attributes:
        options: of the layer, of further layers and of configurations, each by its path from the layer. An attribute that the
            layer does not have is None.
    """

    kind: type
    names: frozenset[str]
    options: tuple[tuple[Path, Any], ...]

    def covers(self, layer: Any) -> bool:
        """Return whether a layer has the code and the options that were tried."""
        if type(layer) is not self.kind and overrides(type(layer), self.kind, self.names):
            return False
        for path, value in self.options:  # torch.compile reads this loop
            part = layer
            for name in path:  # torch 2.6 compiles comparisons of types by `is`
                part = type(part) if name == "__class__" else getattr(part, name, None)
            if isinstance(value, type):
                if part is not value:
                    return False
            elif type(part) is not type(value) or part != value:
                return False
        return True


def describe_tried(layer: Any, other: Any, forward: Any, called: Sequence[Any], compare: Callable[[], str]) -> Tried:
    """Return what was tried of a layer.

    Args:
        layer: the layer.
        other: a layer of its class and of other sizes, which was tried, too. Whatever differs between the two is free.
        forward: the forward of the class.
        called: the inner layers that the replacement calls.
        compare: says what a change of the layer does to the original, and whether the replacement follows it.
    """
    names = collect_attributes(type(layer), forward)
    constants = sorted(collect_constants(type(layer), forward))
    others = {path: value for path, value, _ in _list_state(other, names, ())}
    fixed, inert = [], []
    for path, value, is_named in _list_state(layer, names, called):
        same = path in others and type(others[path]) is type(value) and others[path] == value
        outcomes = [_try_changes(layer, [(path, v)], compare) for v in _vary(value, constants)] if same else []
        if same and _must_stay(value, outcomes, is_named):
            fixed.append((path, value))
        elif outcomes == [SAME] and isinstance(value, bool):
            inert.append((path, value))
    if _try_changes(layer, [(path, not value) for path, value in inert], compare) == DIFFERS:  # switches that count together
        fixed += inert
    optional = collect_optional(type(layer), forward)
    absent = [((name,), None) for name in sorted(optional) if not hasattr(layer, name) and not hasattr(Tensor, name)]
    return Tried(type(layer), names, (*fixed, *absent))


def _must_stay(value: Any, outcomes: Sequence[str], is_named: bool) -> bool:
    """Return whether a layer with another value is another layer, from what changes of it did.

    A switch and a whole number are free where all changes that run agree. Another number is free only where the replacement
    follows it: a threshold may be far away.
    """
    if DIFFERS in outcomes:
        return True
    if isinstance(value, bool):
        return False
    if isinstance(value, int):
        return is_named and not {SAME, FOLLOWED} & set(outcomes)
    return is_named and FOLLOWED not in outcomes


def _try_changes(layer: Any, changes: Sequence[tuple[Path, Any]], compare: Callable[[], str]) -> str:
    """Return what `compare` says while parts of a layer are changed."""
    with contextlib.ExitStack() as undo:
        for (*way, name), value in changes:
            owner = functools.reduce(getattr, way, layer)
            restore = functools.partial(setattr, owner, name, getattr(owner, name))
            restore = restore if name in vars(owner) else functools.partial(delattr, owner, name)
            try:
                setattr(owner, name, value)
            except AttributeError:  # a property
                return RAISES
            undo.callback(restore)
        return compare()


def _vary(value: Any, constants: Sequence[int]) -> list[Any]:
    """Return other values. A whole number also takes the constants of the code, which it may be compared with."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, *(c for c in constants if c != value)]
    if isinstance(value, float):
        return [1.3 * value + 0.1]
    if isinstance(value, _CONTAINERS):
        parts = list(value.values()) if isinstance(value, dict) else list(value)
        varied = [(_vary(part, ()) or [part])[0] for part in parts]
        return [] if varied == parts else [_refill(value, varied)]
    return []


def _refill(container: Any, parts: list[Any]) -> Any:
    if isinstance(container, dict):
        return dict(zip(container, parts, strict=True))
    return type(container)(parts) if type(container) in (list, tuple) else parts


def _is_plain(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return all(map(_is_plain, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _PLAIN)


def _list_state(layer: Any, names: frozenset[str], called: Sequence[Any]) -> Iterator[tuple[Path, Any, bool]]:
    """Return what a layer keeps beside tensors, by its path, and whether the code names it."""
    for name in sorted({*names, *vars(layer), *layer._modules} - _OWN):
        part = getattr(layer, name, _ABSENT)
        if part is _ABSENT or any(part is other for other in called):
            continue
        if isinstance(part, torch.nn.Module):
            yield (name, "__class__"), type(part), True
            words = collect_attributes(type(part), type(part).forward)
            yield from (((name, *path), value, is_named) for path, value, is_named in _list_state(part, words, called))
        elif isinstance(part, types.MethodType):
            yield (name, "__func__"), part.__func__, name in names
        elif _is_plain(part):
            yield (name,), part, name in names
        elif hasattr(part, "__dict__") and not callable(part) and not isinstance(part, Tensor):
            words = sorted(names & vars(part).keys())
            yield from (((name, word), vars(part)[word], True) for word in words if _is_plain(vars(part)[word]))


def list_tensors(layer: Any) -> Iterator[tuple[str, Tensor]]:
    """Return the buffers of a layer and of the layers in it, and tensors that are attributes, by their names."""
    yield from layer.named_buffers()
    for name, part in layer.named_modules():
        for attribute, value in vars(part).items():
            if isinstance(value, Tensor):
                yield f"{name}.{attribute}".lstrip("."), value


def randomize(layer: Any, rand: Callable[..., Tensor], spread: float) -> None:
    """Give parameters random numbers up to `spread`, and all other tensors other numbers than they have."""
    for p in layer.parameters():
        p.data = spread * (2 * rand(*p.shape) - 1)
    for _, tensor in list_tensors(layer):
        if tensor.is_floating_point():
            tensor.data.copy_(rand(*tensor.shape) + 0.5)
        else:
            tensor.data.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
