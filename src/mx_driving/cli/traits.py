"""What one can say of an implementation without a rival: 16 bits against 32, two threads against one, memory."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch

from .report import Row
from .timing import Call, interleaved
from .workloads import GEOMETRIC, WORKLOADS, Workload


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
    mask = [True] * (2 if workload.operator == GEOMETRIC else 3)
    return lambda: forward(*args), lambda: backward(grad, *args, mask)


def traits(workload: Workload, seconds: float) -> Row:
    threads = torch.get_num_threads()
    forward, backward = _calls(workload, torch.float32)
    row: Row = {"workload": workload.name}
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        for direction, of_16, of_32 in zip(("forward", "backward"), _calls(workload, dtype), (forward, backward), strict=True):
            row[f"{name} / float32 {direction}"] = f"{_ratio({'16': of_16, '32': of_32}, seconds):.2f}"
    for name, call in (("forward", forward), ("backward", backward)):
        calls = {"1": _with_threads(1, call), "2": _with_threads(2, call)}
        row[f"1 -> 2 threads {name}"] = f"{_ratio(calls, seconds):.2f}"
    torch.set_num_threads(threads)
    row["memory forward"], row["memory backward"] = (f"{extra:.1%}" for extra in extra_memory(workload, "float32"))
    row["bfloat16 memory backward"] = f"{extra_memory(workload, 'bfloat16')[1]:.1%}"
    return row


def extra_memory(workload: Workload, dtype: str) -> tuple[float, float]:
    """Peak memory of forward and backward beside inputs and outputs, as a share of value's size. In a fresh process whose
    allocator gives every block of more than 64 KB back at once: what is gone after the call was scratch."""
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
    warm()  # the thread pool and the library are there now
    size = workload.make(torch.Generator().manual_seed(0))[0].numel() * of_dtype.itemsize
    shares = []
    for call in _calls(workload, of_dtype):
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        kept = call()
        shares.append((_status("VmHWM") - _status("VmRSS")) / size)
        del kept
    print(*shares)
