"""Measurements that need no rival: 16 bits against 32, two threads against one, memory, and the cost of importing and
calling."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import mx_driving

from .._operators import OPERATORS
from .timing import Call, interleaved
from .workloads import WORKLOADS, Workload

PROCESSES = 5  # fresh ones, for the time of an import
CALLS = 500  # timed together, because one takes microseconds


def _ratio(calls: dict[str, Call], seconds: float) -> float:
    """Time of the first call over that of the second."""
    first, second = (statistics.median(t) for t in interleaved(calls, seconds).values())
    return first / second


def _with_threads(threads: int, call):
    def run():
        torch.set_num_threads(threads)
        call()

    return run


def _calls(workload: Workload, dtype: torch.dtype):
    """(forward, backward)"""
    args = workload.make(torch.Generator().manual_seed(0))
    args = tuple(a.to(dtype) if a.is_floating_point() else a for a in args)
    forward = getattr(torch.ops.mx_driving, workload.operator).default
    backward = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    grad = torch.ones_like(forward(*args))
    mask = [True] * len(OPERATORS[workload.operator].differentiable)
    return lambda: forward(*args), lambda: backward(grad, *args, mask)


def traits(workload: Workload, seconds: float) -> dict[str, tuple[str, str]]:
    """Figure -> (forward, backward)."""
    threads = torch.get_num_threads()
    forward, backward = _calls(workload, torch.float32)
    found = {}
    for dtype in (torch.bfloat16, torch.float16):
        pairs = zip(_calls(workload, dtype), (forward, backward), strict=True)
        found[f"{_name(dtype)} / float32, time"] = _pair(_ratio({"16": a, "32": b}, seconds) for a, b in pairs)
    both = [{"1": _with_threads(1, call), "2": _with_threads(2, call)} for call in (forward, backward)]
    found["1 thread / 2 threads, time"] = _pair(_ratio(calls, seconds) for calls in both)
    torch.set_num_threads(threads)
    for dtype in (torch.float32, torch.bfloat16):
        found[f"{_name(dtype)}, scratch memory / value"] = _pair(extra_memory(workload, _name(dtype)), ".1%")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pair(numbers: Iterable[float], form: str = ".2f") -> tuple[str, str]:
    forward, backward = numbers
    return format(forward, form), format(backward, form)


def of_the_package() -> str:
    """The cost of importing and of calling, whatever the work."""
    plain, recorded = one_query()
    return (
        f"import mx_driving: {1e3 * import_seconds():.0f} ms after torch's own, median of {PROCESSES} fresh processes\n"
        f"one query, forward: {1e6 * plain:.1f} us, where gradients are recorded {1e6 * recorded:.1f} us"
    )


def import_seconds() -> float:
    """Seconds to import this package after torch."""
    code = "import time, torch; start = time.perf_counter(); import mx_driving; print(time.perf_counter() - start)"
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.run(command, env=env, check=True, capture_output=True, text=True) for _ in range(PROCESSES)]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)


def one_query() -> tuple[float, float]:
    """Seconds of multi_scale_deformable_attn for one query of one point, without and with recording for backward."""
    shapes, starts = torch.tensor([[4, 4]]), torch.tensor([0])
    value, locations, weights = torch.rand(1, 16, 1, 8), torch.rand(1, 1, 1, 1, 1, 2), torch.ones(1, 1, 1, 1, 1)
    leaf = value.clone().requires_grad_()

    def calls(value: torch.Tensor) -> Call:
        def run() -> None:
            for _ in range(CALLS):
                mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, weights)

        return run

    times = interleaved({"plain": calls(value), "recorded": calls(leaf)}, 1.0)
    plain, recorded = (statistics.median(t) / CALLS for t in times.values())
    return plain, recorded


def extra_memory(workload: Workload, dtype: str) -> tuple[float, float]:
    """Peak memory of forward and backward beside inputs and outputs, as a share of value's size. The fresh process has an
    allocator that gives every block above 64 KB back at once, so that memory gone after the call was scratch."""
    call = f"_child({workload.name!r}, {dtype!r}, {torch.get_num_threads()})"
    command = [sys.executable, "-c", f"from {__name__} import _child; {call}"]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.split()
    return float(out[-2]), float(out[-1])


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _child(name: str, dtype: str, threads: int) -> None:
    torch.set_num_threads(threads)
    of_dtype: torch.dtype = getattr(torch, dtype)
    workload = next(w for w in WORKLOADS if w.name == name)
    warm, _ = _calls(next(w for w in WORKLOADS if w.operator == workload.operator and "Vendor" in w.name), of_dtype)
    warm()  # starts the thread pool and loads the library
    size = workload.make(torch.Generator().manual_seed(0))[0].numel() * of_dtype.itemsize
    shares = []
    for call in _calls(workload, of_dtype):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        kept = call()
        shares.append((_status("VmHWM") - _status("VmRSS")) / size)
        del kept
    print(*shares)
