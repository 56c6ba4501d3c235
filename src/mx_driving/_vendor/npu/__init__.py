"""A stand-in for `torch_npu`, so that code for an Ascend device runs on a CPU: `mx_driving.compat.install("torch_npu")`.

Device names mean the CPU wherever torch takes a device: "npu" and "npu:0", after `transfer_to_npu` also "cuda".
torch parses a device's name in C++. So wrap every function that takes a device, as the vendor's own transfer_to_npu does.
`torch.utils.rename_privateuse1_backend("npu")` would make the name known, but it cannot be undone, brings no kernels, and lets
torch report an accelerator. A TorchFunctionMode would serve one thread only and slow down every call.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ... import _torch_private
from ..._operator.rules import fail
from ..._replacing import Changes, MadeModules
from . import _device_module, _testing

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
Function = Callable[..., Any]

_Device = torch.device  # torch's own class, which `install` replaces by a proxy
_types = {"npu"}
_scripted: list[int] = []  # ids of the wrappers that are registered with torch.jit.script

_LIKE = ("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like", "normal")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")
_AUTOCAST = ("is_autocast_enabled", "get_autocast_dtype", "set_autocast_enabled", "set_autocast_dtype")


def stands_for_cpu(device: Any) -> bool:
    """Return whether `device`, a torch.device or a name, has a type that means the CPU, such as "npu"."""
    if isinstance(device, str):
        kind, colon, index = device.partition(":")
        return kind in _types and (not colon or index.isdecimal())
    return type(device) is _Device and device.type in _types


def to_cpu(device: Any) -> Any:
    """Return "cpu" for a device that stands for the CPU. Return other objects unchanged. torch.load takes a dictionary of
    devices: convert its values."""
    if isinstance(device, dict):
        return {key: to_cpu(value) for key, value in device.items()}
    return "cpu" if stands_for_cpu(device) else device


def _is_index(device: Any) -> bool:
    return isinstance(device, int) and not isinstance(device, bool)


def map_devices(function: Function, copy: Function | None = None) -> Function:
    """Wrap `function`: replace device arguments that stand for the CPU by "cpu".

    Args:
        copy: a function that copies the result if an argument stands for the CPU, because a move to a device makes a copy.
    """

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        if copy is not None and len(args) > 1 and _is_index(args[1]):
            args = (args[0], "npu", *args[2:])
        if _is_index(named.get("device")):
            named["device"] = "npu"
        result = function(*[to_cpu(a) for a in args], **{name: to_cpu(a) for name, a in named.items()})
        return copy(result) if copy is not None and any(map(stands_for_cpu, (*args, *named.values()))) else result

    return call


def _rewrite_arguments(function: Function, rewrite: Callable[[dict[str, Any]], None]) -> Function:
    """Wrap `function`: before a call, `rewrite` changes the arguments, a dictionary name -> argument, in place."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        bound = signature.bind(*args, **named)
        rewrite(bound.arguments)
        return function(*bound.args, **bound.kwargs)

    return call


def _leave_out_devices(arguments: dict[str, Any]) -> None:
    """Remove device arguments that mean the CPU. Replace a distributed backend that needs the device, such as hccl, by gloo."""
    for name in {"device_ids", "output_device", "device_id"} & arguments.keys():
        devices = arguments[name] if isinstance(arguments[name], (list, tuple)) else [arguments[name]]
        if all(_is_index(d) or stands_for_cpu(d) or str(d) == "cpu" for d in devices):
            del arguments[name]
    backends = {"hccl"} | ({"nccl"} if "cuda" in _types else set())
    backend = arguments.get("backend")
    if isinstance(backend, str) and any(part.rpartition(":")[2] in backends for part in backend.split(",")):
        arguments["backend"] = "gloo"


def _choose_float16(arguments: dict[str, Any]) -> None:
    """Make float16 the default dtype of torch.autocast, as on the device. The CPU's default is bfloat16."""
    if stands_for_cpu(arguments["device_type"]):
        arguments.update(device_type="cpu", dtype=arguments.get("dtype") or torch.float16)


