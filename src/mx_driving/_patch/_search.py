"""Find the cores of a target, the attention modules around them, and the layers of a model that sample.

A core sums weighted samples of maps (_forms.py). A pool sums points into cells (_extensions.py).
`patch` searches the Python modules of its target. If the target is a library in `_FILES`, `patch` imports and searches the
files of that library whose text mentions a core.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import torch

from .. import compat
from .._operator import rules
from ._attention import LINEAR_LAYERS, has_layers
from ._extensions import looks_like_a_pool
from ._forms import AUTOGRAD, FUNCTION, MODULE
from ._parameters import Parameters, collect_words, find_source, is_autograd, unwrap

# The files in which a library keeps its cores and attention modules. The library may import them only on first use.
_FILES = {
    "transformers": "models/*/modeling_*.py",
    "mmcv": "ops/multi_scale_deform_attn.py",
    "ultralytics": "nn/modules/*.py",
    "rfdetr": "models/**/*.py",
    "groundingdino": "models/**/*.py",
    "libreyolo": "models/**/*.py",
    "otx": "backend/native/models/**/*.py",
    "dfine_seg": "model/arch/*.py",
    "birder": "**/*.py",
}
_FUNCTIONS = (types.FunctionType, staticmethod, classmethod)
# The search for a layer's cores follows calls through at most this many functions, the forward included. mmcv has two functions
# between forward and core.
_DEPTH = 4
_NOT_MODELS = ("torch", "mx_driving", "builtins")
_ALIASES: dict[str, str] = dict.fromkeys(("mmcv-full", "mmcv-lite", "onedl-mmcv"), "mmcv")
# Words in the text of every file with a core; words in the text of every file with an attention module.
_MARKS = (("grid_sample", "attention_weights", "sampling"), ("sampling_offsets", "attention_weights"))


class Candidate(NamedTuple):
    """A function, an autograd function or a module class of another library. `parameters` show which forms it may have."""

    original: Any
    kind: str
    parameters: Parameters

    @property
    def name(self) -> str:
        return f"{self.original.__module__}.{self.original.__qualname__}"

    @property
    def function(self) -> Any:
        """The function, or the forward of the class, below its decorators."""
        return unwrap(vars(self.original)["forward"] if isinstance(self.original, type) else self.original)


@dataclass
class Candidates:
    """The candidates of a target.

    Attributes:
        with_modules: whether attention modules are candidates, or cores alone.
        cores, modules: name -> candidate.
        pools: the same for functions that sum points into cells.
        unknown: name of a Python module in which no candidate was found -> the reason.
        searched: the Python modules that were searched.
    """

    with_modules: bool
    cores: dict[str, Candidate] = field(default_factory=dict)
    pools: dict[str, Candidate] = field(default_factory=dict)
    modules: dict[str, Candidate] = field(default_factory=dict)
    unknown: dict[str, str] = field(default_factory=dict)
    searched: list[types.ModuleType] = field(default_factory=list)

    def search(self, module: types.ModuleType) -> bool:
        """Add the candidates that a Python module defines or imports. Return whether there are any."""
        self.searched.append(module)
        return sum(self.consider(member) for member in list(vars(module).values())) > 0

    def consider(self, member: Any) -> bool:
        """Add a member of a Python module if it is a candidate. Return whether it is a candidate."""
        candidate = describe(member)
        if candidate is None:
            return False
        original, kind = candidate.original, candidate.kind
        is_pool = kind == FUNCTION and looks_like_a_pool(original.__qualname__)
        if _looks_like_a_core(candidate):
            (self.pools if is_pool else self.cores)[candidate.name] = candidate
        elif self.with_modules and kind == MODULE and has_layers(original):
            self.modules[candidate.name] = candidate
        else:
            return False
        for name in original.__code__.co_names if is_pool else ():
            # Consider the autograd function that the pool calls: perhaps only the pool's module imports it.
            if isinstance(core := original.__globals__.get(name), type):
                self.consider(core)
        return True


def is_core(member: Any) -> bool:
    """Return whether a function or class has the parameters of a core, or the name of a pool."""
    candidate = describe(member)
    return candidate is not None and _looks_like_a_core(candidate)


def _looks_like_a_core(candidate: Candidate) -> bool:
    """Return whether a candidate has the parameters of a core, or the name of a pool."""
    name, parameters = candidate.original.__qualname__, candidate.parameters
    if candidate.kind == FUNCTION:
        # Skip a core's backward, and a fake implementation for `torch.library` (shapes only).
        is_fake = candidate.original.__name__.endswith(("_fake", "_meta", "_abstract"))
        if is_fake or "grad_output" in parameters.all:
            return False
    names = {name.removesuffix("s") for name in parameters.all}
    if {"sampling_location", "attention_weight"} <= names or {"sampling_location", "weight"} <= names:
        return True
    return looks_like_a_pool(name) and bool(parameters.all)


def describe(member: Any) -> Candidate | None:
    """Return a function below its decorators, or a class with a forward, as a candidate; None for all other objects."""
    if isinstance(member, types.FunctionType):
        function = unwrap(member)
        is_made_by_dynamo = member.__name__.startswith("torch_dynamo_resume_in")
        if is_made_by_dynamo or not isinstance(function, types.FunctionType):  # such as a wrapper of torch.softmax
            return None
        return Candidate(function, FUNCTION, Parameters(function))
    if not isinstance(member, type) or member.__module__.partition(".")[0] in ("torch", "mx_driving"):
        return None
    kind = MODULE if issubclass(member, torch.nn.Module) else AUTOGRAD if is_autograd(member) else None
    forward = vars(member).get("forward")
    if kind is None or not isinstance(unwrap(forward), types.FunctionType):
        return None
    return Candidate(member, kind, Parameters(forward, bound=1))


def find_network(target: Any) -> Any:
    """Return the network that a wrapper calls.

    RF-DETR's wrapper keeps its network in `.model.model`, and a copy of it in `.model.inference_model`. If there is a copy,
    predict() calls the copy.
    """
    for _ in range(3):
        if isinstance(target, (str, types.ModuleType, torch.nn.Module)) or not hasattr(target, "model"):
            break
        copied = getattr(target, "inference_model", None)
        if isinstance(copied, torch.jit.ScriptModule) or hasattr(copied, "_orig_mod"):
            rule = "call a network whose code can be replaced; call patch before the network is traced or compiled"
            rules.fail(ValueError, "target", rule, f"a {type(target).__name__} that calls a traced or compiled copy")
        target = target.model if copied is None else copied
    return target


def find(target: Any, with_modules: bool) -> Candidates:
    """Return the candidates of a target: a Python module, a model, or the name of a library or module.

    If the name is in `_FILES`, import and search the modules of the library whose text has all words of one of `_MARKS`. Else
    import and search the module. If it has no candidates, `unknown` names its submodules that are not imported yet.
    """
    candidates = Candidates(with_modules)
    if isinstance(target, torch.nn.Module):
        for name in sorted({base.__module__ for part in target.modules() for base in type(part).__mro__}):
            if name in sys.modules and name.partition(".")[0] not in _NOT_MODELS:
                candidates.search(sys.modules[name])
    elif isinstance(target, types.ModuleType):
        candidates.search(target)
        _search_loaded(target.__name__, candidates)
    elif isinstance(target, str) and all(target.split(".")):
        name = _ALIASES.get(target, target)
        for module_name in _find_in_library(name, _FILES[name]) if name in _FILES else ():
            try:
                module = importlib.import_module(module_name)
            except Exception as error:  # A missing requirement of one model must not stop the others.
                reason = f"it cannot be imported: {type(error).__name__}: {_explain_import(error)}"
                candidates.unknown[module_name] = reason
            else:
                if not candidates.search(module):
                    candidates.unknown[module_name] = "its text mentions a core, but it has none of a known form"
        if name not in _FILES:
            try:
                importlib.import_module(name)
            except ImportError as error:
                if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                    similar = difflib.get_close_matches(name, _FILES, n=1)
                    remark = f"; is it {similar[0]!r}?" if similar else ""
                    remark += f" Libraries that are known by name: {', '.join(sorted(_FILES))}"
                    _fail_without(name, error.name, remark)
                sentence = f"target must be imported without an error; got {name!r}: {_explain_import(error)}"
                raise type(error)(sentence, name=error.name) from error
            _search_loaded(name, candidates)
            if not (candidates.cores or candidates.pools or candidates.modules):
                late = [module for module in _find_in_library(name, "**/*.py") if module not in sys.modules]
                if late:
                    candidates.unknown[name] = f"import that of your model first, of {', '.join(late)}"
    else:
        fact = repr(target) if isinstance(target, str) else type(target).__name__
        rules.fail(TypeError, "target", "be a library's name, a module or a torch.nn.Module", fact)
    return candidates


def find_elsewhere(candidates: Candidates) -> list[str]:
    """Return the names of modules that have a core, that were not searched, and that a searched module imports from."""
    members = [member for module in candidates.searched for member in vars(module).values()]
    names = {m.__name__ if isinstance(m, types.ModuleType) else getattr(m, "__module__", None) for m in members}
    others = [sys.modules[name] for name in sorted(n for n in names if isinstance(n, str)) if name in sys.modules]
    outside = [m for m in others if m not in candidates.searched and m.__name__.partition(".")[0] not in _NOT_MODELS]
    return [module.__name__ for module in outside if Candidates(False).search(module)]


def _search_loaded(name: str, candidates: Candidates) -> None:
    """Search a module and its submodules, as far as they are loaded."""
    for loaded in sorted(sys.modules):
        module = sys.modules[loaded]
        if (loaded == name or loaded.startswith(name + ".")) and isinstance(module, types.ModuleType):
            candidates.search(module)


def _explain_import(error: Exception) -> str:
    """Return why an import failed. Advise compat.install() if compat replaces the missing extension.

    Read the extension's name from the message: before Python 3.12 an ImportError has no attribute for it.
    """
    missing = isinstance(error, ImportError) and any(name in str(error) for name in compat.NAMES)
    return f"{error}; call mx_driving.compat.install() first, which stands in for it" if missing else str(error)


def _fail_without(name: str, missing: str | None, remark: str = "") -> NoReturn:
    raise ModuleNotFoundError(f"target must be installed; got {name!r}, which is not{remark}", name=missing)


def _find_in_library(library: str, files: str) -> Iterator[str]:
    spec = importlib.util.find_spec(library)
    if spec is None:
        _fail_without(library, library)
    return find_marked(map(pathlib.Path, spec.submodule_search_locations or []), files, library)


def find_marked(roots: Iterable[pathlib.Path], files: str, package: str) -> Iterator[str]:
    """Yield the names of the modules in these folders whose text has all words of one of `_MARKS`."""
    for root in roots:
        for file in sorted(root.glob(files)):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if any(all(mark in text for mark in marks) for marks in _MARKS):
                yield ".".join([*filter(None, [package]), *file.relative_to(root).with_suffix("").parts])


def find_layers(model: torch.nn.Module, is_served: Callable[[Any, Any], bool]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the layers that call an operator now, and of those that sample by their own code.

    Args:
        is_served: takes a function or class, and a layer or None. Says whether the function or class is replaced, and
            answers the layer's call by an operator.

    A layer calls an operator if its forward is replaced and serves the layer, or if all cores that it calls are replaced.
    Layers inside a layer that samples are not counted.
    """
    served: list[str] = []
    others: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(f"{layer}." if layer else "") for layer in (*served, *others)):
            continue
        cores, functions = _search_layer(module, {**vars(module), **dict(module.named_children())})
        # On a CPU a layer calls its cores in plain torch, if it has such cores.
        plain = [core for core in cores if not is_autograd(core)]
        cores = cores if not plain or any(p.is_cuda for p in module.parameters()) else plain
        served_cores = [
            any(is_served(f, core) for f in _search_layer(core, {})[1])
            if isinstance(core, torch.nn.Module)
            else is_served(core, None)
            for core in cores
        ]
        if any(is_served(f, module) for f in functions) or (cores and all(served_cores)):
            served.append(name)
        elif cores or is_core(type(module)) or all(hasattr(module, layer) for layer in LINEAR_LAYERS):
            others.append(name)
    return tuple(served), tuple(others)


