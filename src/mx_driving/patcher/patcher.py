"""The vendor's `Patch`, `Patcher` and `PatcherBuilder`: functions that change modules, called when a `with` block begins."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

__all__ = ["Patch", "Patcher", "PatcherBuilder"]

Function = Callable[[types.ModuleType, dict[str, Any]], Any]


class Patch:
    """A function that changes a module.

    Args:
        func: called with the module and the options. Its name is the patch's name.
        options: for the function.
        priority: patches of a module are applied from the lowest to the highest.
        patch_failure_warning: whether a failure is said in a warning; it never stops the program.
    """

    def __init__(
        self, func: Function, options: dict[str, Any] | None = None, priority: int = 0, patch_failure_warning: bool = True
    ) -> None:
        self.func = func
        self.name = getattr(func, "__name__", type(func).__name__)
        self.options = {} if options is None else options
        self.priority = priority
        self.is_applied = False
        self.patch_failure_warning = patch_failure_warning

    def __lt__(self, other: Patch) -> bool:
        return self.priority < other.priority


class Patcher:
    """What a builder builds. As at the vendor's, patches stay after the `with` block."""

    def __init__(
        self, module_patches: dict[str, list[Patch]], blacklist: set[str], allow_internal_format: bool = False
    ) -> None:
        self.module_patches = module_patches
        self.blacklist = blacklist
        self.allow_internal_format = allow_internal_format  # the vendor's layouts of tensors; not used

    def apply(self) -> None:
        """Import the modules and apply their patches. What cannot be imported or patched is said in a warning."""
        for name, patches in self.module_patches.items():
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                warnings.warn(f"mx_driving.patcher cannot import {name}: {error}", stacklevel=2)
                continue
            for patch in patches:
                if patch.name not in self.blacklist and not patch.is_applied:
                    _apply(patch, module)

    def transfer_to_npu(self) -> None:
        """Let the names of CUDA be the stand-in's for torch_npu; nothing where it is not installed (`compat.install`)."""
        npu = sys.modules.get("mx_driving._vendor.npu")
        if npu is not None and npu.installed():
            importlib.import_module("torch_npu.contrib.transfer_to_npu")

    def __enter__(self) -> Patcher:
        self.transfer_to_npu()
        self.apply()
        return self

    def __exit__(self, *error: Any) -> None:
        pass


def _apply(patch: Patch, module: types.ModuleType) -> None:
    try:
        patch.func(module, patch.options)
        patch.is_applied = True
    except Exception as error:  # a patch that fails must not stop a training, at the vendor's either
        if patch.patch_failure_warning:
            warnings.warn(f"mx_driving.patcher cannot apply {patch.name} to {module.__name__}: {error}", stacklevel=4)


class PatcherBuilder:
    """Collects patches: `PatcherBuilder().add_module_patch("mmcv", Patch(msda)).build()`."""

    def __init__(self) -> None:
        self.module_patches: dict[str, list[Patch]] = {}
        self.blacklist: set[str] = set()

    def add_module_patch(self, module_name: str, *patches: Patch) -> PatcherBuilder:
        """Patches for a module, which is imported when they are applied."""
        self.module_patches.setdefault(module_name, []).extend(patches)
        self.module_patches[module_name].sort()
        return self

    def disable_patches(self, *patch_names: str) -> PatcherBuilder:
        """Leave out patches by name."""
        self.blacklist.update(patch_names)
        return self

    def with_profiling(self, *args: Any, **named: Any) -> PatcherBuilder:
        """Refused: it is a profile of the device."""
        raise NotImplementedError(
            "PatcherBuilder.with_profiling profiles an Ascend device; on a PC, put torch.profiler.profile() around the training"
        )

    def brake_at(self, *args: Any, **named: Any) -> PatcherBuilder:
        """Refused: a stop after a number of steps is the training loop's."""
        raise NotImplementedError(
            "PatcherBuilder.brake_at is not in this package; on a PC, let the training's own configuration say how many steps"
        )

    def build(self, allow_internal_format: bool = False) -> Patcher:
        """A `Patcher`, for a `with` block."""
        return Patcher(self.module_patches, self.blacklist, allow_internal_format)
