"""What a layer and its arguments hold: before and after a call, because what a forward writes outlives it, and beside the layer
of a trial."""

from __future__ import annotations

import copy
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

VERDICTS = "_mx_driving_verdicts"  # the attribute of a layer that has its verdicts
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
OWN = frozenset(vars(torch.nn.Module()))  # attributes that every layer has
_MOST = 20_000  # a layer may refer to its whole model


def take_snapshot(layer: Any, arguments: Any) -> dict[str, Any]:
    """Return the identity and version of each tensor, and the plain values, by their paths. The tensors of a layer include its
    parameters and buffers; containers and objects are entered."""
    return dict(_walk([("", layer), ("its argument ", arguments)]))


def list_changes(before: dict[str, Any], after: dict[str, Any]) -> set[str]:
    return {path for path in before.keys() | after.keys() if before.get(path, _walk) != after.get(path, _walk)}


def copy_layer(layer: Any) -> Any:
    """Return a copy of a layer, with parameters of its own. deepcopy takes no views, as FSDP has them, and no layer of
    fully_shard. What cannot be copied, such as FSDP's state, is shared."""
    modules: list[Any] = [] if layer is None else list(layer.modules())
    memo: dict[int, Any] = {id(module): module.__new__(type(module)) for module in modules}
    for module in modules:
        for name, t in {**vars(module), **module._parameters, **module._buffers}.items():
            if isinstance(t, Tensor) and id(t) not in memo:
                twin = t.detach().clone()
                memo[id(t)] = torch.nn.Parameter(twin, t.requires_grad) if name in module._parameters else twin
    for module in modules:
        vars(memo[id(module)]).update({name: _copy(name, value, memo) for name, value in vars(module).items()})
    return memo.get(id(layer))


def _copy(name: str, value: Any, memo: dict[int, Any]) -> Any:
    if name.startswith("__"):  # FSDP's state
        return value
    try:
        return copy.deepcopy(value, memo)
    except Exception:
        return value


# attributes that say how large a layer is
_SIZES = frozenset(
    [
        *("d_model", "embed_dim", "embed_dims", "hidden_size", "head_dim", "in_features", "out_features", "normalized_shape"),
        *("n_heads", "num_heads", "n_levels", "num_levels", "n_points", "num_points", "num_points_list", "n_points_list"),
        "training",
    ]
)


def list_plain_state(layer: Any) -> Any:
    """Return the classes and attributes of a layer and of the layers in it, without sizes and parameters; None if the layer
    holds anything else, or has hooks, and so may be another layer than one that is equal."""
    state = {}
    for path, part in layer.named_modules():
        own = {name: value for name, value in vars(part).items() if name not in OWN | _SIZES | {VERDICTS}}
        hooks = any(value for name, value in vars(part).items() if name in OWN and "hooks" in name)
        if hooks or part._buffers or not all(map(_is_plain, own.values())):
            return None
        if any(type(p) is not torch.nn.Parameter for p in part._parameters.values() if p is not None):
            return None
        state[path] = type(part), own
    return state


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else isinstance(value, _PLAIN)


def _walk(waiting: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: dict[int, Any] = {}  # keeps what it has seen, so that no other object gets its id
    while waiting and len(seen) < _MOST:
        path, thing = waiting.pop()
        if isinstance(thing, _PLAIN):
            yield path, (type(thing), repr(thing))
        elif isinstance(thing, Tensor):
            yield path, (id(thing), 0 if thing.is_inference() else thing._version)
            seen[id(thing)] = thing
        else:
            yield path, id(thing)
            if id(thing) not in seen:
                seen[id(thing)] = thing
                waiting += _list_parts(path, thing)


def _list_parts(path: str, thing: Any) -> list[tuple[str, Any]]:
    """Return what a container or an object holds. Functions, classes and Python modules hold nothing that counts."""
    if isinstance(thing, dict):
        return [(f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[{id(key)}]", v) for key, v in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        return [(f"{path}[{index}]", part) for index, part in enumerate(thing)]
    if isinstance(thing, torch.nn.Module):
        parts = {**vars(thing), **thing._parameters, **thing._buffers, **thing._modules}
        parts = {name: part for name, part in parts.items() if name not in (VERDICTS, "_parameters", "_buffers", "_modules")}
    else:
        parts = {} if callable(thing) or isinstance(thing, types.ModuleType) else getattr(thing, "__dict__", {})
    return [(f"{path}.{name}".lstrip("."), part) for name, part in parts.items()]
