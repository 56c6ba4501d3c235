"""Device names that mean the CPU: "npu" and "npu:0", after `transfer_to_npu` also "cuda", wherever torch takes a device.

torch parses a device's name in C++, so each function that takes one is wrapped, as the vendor's own transfer_to_npu does it.
`torch.utils.rename_privateuse1_backend("npu")` would make the name known, but for ever and without kernels, and torch would
take the process for one with an accelerator. A TorchFunctionMode would serve one thread only and slow down every call.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.jit import _builtins
from torch.utils._device import _device_constructors

from .._replacing import Changes

Function = Callable[..., Any]

_Device = torch.device  # before it is replaced
_types = {"npu"}

# of tensors that exist, these may give the tensor itself or its memory; what arrives on a device is a copy
_SHARING = {"as_tensor": {}, "asarray": {"copy": True}}  # without copy, asarray of torch 2.6 ends the tensor's requires_grad
_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "normal")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def types_that_mean_cpu(*names: str) -> None:
    """Set the device types that are taken for the CPU."""
    _types.clear()
    _types.update(names)


def stands_for_cpu(device: Any) -> bool:
    """Whether it is a name, or a device, of one of the types."""
    if isinstance(device, str):
        kind, colon, index = device.partition(":")
        return kind in _types and (not colon or index.isdecimal())
    return type(device) is _Device and device.type in _types


def on_cpu(device: Any) -> Any:
    """The CPU for a device that stands for it; anything else as it is. Names in a dictionary, too (torch.load's)."""
    if isinstance(device, dict):
        return {key: on_cpu(value) for key, value in device.items()}
    return "cpu" if stands_for_cpu(device) else device


def _is_index(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


def mapped(function: Function) -> Function:
    """`function`, with names of devices in its arguments taken for the CPU."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if _is_index(named.get("device")):
            named["device"] = "cpu"
        return function(*[on_cpu(a) for a in args], **{name: on_cpu(a) for name, a in named.items()})

    return call


def _names_device(args: tuple[Any, ...], named: dict[str, Any]) -> bool:
    return any(stands_for_cpu(a) for a in (*args, *named.values())) or _is_index(named.get("device"))


def _sharing(function: Function, **more: Any) -> Function:
    """For a function whose result may share its input's memory. `more`: passed on then."""
    call = mapped(function)

    @functools.wraps(function)
    def copy(*args: Any, **named: Any) -> Any:
        return call(*args, **{**more, **named}).clone() if _names_device(args, named) else call(*args, **named)

    return copy


def _moving(to: Function, copy: Function) -> Function:
    """For `to` of a tensor or a module: a move to the device is a copy, as it is between memories."""
    call = mapped(to)

    @functools.wraps(to)
    def moved(self: Any, *args: Any, **named: Any) -> Any:
        if args and _is_index(args[0]):
            args = ("npu", *args[1:])
        result = call(self, *args, **named)
        return copy(result) if _names_device(args, named) and result is self else result

    return moved


def tensor_npu(self: torch.Tensor, device: Any = None, non_blocking: bool = False) -> torch.Tensor:
    """Tensor.npu: a copy, as of a move between memories. Autograd goes through it."""
    return self.clone()


def module_npu(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """Module.npu: parameters and buffers get memory of their own; the parameters stay the same objects."""
    return self._apply(torch.clone)


def _autocast(start: Function) -> Function:
    """autocast.__init__; its default on the device is float16, on a CPU bfloat16."""
    call = mapped(start)

    @functools.wraps(start)
    def begin(self: Any, device_type: str, dtype: torch.dtype | None = None, *args: Any, **named: Any) -> None:
        if dtype is None and stands_for_cpu(device_type):
            dtype = torch.float16
        call(self, device_type, dtype, *args, **named)

    return begin


def _gloo(start: Function) -> Function:
    """init_process_group and new_group: a backend that needs the device is gloo instead."""

    def on_cpu_backend(name: Any) -> Any:
        wanted = {"hccl"} | ({"nccl"} if "cuda" in _types else set())
        return "gloo" if isinstance(name, str) and any(part.rpartition(":")[2] in wanted for part in name.split(",")) else name

    @functools.wraps(start)
    def begin(*args: Any, **named: Any) -> Any:
        return start(*[on_cpu_backend(a) for a in args], **{name: on_cpu_backend(a) for name, a in named.items()})

    return begin


def _fork_rng(fork: Function) -> Function:
    """torch.random.fork_rng: the CPU's state, which is the device's, is kept whatever the devices are."""

    @functools.wraps(fork)
    def keep(devices: Any = None, enabled: bool = True, *args: Any, **named: Any) -> Any:
        if stands_for_cpu(named.get("device_type")):
            return fork((), enabled)
        return fork(devices, enabled, *args, **named)

    return keep


def _make_device(*args: Any, **named: Any) -> Any:
    """torch.device. An index alone is one of the device, as where torch has an accelerator."""
    first = next(iter((*args, *named.values())), None)
    return _Device("cpu") if stands_for_cpu(first) or _is_index(first) else _Device(*args, **named)


class _Like(type):
    """Of a class that stands for one of torch's that are written in C: called, it makes one; for isinstance it is the class.

    It is equal to the class, too: torch.compile looks classes up in tables, and torch.fx compares them.
    """

    real: type
    make: Function

    def __call__(cls, *args: Any, **named: Any) -> Any:
        return cls.make(*args, **named)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is cls.real

    def __hash__(cls) -> int:
        return hash(cls.real)

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return cls is subclass or issubclass(subclass, cls.real)


def _like(real: type, make: Function) -> _Like:
    own = {"__module__": "torch", "__doc__": real.__doc__, "real": real, "make": staticmethod(make)}
    return _Like(real.__name__, (), own)


def _deserialize(storage: Any, location: str) -> Any:
    """torch.load: a storage that was saved on the device lies on the CPU already."""
    return storage if stands_for_cpu(location) else None


_package = (5, lambda storage: None, _deserialize)  # before torch's own, which begin at 10


_scripted: list[int] = []


def _replace(changes: Changes, owner: Any, name: str, stand_in: Any) -> None:
    """Set an attribute that torch.jit.script compares by identity, and register the new one."""
    operator = _builtins._find_builtin(getattr(owner, name))
    changes.set(owner, name, stand_in)
    if operator is not None:
        _builtins._register_builtin(stand_in, operator)
        _scripted.append(id(stand_in))


def install(changes: Changes) -> None:
    """Wrap what takes a device."""
    constructors = _device_constructors()
    for owner in (torch, torch.fft, torch.nested):
        for name, function in list(vars(owner).items()):
            if isinstance(function, types.BuiltinFunctionType | types.FunctionType) and function in constructors:
                wrapped = _sharing(function, **_SHARING[name]) if name in _SHARING else mapped(function)
                _replace(changes, owner, name, wrapped)
    for name in (*_LIKE, "load", "set_default_device"):
        _replace(changes, torch, name, mapped(getattr(torch, name)))
    for name in _NEW:
        changes.set(torch.Tensor, name, mapped(getattr(torch.Tensor, name)))
    changes.set(torch.Tensor, "to", _moving(torch.Tensor.to, torch.clone))
    changes.set(torch.nn.Module, "to", _moving(torch.nn.Module.to, module_npu))
    changes.set(torch.nn.Module, "to_empty", mapped(torch.nn.Module.to_empty))
    changes.set(torch.autocast, "__init__", _autocast(torch.autocast.__init__))
    changes.set(torch.amp.GradScaler, "__init__", mapped(torch.amp.GradScaler.__init__))
    changes.set(torch.random, "fork_rng", _fork_rng(torch.random.fork_rng))
    if torch.distributed.is_available():
        for name in ("init_process_group", "new_group"):
            changes.set(torch.distributed, name, _gloo(getattr(torch.distributed, name)))
    changes.set(torch.Tensor, "npu", tensor_npu)
    changes.set(torch.nn.Module, "npu", module_npu)
    changes.set(torch.Tensor, "is_npu", property(lambda self: True))
    changes.set(torch.Tensor, "pin_memory", lambda self, device=None: self)
    _replace(changes, torch, "device", _like(_Device, _make_device))
    changes.set(torch, "Generator", _like(torch.Generator, mapped(torch.Generator)))
    torch.serialization._package_registry.insert(0, _package)


def uninstall() -> None:
    """What `Changes` cannot undo."""
    torch.serialization._package_registry.remove(_package)
    while _scripted:
        _builtins._get_builtin_table().pop(_scripted.pop(), None)
