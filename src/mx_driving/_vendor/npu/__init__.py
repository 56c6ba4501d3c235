"""A stand-in for `torch_npu`, so that code for an Ascend device runs on a CPU: `mx_driving.compat.install("torch_npu")`."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch

from ..._operator.rules import fail
from ..._replacing import Changes, MadeModules
from . import _device_module, _devices, _testing

_CONTENTS: dict[str, Mapping[str, Any]] = {
    "torch_npu": {"__version__": f"{torch.__version__.partition('+')[0]}+mx_driving"},
    "torch_npu.contrib": {},
    "torch_npu.contrib.transfer_to_npu": {},
    "torch_npu.npu": _device_module.NPU,
    "torch_npu.npu.amp": _device_module.AMP,
    "torch_npu.npu.utils": _device_module.UTILS,
    "torch_npu.optim": _device_module.OPTIM,
    "torch_npu.testing": {},
    "torch_npu.testing.testcase": vars(_testing),
}
_SUBMODULES = ("npu", "npu.amp", "npu.utils", "optim", "contrib")  # imported by `import torch_npu`

_changes = Changes()


def _refusal(name: str) -> str:
    return f"{name} runs on an Ascend device; mx_driving.compat's stand-in for torch_npu has no such thing for a CPU"


def _contents(name: str) -> dict[str, Any] | None:
    """Return the contents of a module of the stand-in. A missing name of torch_npu raises an error with a sentence."""
    if name.partition(".")[0] != "torch_npu":
        return None
    if name not in _CONTENTS:  # Python ignores the error of `from torch_npu import x` if its name is torch_npu.x
        raise ModuleNotFoundError(_refusal(name), name="torch_npu")

    def refuse(attribute: str) -> Any:
        raise AttributeError(attribute if attribute.startswith("__") else _refusal(f"{name}.{attribute}"))

    names = {key: value for key, value in _CONTENTS[name].items() if key == "__version__" or not key.startswith("__")}
    return {**names, "__getattr__": refuse}


class _StandInModules(MadeModules):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "torch_npu.contrib.transfer_to_npu":
            _devices.transfer(_changes)


_finder = _StandInModules(_contents, packages=True)


def installed() -> bool:
    """Return whether the stand-in is installed."""
    return _finder.installed


def install() -> None:
    """Make `import torch_npu` import the stand-in, and make torch accept its device. A second call does nothing."""
    if installed():
        return
    loaded = sys.modules.get("torch_npu")
    spec = importlib.util.find_spec("torch_npu") if loaded is None else loaded.__spec__
    if spec is not None:
        fail(RuntimeError, "torch_npu", "not be installed where mx_driving.compat stands in for it", spec.origin)
    if hasattr(torch, "npu"):
        fail(RuntimeError, "torch", "have no module npu where mx_driving.compat stands in for it", vars(torch)["npu"])
    _finder.install(first=True)
    for name in _SUBMODULES:
        importlib.import_module(f"torch_npu.{name}")
    _changes.set(torch, "npu", sys.modules["torch_npu.npu"])
    for name in ("", ".amp"):
        sys.modules[f"torch.npu{name}"] = sys.modules[f"torch_npu.npu{name}"]
    _devices.install(_changes)


def uninstall() -> None:
    """Undo `install` and `transfer_to_npu`. References that callers hold stay."""
    if installed():
        _finder.uninstall()
        _changes.undo()
        _devices.uninstall()
