"""Finds the cores of a target and the attention modules around them: in its Python modules, and for a known library in the
files whose texts mention one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import _checks, compat
from ._attention import ATTENTION_FORMS, LAYERS, Attention
from ._forms import AUTOGRAD, FORMS, FUNCTION, MODULE, Core, Form, parameters_of
from ._pools import POOLS, Pool

# where a library keeps its cores and attention modules, which it may import late; others are searched for what is loaded
_FILES = {
    "transformers": "models/*/modeling_*.py",
    "mmcv": "ops/multi_scale_deform_attn.py",
    "ultralytics": "nn/modules/*.py",
    "rfdetr": "models/**/*.py",
    "groundingdino": "models/**/*.py",
    "libreyolo": "models/**/*.py",
    "otx": "backend/native/models/**/*.py",
    "dfine_seg": "model/arch/*.py",
}
_NOT_MODELS = ("torch", "mx_driving", "builtins")
_ALIASES = {"mmcv-full": "mmcv", "mmcv-lite": "mmcv"}
# words in the text of every file with a core, or of every file with an attention module
_MARKS = (("grid_sample", "attention_weights", "sampling"), ("sampling_offsets", "attention_weights"))


class Found:
    """What a target has, each thing by its name with the forms it may have: cores, and attention modules where they are
    wanted. `unknown` names the things that look like one of them but have no known form, with the reason."""

    def __init__(self, modules: bool) -> None:
        self.cores: dict[str, tuple[Sequence[Core | Form], Any]] = {}
        self.around: dict[str, tuple[list[Pool], Any]] = {}  # functions that call a core
        self.modules: dict[str, tuple[list[Attention], Any]] = {}
        self.unknown: dict[str, str] = {}
        self.looked: list[types.ModuleType] = []
        self._wants_modules = modules

    def __len__(self) -> int:
        return len(self.cores) + len(self.around) + len(self.modules) + len(self.unknown)

    def look(self, module: types.ModuleType) -> bool:
        """Add what the Python module defines or imports; whether there was something to add."""
        self.looked.append(module)
        return sum(self.consider(thing) for thing in list(vars(module).values())) > 0

    def consider(self, thing: Any) -> bool:
        """Add the thing if it is a core or an attention module, under the name of the place that defines it."""
        described = _describe(thing)
        if described is None:
            return False
        kind, parameters = described
        name = f"{thing.__module__}.{thing.__qualname__}"
        pools = [f for f in POOLS if f.fits(thing.__qualname__, kind, parameters)]
        if pools:
            (self.around if kind == FUNCTION else self.cores)[name] = (pools, thing)
            for used in thing.__code__.co_names if kind == FUNCTION else ():
                if isinstance(core := thing.__globals__.get(used), type):  # over an extension, where the function is defined
                    self.consider(core)
            return True
        cores = [f for f in FORMS if f.fits(thing.__qualname__, kind, parameters)]
        if cores:
            self.cores[name] = (cores, thing)
        elif {"sampling_locations", "attention_weights"} <= set(parameters):
            self.unknown[name] = f"no known form of a core has the parameters ({', '.join(parameters)})"
        elif kind == MODULE and self._wants_modules and _has_layers(thing):
            self._consider_attention(name, thing, parameters)
        else:
            return False
        return True

    def _consider_attention(self, name: str, thing: type, parameters: tuple[str, ...]) -> None:
        forms = [f for f in ATTENTION_FORMS if f.parameters <= set(parameters)]
        if forms:
            self.modules[name] = (forms, thing)
        else:
            self.unknown[name] = f"no known form of an attention module has the parameters ({', '.join(parameters)})"


def _own_forward(thing: type) -> Any:
    """The class's own forward, as it was written: without decorators, or as it was before a patch."""
    forward = inspect.unwrap(vars(thing).get("forward", None) or (lambda: None))
    return inspect.unwrap(forward.__func__) if isinstance(forward, staticmethod) else forward


def _has_layers(thing: type) -> bool:
    """Whether its forward calls the linear layers of deformable attention."""
    return set(_own_forward(thing).__code__.co_names) >= LAYERS


