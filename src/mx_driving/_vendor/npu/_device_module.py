"""The names of `torch.npu`. There is one device, which is the CPU. Every index means it, in each process of several."""

from __future__ import annotations

import collections
import contextlib
import os
import time
import types
from collections.abc import Iterator
from typing import Any

import torch

native_device = "cpu"  # mmengine puts it in the place of "npu" in a device's name

TENSOR_TYPES = tuple(
    f"{name}Tensor" for name in ("Byte", "Char", "Short", "Int", "Long", "Half", "BFloat16", "Float", "Double", "Bool")
)
globals().update({name: getattr(torch, name) for name in TENSOR_TYPES})


class config:
    """torch.npu.config: keeps what is set here, and does not use it."""

    allow_internal_format = False


class Stream(torch.cpu.Stream):
    """A queue that is always done: work on a CPU is done when the call returns."""

    def __init__(self, device: Any = None, priority: int = 0, **named: Any) -> None:
        super().__init__()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


class Event:
    """A moment. `elapsed_time` is wall-clock time between two, in milliseconds."""

    def __init__(self, enable_timing: bool = False, **named: Any) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        return (end_event._at - self._at) * 1000

    def wait(self, stream: Any = None) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


_stream = Stream()


def current_stream(device: Any = None) -> Stream:
    return _stream


default_stream = current_stream


@contextlib.contextmanager
def stream(stream: Any) -> Iterator[None]:
    yield


class device(contextlib.nullcontext):
    """`with torch.npu.device(0)`: there is no other device to come from."""


def is_current_stream_capturing() -> bool:
    """There are no graphs here. torch built for CUDA calls the driver, which is not there, at each step of an optimizer."""
    return False


def is_available() -> bool:
    return True


is_initialized = is_bf16_supported = is_available


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 1


def current_device() -> int:
    return 0


def get_device_name(device: Any = None) -> str:
    """Begins like an Atlas A2's: the vendor's tests skip themselves elsewhere."""
    return "Ascend910B, mx_driving's stand-in on a CPU"


def get_device_capability(device: Any = None) -> tuple[int, int]:
    """Older than any that Triton compiles for: torch and this package ask it before they use Triton."""
    return 0, 0


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    memory = mem_get_info()[1]
    return types.SimpleNamespace(name=get_device_name(), major=0, minor=0, total_memory=memory, multi_processor_count=0)


def _do_nothing(*args: Any, **named: Any) -> None:
    """There is nothing to do on a CPU."""


init = synchronize = empty_cache = ipc_collect = reset_peak_memory_stats = reset_max_memory_allocated = _do_nothing
set_device = set_compile_mode = set_option = reset_accumulated_memory_stats = reset_max_memory_cached = _do_nothing


def memory_allocated(device: Any = None) -> int:
    """Not counted."""
    return 0


max_memory_allocated = memory_reserved = max_memory_reserved = memory_cached = max_memory_cached = memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Return the free and the whole memory of this machine, in bytes; 1 where the system does not tell."""
    try:
        page = os.sysconf("SC_PAGE_SIZE")
        return os.sysconf("SC_AVPHYS_PAGES") * page, os.sysconf("SC_PHYS_PAGES") * page
    except (AttributeError, ValueError, OSError):  # Windows, macOS
        return 1, 1


def memory_stats(device: Any = None) -> dict[str, int]:
    return collections.defaultdict(int)


def memory_summary(device: Any = None, abbreviated: bool = False) -> str:
    return "memory of the stand-in for npu and cuda is this machine's, and is not counted"


def is_autocast_enabled() -> bool:
    return torch.is_autocast_enabled("cpu")


def get_autocast_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cpu")


def manual_seed(seed: int) -> None:
    """Seeds the CPU's generator: there is no other."""
    torch.default_generator.manual_seed(seed)


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.get_rng_state()


def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
    torch.set_rng_state(new_state)
