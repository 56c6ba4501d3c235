"""The names of `torch.npu`, and the small modules beside it. There is one device, the CPU; every device index means the CPU."""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import time
import types
from collections.abc import Callable
from typing import Any

import torch


class Stream(torch.cpu.Stream):
    """A stream without pending work: a call on the CPU returns when its work is done."""

    def __init__(self, device: Any = None, priority: int = 0, **named: Any) -> None:
        super().__init__()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """A point in time. `elapsed_time` returns the wall-clock time between two events in milliseconds."""

    def __init__(self, *args: Any, **named: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._at - self._at) * 1000

    def wait(self, stream: Any = None) -> None:
        pass

    synchronize, query = wait, Stream.query


class autocast(torch.autocast):
    """Autocast on the CPU with the device's default dtype, float16."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True) -> None:
        super().__init__("cpu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)


class GradScaler(torch.amp.GradScaler):
    def __init__(self, *args: Any, dynamic: bool = True, **named: Any) -> None:
        super().__init__("cpu", *args, **named)


class _ClipsGradients:
    param_groups: list[dict[str, Any]]

    def clip_grad_norm_fused_(self, max_norm: float = 1.0, norm_type: float = 2.0) -> torch.Tensor:
        """Scale all gradients so that their total norm is at most max_norm. Return the norm before scaling."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type)


def _make_answer(name: str, answer: Any) -> Callable[..., Any]:
    """Return a function that returns `answer`. Each name needs its own, as torch.compile refuses a function with two names."""

    def function(*args: Any, **named: Any) -> Any:
        return answer

    function.__name__ = function.__qualname__ = name
    return function


def _free_and_total_memory(device: Any = None) -> tuple[int, int]:
    """Return the free and the total memory of this machine in bytes; (1, 1) if the system does not report them."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError):  # Windows has no sysconf, and macOS no SC_AVPHYS_PAGES
        return 1, 1


# The vendor's tests skip a device unless its name begins like the name of an Atlas A2.
_NAME = "Ascend910B, mx_driving's stand-in on a CPU"
_stream = Stream()
_ANSWERS = {
    **dict.fromkeys(("is_available", "is_initialized", "is_bf16_supported"), True),
    # Without these two names, a torch built for CUDA calls the missing driver in each step of an optimizer.
    **dict.fromkeys(("is_current_stream_capturing", "_is_in_bad_fork"), False),
    **dict.fromkeys(("current_stream", "default_stream"), _stream),
    **dict.fromkeys(("init", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"), None),
    **dict.fromkeys(("reset_max_memory_allocated", "reset_accumulated_memory_stats", "reset_max_memory_cached"), None),
    **dict.fromkeys(("set_device", "set_compile_mode", "set_option"), None),
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    **dict.fromkeys(("memory_cached", "max_memory_cached", "current_device"), 0),
    "memory_summary": "memory of the stand-in for npu and cuda is this machine's, and is not counted",
    "device_count": 1,
    "get_device_name": _NAME,
    "get_device_capability": (0, 0),  # older than all that Triton supports, so that torch and this package do not use Triton
}
# After transfer_to_npu, NAMES and AMP also replace names of torch.cuda and of torch.cuda.amp.
NAMES: dict[str, Any] = {
    **{name: _make_answer(name, answer) for name, answer in _ANSWERS.items()},
    **{name: getattr(torch, name) for name in ("ByteTensor", "CharTensor", "ShortTensor", "IntTensor", "LongTensor")},
    **{name: getattr(torch, name) for name in ("HalfTensor", "BFloat16Tensor", "FloatTensor", "DoubleTensor", "BoolTensor")},
    **{"Stream": Stream, "Event": Event},
    "device": type("device", (contextlib.nullcontext,), {}),
    "stream": lambda stream: contextlib.nullcontext(),
    "get_device_properties": lambda device=None: types.SimpleNamespace(
        name=_NAME, major=0, minor=0, total_memory=_free_and_total_memory()[1], multi_processor_count=0
    ),
    "mem_get_info": _free_and_total_memory,
    "memory_stats": lambda device=None: collections.defaultdict(int),
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda new_state, device=None: torch.set_rng_state(new_state),
}
NPU = {
    **NAMES,
    "native_device": "cpu",  # mmengine uses this device type in place of "npu"
    "config": types.SimpleNamespace(allow_internal_format=False),
    "is_autocast_enabled": lambda: torch.is_autocast_enabled("cpu"),
    "get_autocast_dtype": lambda: torch.get_autocast_dtype("cpu"),
}
AMP = {
    "autocast": autocast,
    "GradScaler": GradScaler,
    "custom_fwd": functools.partial(torch.amp.custom_fwd, device_type="cpu"),
    "custom_bwd": functools.partial(torch.amp.custom_bwd, device_type="cpu"),
}
UTILS = {
    "get_soc_version": lambda: 220,  # the vendor's number of an Ascend910B
    "is_support_inf_nan": lambda: True,
}
OPTIM = {
    f"NpuFused{name}": type(f"NpuFused{name}", (_ClipsGradients, getattr(torch.optim, name)), {})
    for name in ("SGD", "Adam", "AdamW")
}
