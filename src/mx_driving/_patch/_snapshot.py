"""What a layer and its arguments hold: before and after a call, because what a forward writes outlives it, and beside the layer
of a trial."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ._parameters import collect_words

VERDICTS = "_mx_driving_verdicts"  # begins the names of the attributes of a layer that have its verdicts
PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
OWN = frozenset(vars(torch.nn.Module()))  # attributes that every layer has
CODE = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, types.ModuleType)
_SMALL = 64  # elements
_SKIPPED = {"_parameters", "_buffers", "_modules", *(name for name in OWN if "hooks" in name)}
_HOOKS = "the hooks of "
_MOST = 20_000  # a layer may refer to its whole model


@contextlib.contextmanager
def watch(layer: Any, arguments: Any, function: Any) -> Iterator[set[str]]:
    """Yield a set. Afterwards it has what has changed in the layer, its class, the arguments and the globals that the function
    names, and the layers within the layer whose hooks have run."""
    changes: set[str] = set()
    parts = [] if layer is None else [(name, part) for name, part in layer.named_modules() if name and _has_hooks(part)]
    handles = [part.register_forward_pre_hook(lambda *_, n=name: changes.add(_HOOKS + n)) for name, part in parts]
    things = [("", layer), ("its argument ", arguments), ("the global ", _list_globals(function, type(layer)))]
    before = dict(_walk([*things]))
    try:
        yield changes
        after = dict(_walk(things))
        changes |= {path for path in before.keys() | after.keys() if before.get(path, _walk) != after.get(path, _walk)}
    finally:
        for handle in handles:
            handle.remove()


def explain_lost(changes: set[str]) -> str:
    """Return why the original must answer: what it changes, and the operator does not."""
    first = sorted(changes)[:3]
    if hooks := [change for change in first if change.startswith(_HOOKS)]:
        return f"its code runs {hooks[0]}; the operator does not"
    return f"its code writes {', '.join(first)}, which outlives the call"


def _has_hooks(layer: Any) -> bool:
    return any(value for name, value in vars(layer).items() if name in OWN and "hooks" in name)


def _list_globals(function: Any, kind: type) -> dict[str, Any]:
    """Return the globals that the code of a function and of a layer's methods names, but for functions, classes and Python
    modules."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    methods = [thing for base in bases for thing in vars(base).values() if isinstance(thing, types.FunctionType)]
    found = {}
    for each in (function, *methods):
        own = getattr(each, "__globals__", {})
        found |= {n: own[n] for n in sorted(collect_words(each)) if n in own and not isinstance(own[n], CODE)}
    return found


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
        own = {name: value for name, value in vars(part).items() if name not in OWN | _SIZES and not name.startswith(VERDICTS)}
        if _has_hooks(part) or part._buffers or not all(map(_is_plain, own.values())):
            return None
        if any(type(p) is not torch.nn.Parameter for p in part._parameters.values() if p is not None):
            return None
        state[path] = type(part), own
    return state


def _is_plain(value: Any) -> bool:
    return all(map(_is_plain, value)) if type(value) in (list, tuple) else isinstance(value, PLAIN)


def _walk(waiting: list[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    seen: dict[int, Any] = {}  # keeps what it has seen, so that no other object gets its id
    while waiting and len(seen) < _MOST:
        path, thing = waiting.pop()
        if isinstance(thing, PLAIN):
            yield path, (type(thing), repr(thing))
        elif isinstance(thing, Tensor) or hasattr(type(thing), "tobytes"):  # also arrays of NumPy and the standard library
            yield path, (id(thing), _read_version(thing))
            seen[id(thing)] = thing
        else:
            yield path, id(thing)
            if id(thing) not in seen:
                seen[id(thing)] = thing
                waiting += _list_parts(path, thing)


def _read_version(thing: Any) -> Any:
    """Return what tells whether a tensor or an array was written to. Small ones may be counters, which `.data` reaches."""
    if not isinstance(thing, Tensor):
        return thing.tobytes() if len(memoryview(thing)) < _SMALL else None
    version = 0 if is_lazy(thing) or thing.is_inference() else thing._version
    is_small = has_numbers(thing) and thing.is_cpu and thing.numel() < _SMALL
    return version, str(thing.tolist()) if is_small else None


def has_numbers(t: Tensor) -> bool:
    """Return whether a tensor may be read."""
    is_dense = t.layout == torch.strided and not t.is_nested and not t.is_quantized and t.device.type != "meta"
    return is_dense and not is_lazy(t)


def _list_parts(path: str, thing: Any) -> list[tuple[str, Any]]:
    """Return what a container or an object holds. Functions, classes, Python modules and objects of torch hold nothing that
    counts."""
    if isinstance(thing, dict):
        if path.endswith(" "):  # globals
            return [(f"{path}{name}", part) for name, part in thing.items()]
        return [(f"{path}[{key!r}]" if isinstance(key, (str, int)) else f"{path}[{id(key)}]", v) for key, v in thing.items()]
    if isinstance(thing, (list, tuple, set, frozenset)) or type(thing).__name__ == "deque":
        return [(f"{path}[{index}]", part) for index, part in enumerate(thing)]
    if isinstance(thing, functools.partial):
        parts = {"func": thing.func, "args": thing.args, "keywords": thing.keywords}
    elif isinstance(thing, torch.nn.Module):
        parts = {
            **{n: v for _, n, v in reversed(list_class_attributes(type(thing)))},
            **vars(thing),
            **thing._parameters,
            **thing._buffers,
            **thing._modules,
        }
        parts = {name: part for name, part in parts.items() if name not in _SKIPPED and not name.startswith(VERDICTS)}
    elif isinstance(thing, types.FunctionType):
        parts = {f"closure{k}": cell.cell_contents for k, cell in enumerate(thing.__closure__ or ()) if _is_filled(cell)}
        parts["defaults"] = thing.__defaults__
    elif isinstance(thing, (types.MethodType, types.BuiltinMethodType)):
        parts = {"self": thing.__self__, "func": getattr(thing, "__func__", None)}
    elif isinstance(thing, CODE) or type(thing).__module__.partition(".")[0] == "torch":
        parts = {}
    else:
        slots = (vars(base).get("__slots__", ()) for base in type(thing).__mro__)
        names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
        parts = {name: getattr(thing, name) for name in names if hasattr(thing, name)} | getattr(thing, "__dict__", {})
    return [(f"{path}.{name}".lstrip("."), part) for name, part in parts.items()]


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def list_class_attributes(kind: type) -> list[tuple[type, str, Any]]:
    """Return what a class and its bases keep beside code: numbers, words, tensors and containers."""
    bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] not in ("torch", "builtins")]
    kept = (*PLAIN, Tensor, list, tuple, dict, set)
    named = [(base, name, value) for base in bases for name, value in vars(base).items() if isinstance(value, kept)]
    return [(base, name, value) for base, name, value in named if not name.startswith("__")]
