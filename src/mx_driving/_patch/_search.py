"""Find the cores of a target and the attention modules around them.

The Python modules of a target are searched; of a known library, also the files whose texts mention a core.
"""

from __future__ import annotations

import importlib
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from .. import compat
from .._operator import rules
from ._attention import has_layers
from ._forms import AUTOGRAD, FUNCTION, MODULE
from ._parameters import Parameters, unwrap
from ._pools import looks_like_a_pool

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
    "birder": "**/*.py",
}
_NOT_MODELS = ("torch", "mx_driving", "builtins")
_ALIASES: dict[str, str] = dict.fromkeys(("mmcv-full", "mmcv-lite", "onedl-mmcv"), "mmcv")
# words in the text of every file with a core, or of every file with an attention module
_MARKS = (("grid_sample", "attention_weights", "sampling"), ("sampling_offsets", "attention_weights"))


class Candidate(NamedTuple):
    """Something that looks like a core, a function around a core, or an attention module."""

    thing: Any
    kind: str
    parameters: Parameters


class Candidates:
    """The cores of a target, the functions that call a core, and its attention modules, by name.

    `unknown` has the reason for each module that cannot be searched.
    """

    def __init__(self, modules: bool) -> None:
        self.turns: tuple[dict[str, Candidate], ...] = ({}, {}, {})
        self.unknown: dict[str, str] = {}
        self.searched: list[types.ModuleType] = []
        self._with_modules = modules

    def __len__(self) -> int:
        return sum(map(len, (*self.turns, self.unknown)))

    def search(self, module: types.ModuleType) -> bool:
        """Add what the Python module defines or imports, and return whether there was something to add."""
        self.searched.append(module)
        return sum(self.consider(thing) for thing in list(vars(module).values())) > 0

    def consider(self, thing: Any) -> bool:
        """Add the thing if it is a core or an attention module, under the name of the module that defines it."""
        thing = unwrap(thing) if isinstance(thing, types.FunctionType) else thing
        candidate = describe(thing)
        if candidate is None:
            return False
        is_core = looks_like_a_core(candidate)
        is_attention = not is_core and self._with_modules and candidate.kind == MODULE and has_layers(thing)
        is_pool = candidate.kind == FUNCTION and looks_like_a_pool(thing.__qualname__)
        if is_core or is_attention:
            self.turns[2 if is_attention else int(is_pool)][f"{thing.__module__}.{thing.__qualname__}"] = candidate
        for name in thing.__code__.co_names if is_core and is_pool else ():
            if isinstance(core := thing.__globals__.get(name), type):  # over an extension, where the function is defined
                self.consider(core)
        return is_core or is_attention


def is_core(thing: Any) -> bool:
    """Return whether something is a core, by its parameters or its name."""
    candidate = describe(unwrap(thing) if isinstance(thing, types.FunctionType) else thing)
    return candidate is not None and looks_like_a_core(candidate)


def _is_for_torch_library(name: str, parameters: Parameters) -> bool:
    """Return whether a function makes the shape of a core's output for `torch.library`, or is its backward."""
    return "grad_output" in parameters.all or name.endswith(("_fake", "_meta", "_abstract"))


def looks_like_a_core(candidate: Candidate) -> bool:
    """Return whether something has the parameters of a core, or the name of a pool."""
    name, parameters = candidate.thing.__qualname__, candidate.parameters
    if candidate.kind == FUNCTION and _is_for_torch_library(candidate.thing.__name__, parameters):
        return False
    names = {name.removesuffix("s") for name in parameters.all}
    if {"sampling_location", "attention_weight"} <= names or {"sampling_location", "weight"} <= names:
        return True
    return looks_like_a_pool(name) and bool(parameters.all)


def describe(thing: Any) -> Candidate | None:
    """Return kind and parameters of what may be a core; None for everything else."""
    if isinstance(thing, types.FunctionType):
        made_by_dynamo = thing.__name__.startswith("torch_dynamo_resume_in")
        return None if made_by_dynamo else Candidate(thing, FUNCTION, Parameters(thing))
    if not isinstance(thing, type) or thing.__module__.partition(".")[0] in ("torch", "mx_driving"):
        return None
    kind = MODULE if issubclass(thing, torch.nn.Module) else AUTOGRAD if issubclass(thing, torch.autograd.Function) else None
    forward = vars(thing).get("forward")
    if kind is None or not isinstance(unwrap(forward), types.FunctionType):
        return None
    return Candidate(thing, kind, Parameters(forward, bound=1))