def _fork_cpu(arguments: dict[str, Any]) -> None:
    """Let torch.random.fork_rng keep only the CPU's state, because the device's state is the CPU's."""
    if stands_for_cpu(arguments.get("device_type")):
        arguments.update(devices=(), device_type="cpu")


def _set_no_default(arguments: dict[str, Any]) -> None:
    """Replace a default device that means the CPU by None. For every default but None, torch enters a mode, under which
    torch.compile cannot trace our wrappers."""
    device = arguments["device"]
    arguments["device"] = None if _is_index(device) or str(to_cpu(device)) == "cpu" else device


def module_npu(self: torch.nn.Module, device: Any = None) -> torch.nn.Module:
    """Copy the memory of parameters and buffers. The parameters stay the same objects. This is Module.npu."""
    return self._apply(torch.clone)


def _data_parallel(self: Any, module: torch.nn.Module, *args: Any, **named: Any) -> None:
    """Initialize a DataParallel without devices, so that its forward calls the module."""
    torch.nn.Module.__init__(self)
    self.module, self.device_ids = module, []


def _call_module(module: Any, inputs: Any, *args: Any, module_kwargs: Any = None, **named: Any) -> Any:
    """Call the module on one device. This replaces torch.nn.parallel.data_parallel."""
    return module(*(inputs if isinstance(inputs, tuple) else (inputs,)), **(module_kwargs or {}))


def _make_device(*args: Any, **named: Any) -> Any:
    """Make a torch.device. Return the CPU for a name such as "npu", and for an index alone, which names an accelerator."""
    first = next(iter((*args, *named.values())), None)
    return _Device("cpu") if stands_for_cpu(first) or _is_index(first) else _Device(*args, **named)


