"""What importing `torch_npu.contrib.transfer_to_npu` does here: the names of CUDA mean the CPU, too."""

from __future__ import annotations

import types
from typing import Any

import torch

from .._replacing import Changes
from . import _amp, _device_module, _devices

_KEPT = {"init", "is_initialized"}  # torch calls these for its own state


def _names() -> list[str]:
    own = [name for name, thing in vars(_device_module).items() if getattr(thing, "__module__", "") == _device_module.__name__]
    return [name for name in (*own, *_device_module.TENSOR_TYPES) if not name.startswith("_") and name not in _KEPT]


def _apart(thing: Any) -> Any:
    """A function of its own for each name: torch.compile has a table of them, and refuses one that is there twice."""
    if not isinstance(thing, types.FunctionType):
        return thing
    return types.FunctionType(thing.__code__, thing.__globals__, thing.__name__, thing.__defaults__, thing.__closure__)


def transfer(changes: Changes) -> None:
    """Let torch.cuda, Tensor.cuda, Tensor.is_cuda, Module.cuda and devices called "cuda" be the stand-in's."""
    _devices.types_that_mean_cpu("npu", "cuda")
    for name in _names():
        if hasattr(torch.cuda, name):
            changes.set(torch.cuda, name, _apart(getattr(_device_module, name)))
    for name in ("autocast", "GradScaler"):
        changes.set(torch.cuda.amp, name, getattr(_amp, name))
    changes.set(torch.Tensor, "cuda", _devices.tensor_npu)
    changes.set(torch.Tensor, "is_cuda", property(lambda self: True))
    changes.set(torch.nn.Module, "cuda", _devices.module_npu)
