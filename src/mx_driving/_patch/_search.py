"""Find the cores of a target and the attention modules around them.

A core sums weighted samples of maps (_forms.py). A pool sums points into cells (_pools.py).
`patch` searches the Python modules of its target. If the target is a library in `_FILES`, `patch` imports and searches the
files of that library whose text mentions a core.
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
from ._extensions import looks_like_a_pool
from ._forms import AUTOGRAD, FUNCTION, MODULE
from ._parameters import Parameters, unwrap

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
_NOT_MODELS = ("torch", "mx_driving", "builtins")
_ALIASES: dict[str, str] = dict.fromkeys(("mmcv-full", "mmcv-lite", "onedl-mmcv"), "mmcv")
# Words in the text of every file with a core; words in the text of every file with an attention module.
_MARKS = (("grid_sample", "attention_weights", "sampling"), ("sampling_offsets", "attention_weights"))


class Candidate(NamedTuple):
    """A function, an autograd function or a module class of another library, with the parameters that tell what it may be."""

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


class Candidates:
    """The candidates of a target.

    Attributes:
        cores, modules: name -> candidate.
        pools: the same for functions that sum points into cells.
        unknown: name of a Python module that cannot be searched -> the reason.
        searched: the Python modules that were searched.
    """

    def __init__(self, with_modules: bool) -> None:
        self.cores: dict[str, Candidate] = {}
        self.pools: dict[str, Candidate] = {}
        self.modules: dict[str, Candidate] = {}
        self.unknown: dict[str, str] = {}
        self.searched: list[types.ModuleType] = []
        self._with_modules = with_modules

    def __len__(self) -> int:
        return sum(map(len, (self.cores, self.pools, self.modules, self.unknown)))

    def search(self, module: types.ModuleType) -> bool:
        """Add the candidates that a Python module defines or imports. Return whether it has any."""
        self.searched.append(module)
        return sum(self.consider(member) for member in list(vars(module).values())) > 0

    def consider(self, member: Any) -> bool:
        """Add a member of a Python module if it is a candidate. Return whether it is."""
        candidate = describe(member)
        if candidate is None:
            return False
        original, kind = candidate.original, candidate.kind
        is_pool = kind == FUNCTION and looks_like_a_pool(original.__qualname__)
        if _looks_like_a_core(candidate):
            (self.pools if is_pool else self.cores)[candidate.name] = candidate
        elif self._with_modules and kind == MODULE and has_layers(original):
            self.modules[candidate.name] = candidate
        else:
            return False
        for name in original.__code__.co_names if is_pool else ():
            # Consider the autograd function that the pool calls: perhaps only the pool's module imports it.
            if isinstance(core := original.__globals__.get(name), type):
                self.consider(core)
        return True


def is_core(member: Any) -> bool:
    """Return whether a function or class is a core, by its parameters or its name."""
    candidate = describe(member)
    return candidate is not None and _looks_like_a_core(candidate)


def _looks_like_a_core(candidate: Candidate) -> bool:
    """Return whether a candidate has the parameters of a core, or the name of a pool."""
    name, parameters = candidate.original.__qualname__, candidate.parameters
    if candidate.kind == FUNCTION:
        # the backward of a core, or a fake implementation for `torch.library` (shapes only)
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
    kind = MODULE if issubclass(member, torch.nn.Module) else AUTOGRAD if issubclass(member, torch.autograd.Function) else None
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
            rules.traced_target(type(target).__name__)
        target = target.model if copied is None else copied
    return target


def find(target: Any, with_modules: bool) -> Candidates:
    """Return the candidates of a target: a Python module, a model, or the name of a library or module.

    Of a library of `_FILES`, import and search the modules whose text has all words of one of `_MARKS`. Import any other
    module; if it has no candidates, `unknown` lists its submodules that are not imported yet.
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
                reason = rules.import_failed(error, compat.NAMES)
                candidates.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {reason}"
            else:
                if not candidates.search(module):
                    candidates.unknown[module_name] = "its text mentions a core, but it has none of a known form"
        if name not in _FILES:
            try:
                importlib.import_module(name)
            except ImportError as error:
                if isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}."):
                    rules.no_library(name, error.name, sorted(_FILES))
                rules.broken_library(name, error, rules.import_failed(error, compat.NAMES))
            _search_loaded(name, candidates)
            if not len(candidates):
                late = [module for module in _find_in_library(name, "**/*.py") if module not in sys.modules]
                if late:
                    candidates.unknown[name] = f"import that of your model first, of {', '.join(late)}"
    else:
        rules.patch_target(target)
    return candidates


def find_elsewhere(candidates: Candidates) -> list[str]:
    """Return the other modules that have a core and from which the searched modules import something."""
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


def _find_in_library(library: str, files: str) -> Iterator[str]:
    spec = importlib.util.find_spec(library)
    if spec is None:
        rules.no_library(library, library, sorted(_FILES))
    return find_marked(map(pathlib.Path, spec.submodule_search_locations or []), files, library)


def find_marked(roots: Iterable[pathlib.Path], files: str, package: str) -> Iterator[str]:
    """Search folders for modules whose text has all words of one of `_MARKS`. Return the names of these modules."""
    for root in roots:
        for file in sorted(root.glob(files)):
            text = file.read_text(encoding="utf-8", errors="ignore")
            if any(all(mark in text for mark in marks) for marks in _MARKS):
                yield ".".join([*filter(None, [package]), *file.relative_to(root).with_suffix("").parts])
