"""The vendor's names for patching a model's libraries, except for names that have no meaning without the vendor's device.

`msda` is `mx_driving.patch`; `numpy_type` and `patch_mmcv_version` mend old libraries. Patches that only speed a library
up on the device, and patches that this package lacks, warn and leave the library unchanged. Other names raise an error.

    from mx_driving.patcher import Patch, PatcherBuilder, index, msda

    with PatcherBuilder().add_module_patch("mmcv", Patch(msda)).add_module_patch("torch", Patch(index)).build():
        ...  # train
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import _operator as _operator  # first, because it checks the installation
from .._patch import patch

__all__ = [
    "Patch",
    "Patcher",
    "PatcherBuilder",
    "batch_matmul",
    "dc",
    "ddp",
    "ddp_forward",
    "default_patcher",
    "default_patcher_builder",
    "index",
    "mdc",
    "msda",
    "numpy_type",
    "nuscenes_dataset",
    "nuscenes_metric",
    "nuscenes_mot_metric",
    "optimizer_hooks",
    "optimizer_wrapper",
    "patch_mmcv_version",
    "pseudo_sampler",
    "resnet_add_relu",
    "resnet_fp16",
    "resnet_maxpool",
    "stream",
]

Function = Callable[[types.ModuleType, dict[str, Any]], Any]


class Patch:
    """A function that changes a module.

    Args:
        func: called with the module and the options. Its name is the patch's name.
        options: the function's options.
        priority: patches of a module are applied from the lowest to the highest.
        patch_failure_warning: whether to warn of a failure, which never stops the program.
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


@dataclass(eq=False)
class Patcher:
    """Applies patches at the start of a `with` block. The patches stay after the block, as the vendor's do."""

    module_patches: dict[str, list[Patch]]
    blacklist: set[str]
    allow_internal_format: bool = False  # the vendor's option about memory formats, without effect here

    def apply(self) -> None:
        """Import the modules and apply their patches. Warn of a module that cannot be imported or patched."""
        for name, patches in self.module_patches.items():
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                warnings.warn(f"mx_driving.patcher cannot import {name}: {error}", stacklevel=2)
                continue
            for entry in patches:
                if entry.name in self.blacklist or entry.is_applied:
                    continue
                try:
                    entry.func(module, entry.options)
                    entry.is_applied = True
                except Exception as error:  # a failing patch must not stop training, as in the vendor's package
                    if entry.patch_failure_warning:
                        text = f"mx_driving.patcher cannot apply {entry.name} to {module.__name__}: {error}"
                        warnings.warn(text, stacklevel=3)

    def transfer_to_npu(self) -> None:
        """Redirect torch.cuda to the torch_npu stand-in, if `compat.install` has installed it."""
        npu = sys.modules.get("mx_driving._vendor.npu")
        if npu is not None and npu.installed():
            importlib.import_module("torch_npu.contrib.transfer_to_npu")

    def __enter__(self) -> Patcher:
        self.transfer_to_npu()
        self.apply()
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class PatcherBuilder:
    """Collects patches: `PatcherBuilder().add_module_patch("mmcv", Patch(msda)).build()`."""

    def __init__(self) -> None:
        self.module_patches: dict[str, list[Patch]] = {}
        self.blacklist: set[str] = set()

    def add_module_patch(self, module_name: str, *patches: Patch) -> PatcherBuilder:
        """Add patches for a module, which is imported when they are applied."""
        self.module_patches.setdefault(module_name, []).extend(patches)
        self.module_patches[module_name].sort()
        return self

    def disable_patches(self, *patch_names: str) -> PatcherBuilder:
        """Leave out patches by name."""
        self.blacklist.update(patch_names)
        return self

    def with_profiling(self, *args: Any, **named: Any) -> PatcherBuilder:
        """Raise an error: there is no device to profile. Use torch.profiler."""
        raise NotImplementedError(
            "PatcherBuilder.with_profiling profiles an Ascend device; on a PC, put torch.profiler.profile() around the training"
        )

    def brake_at(self, *args: Any, **named: Any) -> PatcherBuilder:
        """Raise an error: the training loop must stop itself after a number of steps."""
        raise NotImplementedError(
            "PatcherBuilder.brake_at is not in this package; on a PC, let the training's own configuration say how many steps"
        )

    def build(self, allow_internal_format: bool = False) -> Patcher:
        """Return a `Patcher`, for a `with` block."""
        return Patcher(self.module_patches, self.blacklist, allow_internal_format)


