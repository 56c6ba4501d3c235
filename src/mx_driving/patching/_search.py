"""Finds the cores of a target and the attention modules around them: in its Python modules, and for a known library in the
files whose texts mention one."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from .. import _checks, compat
from ._attention import ATTENTION_FORMS, LAYERS, Attention
from ._forms import AUTOGRAD, FORMS, FUNCTION, MODULE, Core, Form, parameters_of

# where a library keeps its cores; for other libraries the loaded modules are searched
_FILES = {"transformers": "models/*/modeling_*.py", "mmcv": "ops/multi_scale_deform_attn.py"}
_ALIASES = {"mmcv-full": "mmcv", "mmcv-lite": "mmcv"}
_MARKS = ("grid_sample", "attention_weights", "sampling")  # words in the text of every file with a core


class Found:
    """What a target has, each thing by its name with the forms it may have: cores, and attention modules where they are
    asked for. `unknown` names the things that look like one of them but have no known form, with the reason."""

    def __init__(self, modules: bool) -> None:
        self.cores: dict[str, tuple[list[Core | Form], Any]] = {}
        self.modules: dict[str, tuple[list[Attention], Any]] = {}
        self.unknown: dict[str, str] = {}
        self._wants_modules = modules

    def __len__(self) -> int:
        return len(self.cores) + len(self.modules) + len(self.unknown)

    def look(self, module: types.ModuleType) -> None:
        """Add what the Python module defines or imports."""
        for thing in list(vars(module).values()):
            self.consider(thing)

    def consider(self, thing: Any) -> None:
        """Add the thing if it is a core or an attention module, under the name of the place that defines it."""
        described = _describe(thing)
        if described is None:
            return
        kind, parameters = described
        name = f"{thing.__module__}.{thing.__qualname__}"
        cores = [f for f in FORMS if f.fits(thing.__qualname__, kind, parameters)]
        if cores:
            self.cores[name] = (cores, thing)
        elif {"sampling_locations", "attention_weights"} <= set(parameters):
            self.unknown[name] = f"no known form of a core has the parameters ({', '.join(parameters)})"
        elif kind == MODULE and self._wants_modules and _has_layers(thing):
            self._consider_attention(name, thing, parameters)

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


def _of_model(model: torch.nn.Module, found: Found) -> None:
    names = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    for name in sorted(names):
        if name in sys.modules and name.partition(".")[0] not in ("torch", "mx_driving", "builtins"):
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
            raise type(error)(_checks.rules.import_failed(error, compat.NAMES), name=error.name) from error
        _of_package(name, found)
        return
    for module_name in _marked(name):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # an optional requirement of one model must not stop the others
            reason = _checks.rules.import_failed(error, compat.NAMES)
            found.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {reason}"
            continue
        before = len(found)
        found.look(module)
        if len(found) == before:
            found.unknown[module_name] = "its text mentions a core, but it has none of a known form"


def _marked(library: str) -> Iterator[str]:
    """Names of the library's modules whose texts have the marks of a core."""
    for root in _folders(library):
        for file in sorted(root.glob(_FILES[library])):
            text = file.read_text(encoding="utf-8")
            if all(mark in text for mark in _MARKS):
                yield ".".join([library, *file.relative_to(root).with_suffix("").parts])


def _folders(library: str) -> Iterable[pathlib.Path]:
    spec = importlib.util.find_spec(library)
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError(f"No module named {library!r}", name=library)
    return [pathlib.Path(folder) for folder in spec.submodule_search_locations]