def find_network(target: Any) -> Any:
    """Return the network that a wrapper calls. RF-DETR's keeps it in `.model.model`, and in `.model.inference_model` the copy
    that predict() calls as soon as there is one."""
    for _ in range(3):
        if isinstance(target, (str, types.ModuleType, torch.nn.Module)) or not hasattr(target, "model"):
            break
        copied = getattr(target, "inference_model", None)
        if isinstance(copied, torch.jit.ScriptModule) or hasattr(copied, "_orig_mod"):
            rules.traced_target(type(target).__name__)
        target = target.model if copied is None else copied
    return target


def find(target: Any, modules: bool) -> Candidates:
    """Return what a target has: a library or module by its name, a Python module, or a model."""
    candidates = Candidates(modules)
    if isinstance(target, torch.nn.Module):
        for name in sorted({base.__module__ for part in target.modules() for base in type(part).__mro__}):
            if name in sys.modules and name.partition(".")[0] not in _NOT_MODELS:
                candidates.search(sys.modules[name])
    elif isinstance(target, types.ModuleType):
        candidates.search(target)
        _search_loaded(target.__name__, candidates)
    elif isinstance(target, str) and all(target.split(".")):
        name = _ALIASES.get(target, target)
        (_search_files if name in _FILES else _search_imported)(name, candidates)
    else:
        rules.patch_target(target)
    return candidates


def find_elsewhere(candidates: Candidates) -> list[str]:
    """Return the modules with a core from which the searched modules import something."""
    things = [thing for module in candidates.searched for thing in vars(module).values()]
    names = {thing.__name__ if isinstance(thing, types.ModuleType) else getattr(thing, "__module__", None) for thing in things}
    others = [sys.modules[name] for name in sorted(n for n in names if isinstance(n, str)) if name in sys.modules]
    outside = [m for m in others if m not in candidates.searched and m.__name__.partition(".")[0] not in _NOT_MODELS]
    return [module.__name__ for module in outside if Candidates(False).search(module)]


def _search_loaded(name: str, candidates: Candidates) -> None:
    """Search the module of a name and its submodules, as far as they are loaded."""
    for loaded in sorted(sys.modules):
        module = sys.modules[loaded]
        if (loaded == name or loaded.startswith(name + ".")) and isinstance(module, types.ModuleType):
            candidates.search(module)


def _search_imported(name: str, candidates: Candidates) -> None:
    """Import a module and search it. Where a library imports its models late, name the modules to import."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
            rules.no_library(name, error.name, sorted(_FILES))
        rules.broken_library(name, error, rules.import_failed(error, compat.NAMES))
    _search_loaded(name, candidates)
    late = [] if len(candidates) else [module for module in _find_in_library(name, "**/*.py") if module not in sys.modules]
    if late:
        candidates.unknown[name] = f"import that of your model first, of {', '.join(late)}"


def _search_files(name: str, candidates: Candidates) -> None:
    """Import and search the modules of a known library whose texts have a mark."""
    for module_name in _find_in_library(name, _FILES[name]):
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # an optional requirement of one model must not stop the others
            reason = rules.import_failed(error, compat.NAMES)
            candidates.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {reason}"
        else:
            if not candidates.search(module):
                candidates.unknown[module_name] = "its text mentions a core, but it has none of a known form"


def _find_in_library(library: str, files: str) -> Iterator[str]:
    spec = importlib.util.find_spec(library)
    if spec is None:
        rules.no_library(library, library, sorted(_FILES))
    return find_marked(map(pathlib.Path, spec.submodule_search_locations or []), files, library)


def find_marked(roots: Iterable[pathlib.Path], files: str, package: str) -> Iterator[str]:
    """Return the names of the modules in folders whose texts have the marks of a core or of an attention module."""
    for root in roots:
        for file in sorted(root.glob(files)):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if any(all(mark in text for mark in marks) for marks in _MARKS):
                yield ".".join([*filter(None, [package]), *file.relative_to(root).with_suffix("").parts])