def _describe(thing: Any) -> tuple[str, tuple[str, ...]] | None:
    """Kind and parameters of what may be a core; None for everything else."""
    if isinstance(thing, types.FunctionType):
        return FUNCTION, _parameters(thing)
    if not isinstance(thing, type) or thing.__module__.partition(".")[0] in ("torch", "mx_driving"):
        return None
    kind = MODULE if issubclass(thing, torch.nn.Module) else AUTOGRAD if issubclass(thing, torch.autograd.Function) else None
    if kind is None or not isinstance(_own_forward(thing), types.FunctionType):
        return None
    return kind, _parameters(_own_forward(thing))[1:]


def _parameters(function: types.FunctionType) -> tuple[str, ...]:
    """Names in order. Keyword-only ones get a "*", so that they fit no form."""
    code, names = function.__code__, parameters_of(function)
    keywords = code.co_varnames[len(names) : len(names) + code.co_kwonlyargcount]
    return names + tuple("*" + name for name in keywords)


def find(target: Any, modules: bool) -> Found:
    """What a library or module has, by name, a Python module, or a model; with its attention modules, or its cores alone."""
    found = Found(modules)
    if isinstance(target, torch.nn.Module):
        _of_model(target, found)
    elif isinstance(target, types.ModuleType):
        found.look(target)
        _of_package(target.__name__, found)
    elif isinstance(target, str):
        _of_name(_ALIASES.get(target, target), found)
    else:
        _checks.rules.patch_target(target)
    return found


def elsewhere(found: Found) -> list[str]:
    """The modules with a core, or what looks like one, of those from which the modules that were searched take a thing."""
    things = [thing for module in found.looked for thing in vars(module).values()]
    names = {thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None) for thing in things}
    others = [sys.modules[name] for name in sorted(n for n in names if isinstance(n, str)) if name in sys.modules]
    outside = [m for m in others if m not in found.looked and m.__name__.partition(".")[0] not in _NOT_MODELS]
    return [module.__name__ for module in outside if Found(False).look(module)]


def _of_model(model: torch.nn.Module, found: Found) -> None:
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    for name in sorted(names):
        if name in sys.modules and name.partition(".")[0] not in _NOT_MODELS:
            found.look(sys.modules[name])


def _of_package(name: str, found: Found) -> None:
    """Search the module and its loaded submodules."""
    for loaded in sorted(sys.modules):
        if loaded == name or loaded.startswith(name + "."):
            module = sys.modules[loaded]
            if isinstance(module, types.ModuleType):
                found.look(module)


def _of_name(name: str, found: Found) -> None:
    if name not in _FILES:
        try:
            importlib.import_module(name)
        except ImportError as error:
            _checks.rules.no_library(name, error, _checks.rules.import_failed(error, compat.NAMES))
        _of_package(name, found)
        if not len(found):
            _name_unloaded(name, found)
        return
    for module_name in _marked(name, _FILES[name]):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # an optional requirement of one model must not stop the others
            reason = _checks.rules.import_failed(error, compat.NAMES)
            found.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {reason}"
            continue
        if not found.look(module):
            found.unknown[module_name] = "its text mentions a core, but it has none of a known form"


def _name_unloaded(name: str, found: Found) -> None:
    """A library that imports its modules late: say which of them to import."""
    late = [module for module in _marked(name, "**/*.py") if module not in sys.modules]
    if late:
        found.unknown[name] = f"import that of your model first, of {', '.join(late)}"


def _marked(library: str, files: str) -> Iterator[str]:
    """Names of the library's modules whose texts have the marks of a core or of an attention module."""
    for root in _folders(library):
        for file in sorted(root.glob(files)):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if any(all(mark in text for mark in marks) for marks in _MARKS):
                yield ".".join([library, *file.relative_to(root).with_suffix("").parts])


def _folders(library: str) -> Iterable[pathlib.Path]:
    spec = importlib.util.find_spec(library)
    if spec is None:
        _checks.rules.no_library(library, ModuleNotFoundError(name=library), "")
    return [pathlib.Path(folder) for folder in spec.submodule_search_locations or []]
