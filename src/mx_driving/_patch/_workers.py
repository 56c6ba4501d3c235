"""Patch a model again in a worker process to which multiprocessing sends it.

A worker that is spawned imports the model's file anew, so the file has its own code there. The pickle of multiprocessing,
torch.multiprocessing and DataLoader takes reducers by type. A layer's reducer lets the worker patch the layer's module first.
Other pickles (torch.save, cloudpickle) are as without `patch`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch


def patch_in_workers(kinds: Iterable[type], modules: bool, forms: Mapping[Any, str]) -> None:
    """Let workers that get a layer of one of these classes call `patch` with these options, as long as the class is patched."""
    for kind in kinds:
        names = tuple(dict.fromkeys(base.__module__ for base in kind.__mro__ if _is_of_a_library(base)))

        def reduce(layer: Any, names: tuple[str, ...] = names) -> Any:
            from ._patch import is_layer_replaced

            make, arguments, *state = layer.__reduce_ex__(2)
            if not is_layer_replaced(layer):
                return make, arguments, *state
            return make_patched, (make, arguments, names, modules, dict(forms)), *state

        ForkingPickler.register(kind, reduce)


def _is_of_a_library(kind: type) -> bool:
    return issubclass(kind, torch.nn.Module) and kind.__module__.partition(".")[0] != "torch"


def make_patched(make: Any, arguments: Any, names: Iterable[str], modules: bool, forms: Mapping[Any, str]) -> Any:
    """Return what `make` makes, after a patch of the modules with these names. The first layer of a model patches them all."""
    from ._patch import is_layer_replaced, patch

    layer = make(*arguments)
    if not is_layer_replaced(layer):
        for name in names:
            patch(importlib.import_module(name), modules=modules, forms=forms)
    return layer