def _search_layer(layer: Any, attributes: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Search the forward of a layer (`_search`). The forward may be an attribute of the layer itself, such as a wrapper."""
    forward = layer.__dict__.get("forward", inspect.getattr_static(type(layer), "forward"))
    return _search(list(_list_callables(forward)), type(layer), attributes)


def _list_callables(function: Any) -> Iterator[Any]:
    """Yield a function, and the functions that it holds: below decorators, in partial objects, defaults, closures and the
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
        if unwrap(member) is not member:  # Skip the `__wrapped__` of a replaced function: its original.
            waiting.append(getattr(member, "__wrapped__", None))


def _list_contents(function: Any) -> Iterator[Any]:
    """Yield the contents of a function's closure."""
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
    """Return the cores whose names are in the code of functions (`members`), and the functions that were read.

    A name in the code may be a global, a member of a Python module among the globals, or an attribute of the layer. These
    objects may hold further functions, which are also read. The name `forward` alone, without super() or a class, is the
    forward of another layer. `attributes`: the attributes of the layer.
    """
    cores: list[Any] = []
    read: dict[int, Any] = {}
    for _ in range(_DEPTH):
        functions = [unwrap(member) for member in members if isinstance(member, _FUNCTIONS)]
        functions = [f for f in functions if id(f) not in read and str(f.__module__).partition(".")[0] != "torch"]
        read |= {id(f): f for f in functions}
        named: list[Any] = []
        for function in functions:
            names, own = collect_words(function), getattr(find_source(function), "__globals__", {})
            spaces = [own, attributes, *(vars(own[name]) for name in names if isinstance(own.get(name), types.ModuleType))]
            held = [*_list_contents(function)]
            calls_base = "super" in names or any(b.__name__ in names or any(b is o for o in held) for b in kind.__mro__)
            found = [space[name] for name in names for space in spaces if name in space]
            for base in kind.__mro__:  # Search the bases, too: `super()` may call an overridden method.
                found += [vars(base)[n] for n in names & vars(base).keys() if n != "forward" or calls_base]
            for member in found:
                bound = member.__self__ if isinstance(member, (types.MethodType, types.BuiltinMethodType)) else None
                if isinstance(bound, type):  # the `apply` of an autograd function
                    named.append(bound)
                elif isinstance(member, (type, torch.nn.Module)):
                    named.append(member)
                else:
                    named += map(unwrap, _list_callables(member))
        cores += [member for member in named if is_core(type(member) if isinstance(member, torch.nn.Module) else member)]
        members = [member for member in named if not isinstance(member, torch.nn.Module) and not is_core(member)]
    return cores, list(read.values())