class _Proxy(type):
    """Metaclass of a proxy for a final C class such as torch.device: forwards construction and isinstance.

    The proxy also equals the class and has its hash: torch.compile looks classes up in tables, and torch.fx compares them.
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


def _make_proxy(real: type, make: Function) -> _Proxy:
    own = {"__module__": "torch", "__doc__": real.__doc__, "real": real, "make": staticmethod(make)}
    return _Proxy(real.__name__, (), own)


# An entry for torch.serialization.register_package: a priority, a function that tags a storage, and a function that moves a
# storage to a place. The priorities of torch's own entries begin with 10.
_package = (5, lambda storage: None, lambda storage, location: storage if stands_for_cpu(location) else None)


def _replace(owner: Any, name: str, stand_in: Any) -> None:
    """Replace a function of torch. Register the replacement with torch.jit.script, which finds functions by identity."""
    operator = _torch_private.find_scripted(getattr(owner, name))
    _changes.set(owner, name, stand_in)
    if operator is not None:
        _torch_private.register_scripted(stand_in, operator)
        _scripted.append(id(stand_in))


def _wrap(owner: Any, wrap: Callable[..., Function], *names: str, **more: Any) -> None:
    for name in names:
        if hasattr(owner, name):
            _replace(owner, name, wrap(getattr(owner, name), **more))


def _name_device(name: str) -> None:
    """Add the methods named after the device to tensors, modules and storages."""
    _changes.set(torch.Tensor, f"is_{name}", property(lambda self: True))
    _changes.set(torch.nn.Module, name, module_npu)
    for owner in (torch.Tensor, torch.UntypedStorage, torch.TypedStorage):  # a differentiable copy, as a move to a device makes
        _changes.set(owner, name, lambda self, device=None, non_blocking=False: self.clone())


def _refusal(name: str) -> str:
    return f"{name} runs on an Ascend device; mx_driving.compat's stand-in for torch_npu has no such thing for a CPU"


def _contents(name: str) -> dict[str, Any] | None:
    """Return the contents of a module of the stand-in. A name of torch_npu that the stand-in lacks raises an error."""
    if name.partition(".")[0] != "torch_npu":
        return None
    if name not in _CONTENTS:  # `from torch_npu import x` would ignore an error with the name torch_npu.x
        raise ModuleNotFoundError(_refusal(name), name="torch_npu")

    def refuse(attribute: str) -> Any:
        raise AttributeError(attribute if attribute.startswith("__") else _refusal(f"{name}.{attribute}"))

    names = {key: value for key, value in _CONTENTS[name].items() if key == "__version__" or not key.startswith("__")}
    return {**names, "__getattr__": refuse}


class _StandInModules(MadeModules):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        if module.__name__ != "torch_npu.contrib.transfer_to_npu":
            return
        # Make CUDA's device names mean the CPU, too.
        _types.add("cuda")
        for name, value in _device_module.NAMES.items():
            torchs_own_state = name.startswith("_") or name in ("init", "is_initialized")
            if not torchs_own_state and hasattr(torch.cuda, name):
                _changes.set(torch.cuda, name, value)
        for name, value in _device_module.AMP.items():
            _changes.set(torch.cuda.amp, name, value)
        _changes.set(torch, "get_autocast_gpu_dtype", lambda: torch.get_autocast_dtype("cpu"))
        is_enabled = torch.is_autocast_enabled
        _changes.set(torch, "is_autocast_enabled", lambda device_type="cpu": is_enabled(device_type))
        _name_device("cuda")


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

    # Wrap the functions and classes of torch that take a device.
    constructors = _torch_private.device_constructors()
    for owner in (torch, torch.fft, torch.nested):
        for name, function in list(vars(owner).items()):
            if isinstance(function, types.BuiltinFunctionType | types.FunctionType) and function in constructors:
                _wrap(owner, map_devices, name, copy=torch.clone if name in ("as_tensor", "asarray") else None)
    _wrap(torch, map_devices, *_LIKE, *_AUTOCAST, "load")
    _wrap(torch, _rewrite_arguments, "set_default_device", rewrite=_set_no_default)
    _wrap(torch.amp, map_devices, "custom_fwd", "custom_bwd", "is_autocast_available")
    _wrap(torch.Tensor, map_devices, *_NEW)
    _wrap(torch.Tensor, map_devices, "to", copy=torch.clone)
    _wrap(torch.nn.Module, map_devices, "to", copy=module_npu)
    _wrap(torch.nn.Module, map_devices, "to_empty")
    _wrap(torch.autocast, _rewrite_arguments, "__init__", rewrite=_choose_float16)
    _wrap(torch.amp.GradScaler, map_devices, "__init__")
    _wrap(torch.random, _rewrite_arguments, "fork_rng", rewrite=_fork_cpu)
    parallel = torch.nn.parallel
    _changes.set(parallel.DataParallel, "__init__", _data_parallel)
    _changes.set(parallel, "data_parallel", _call_module)
    if torch.distributed.is_available():
        _wrap(parallel.DistributedDataParallel, _rewrite_arguments, "__init__", rewrite=_leave_out_devices)
        for name in ("init_process_group", "new_group", "barrier"):
            _wrap(torch.distributed, _rewrite_arguments, name, rewrite=_leave_out_devices)
        _wrap(torch.distributed, map_devices, "init_device_mesh")
        _wrap(torch.distributed.device_mesh, _rewrite_arguments, "new_group", rewrite=_leave_out_devices)
    _changes.set(torch.Tensor, "pin_memory", lambda self, device=None: self)
    _changes.set(torch.Tensor, "is_pinned", lambda self, device=None: False)
    _changes.set(torch.Tensor, "record_stream", lambda self, stream: None)
    _name_device("npu")
    _replace(torch, "device", _make_proxy(_Device, _make_device))
    _changes.set(torch, "Generator", _make_proxy(torch.Generator, map_devices(torch.Generator)))
    _torch_private.STORAGE_PLACES.insert(0, _package)


def uninstall() -> None:
    """Undo `install` and `transfer_to_npu`. References that callers hold stay."""
    if installed():
        _finder.uninstall()
        _changes.undo()
        _types.discard("cuda")
        _torch_private.STORAGE_PLACES.remove(_package)
        while _scripted:
            _torch_private.scripted_builtins().pop(_scripted.pop(), None)
