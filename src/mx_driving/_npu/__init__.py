"""A stand-in for `torch_npu`, so that code for an Ascend device runs on a CPU: `mx_driving.compat.install("torch_npu")`."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any

import torch

from .._checks.rules import fail
from .._replacing import Changes, MadeModules
from . import _amp, _device_module, _devices, _optim, _testing, _transfer, _utils

_CONTENTS: dict[str, types.ModuleType | None] = {
    "torch_npu": None,
    "torch_npu.contrib": None,
    "torch_npu.contrib.transfer_to_npu": None,
    "torch_npu.npu": _device_module,
    "torch_npu.npu.amp": _amp,
    "torch_npu.npu.utils": _utils,
    "torch_npu.optim": _optim,
    "torch_npu.testing": None,
    "torch_npu.testing.testcase": _testing,
}
_SUBMODULES = ("npu", "npu.amp", "npu.utils", "optim", "contrib")  # that `import torch_npu` alone brings

_replaced = Changes()


def _missing(name: str) -> str:
    return f"{name} runs on an Ascend device; mx_driving.compat's stand-in for torch_npu has no such thing for a CPU"


def _refuse(module: str) -> Any:
    """A module's __getattr__: names that the stand-in has not are refused in a sentence."""

    def get(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(_missing(f"{module}.{name}"))

    return get


def _contents(name: str) -> dict[str, Any] | None:
    """Of a module. Those of torch_npu that the stand-in has not are refused."""
    if name.partition(".")[0] != "torch_npu":
        return None
    if name not in _CONTENTS:  # under another name, or `from torch_npu import x` would swallow the sentence
        raise ModuleNotFoundError(_missing(name), name="torch_npu")
    things = {key: thing for key, thing in vars(_CONTENTS[name] or object).items() if not key.startswith("__")}
    if name == "torch_npu":
        things["__version__"] = f"{torch.__version__.partition('+')[0]}+mx_driving"
    return {**things, "__getattr__": _refuse(name)}


class _Modules(MadeModules):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ == "torch_npu.contrib.transfer_to_npu":
            _transfer.transfer(_replaced)


_modules = _Modules(_contents, packages=True)


def _real() -> str | None:
    """Where a torch_npu that is not ours lies."""
    if installed():
        return None
    loaded = sys.modules.get("torch_npu")
    spec = importlib.util.find_spec("torch_npu") if loaded is None else loaded.__spec__
    return None if spec is None else str(spec.origin)


def installed() -> bool:
    """Whether the stand-in is there."""
    return _modules.installed


def install() -> None:
    """Let `import torch_npu` give the stand-in, and torch know its device. A second call does nothing."""
    where = _real()
    if where is not None:
        fail(RuntimeError, "torch_npu", "not be installed where mx_driving.compat stands in for it", where)
    if installed():
        return
    if hasattr(torch, "npu"):
        fail(RuntimeError, "torch", "have no module npu where mx_driving.compat stands in for it", vars(torch)["npu"])
    _modules.install(first=True)
    for name in _SUBMODULES:
        importlib.import_module(f"torch_npu.{name}")
    _replaced.set(torch, "npu", sys.modules["torch_npu.npu"])
    for name in ("", ".amp"):
        sys.modules[f"torch.npu{name}"] = sys.modules[f"torch_npu.npu{name}"]
    _devices.install(_replaced)


def uninstall() -> None:
    """Undo `install` and `transfer_to_npu`. Code that holds a name of the stand-in keeps it."""
    if not installed():
        return
    _modules.uninstall()
    _replaced.undo()
    _devices.uninstall()
    _devices.types_that_mean_cpu("npu")