def msda(module: types.ModuleType, options: dict[str, Any]) -> None:
    """Call `mx_driving.patch` on the module, so that its sampling calls the operators."""
    patch(module.__name__)


def patch_mmcv_version(expected_version: str) -> None:
    """Set mmcv's version to `expected_version` while mmdet and mmdet3d are imported. Skip libraries that are not installed."""
    try:
        mmcv: Any = importlib.import_module("mmcv")
    except ImportError:
        return
    own, mmcv.__version__ = mmcv.__version__, expected_version
    try:
        for name in ("mmdet", "mmdet3d"):
            importlib.import_module(name)
    except ImportError:
        pass
    finally:
        mmcv.__version__ = own


def numpy_type(np: types.ModuleType, options: dict[str, Any]) -> None:
    """Restore numpy's aliases of Python's types, which numpy 1.24 removed: np.bool, np.int, np.float and the like."""
    for kind in (bool, int, float, complex, object, str):
        if kind.__name__ not in vars(np):
            setattr(np, kind.__name__, kind)


def _leave(name: str, reason: str) -> Function:
    """Return a patch that changes nothing, and warns with a reason when it is applied."""

    def leave(module: types.ModuleType, options: dict[str, Any]) -> None:
        warnings.warn(f"mx_driving.patcher leaves {module.__name__} as it is: {name} {reason}", stacklevel=3)

    leave.__name__ = leave.__qualname__ = name
    return leave


_ABSENT = "is not in this package; the library's own code serves"
_FASTER = "only makes it faster on an Ascend device"
_SEVERAL = "is for several Ascend devices"
ddp = _leave("ddp", _SEVERAL)
ddp_forward = _leave("ddp_forward", _SEVERAL)
stream = _leave("stream", "is for streams of an Ascend device")
dc = _leave("dc", _ABSENT)
mdc = _leave("mdc", _ABSENT)
pseudo_sampler = _leave("pseudo_sampler", _FASTER)
resnet_fp16 = _leave("resnet_fp16", _FASTER)
resnet_add_relu = _leave("resnet_add_relu", _FASTER)
resnet_maxpool = _leave("resnet_maxpool", _FASTER)
nuscenes_dataset = _leave("nuscenes_dataset", _ABSENT)
nuscenes_metric = _leave("nuscenes_metric", _ABSENT)
nuscenes_mot_metric = _leave("nuscenes_mot_metric", _ABSENT)
optimizer_hooks = _leave("optimizer_hooks", _FASTER)
optimizer_wrapper = _leave("optimizer_wrapper", _FASTER)
index = _leave("index", _FASTER)
batch_matmul = _leave("batch_matmul", _FASTER)
# The patches of the vendor's default builder that have an effect here.
default_patcher_builder = (
    PatcherBuilder().add_module_patch("mmcv.ops", Patch(msda)).add_module_patch("numpy", Patch(numpy_type))
)
default_patcher = default_patcher_builder.build()

# The vendor has a module for each library. Make modules of these names: mx_driving.patcher.mmcv and so on.
_MODULES = {
    "distribute": "ddp ddp_forward",
    "functions": "stream",
    "mmcv": "dc mdc msda patch_mmcv_version",
    "mmdet": "pseudo_sampler resnet_add_relu resnet_fp16 resnet_maxpool",
    "mmdet3d": "nuscenes_dataset nuscenes_metric",
    "numpy": "numpy_type",
    "nuscenes": "nuscenes_mot_metric",
    "optimizer": "optimizer_hooks optimizer_wrapper",
    "patcher": "Patch Patcher PatcherBuilder",
    "tensor": "batch_matmul index",
}
for _name, _names in _MODULES.items():
    _module = importlib.util.module_from_spec(importlib.machinery.ModuleSpec(f"{__name__}.{_name}", loader=None))
    vars(_module).update({name: globals()[name] for name in _names.split()}, __all__=_names.split())
    sys.modules[_module.__name__] = globals()[_name] = _module


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"mx_driving.patcher.{name} is the vendor's, for its device; this package has {', '.join(__all__[:3])} "
        "and the patches that the page on the vendor's names lists"
    )
