"""Measurements that need no rival: 16 bits against 32, two threads against one, memory, and the cost of importing and
calling."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import mx_driving
from mx_driving._measure.rivals import make_rival, make_training_call
from mx_driving._measure.timing import Call, interleaved
from mx_driving._measure.workloads import WORKLOADS, Args, Workload

PROCESSES = 5  # fresh ones, for the time of an import
TIMED = ("forward", "backward")
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


def _calls(workload: Workload, args: Args) -> dict[str, Call]:
    function, _, places = make_rival(workload.operator, args, workload.differentiable)
    mask = [i in places for i in workload.description.differentiable]
    backward = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    grad = torch.ones_like(function(*args))
    return {
        "forward": lambda: function(*args),
        "backward": lambda: backward(grad, *args, mask),
        "forward + backward": make_training_call(function, args, places, grad),
    }


def traits(workload: Workload, seconds: float) -> dict[str, tuple[str, ...]]:
    """Figure -> (forward, backward), of memory also forward + backward."""
    threads = torch.get_num_threads()
    own = _calls(workload, workload.inputs("float32"))
    rows = {}
    for dtype in ("bfloat16", "float16"):
        shorter = _calls(workload, workload.inputs(dtype))
        rows[f"{dtype} / float32, time"] = _figures(_ratio({"16": shorter[way], "32": own[way]}, seconds) for way in TIMED)
    both = [{"1": _with_threads(1, own[way]), "2": _with_threads(2, own[way])} for way in TIMED]
    rows["1 thread / 2 threads, time"] = _figures(_ratio(calls, seconds) for calls in both)
    torch.set_num_threads(threads)
    dtypes = ("float32", "bfloat16")
    for dtype, shares in zip(dtypes, extra_memory(workload, dtypes), strict=True):
        rows[f"{dtype}, scratch memory / value"] = _figures(shares.values(), ".1%")
    return rows


def _figures(numbers: Iterable[float], form: str = ".2f") -> tuple[str, ...]:
    return tuple(format(number, form) for number in numbers)


def of_the_package() -> str:
    """The cost of importing and of calling, whatever the work."""
    plain, with_graph = one_query()
    return (
        f"import mx_driving: {1e3 * import_seconds():.0f} ms after torch's own, median of {PROCESSES} fresh processes\n"
        f"one query, forward: {1e6 * plain:.1f} us, where gradients are recorded {1e6 * with_graph:.1f} us"
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
    plain, with_graph = (statistics.median(t) / CALLS for t in times.values())
    return plain, with_graph


def extra_memory(workload: Workload, dtypes: Iterable[str]) -> list[dict[str, float]]:
    """Peak memory of each direction beside inputs, outputs and gradients, as a fraction of value's size, for each dtype.

    Forward + backward is recorded, so that what autograd keeps counts. The fresh process has an allocator that gives every
    block above 64 KB back at once, so that memory gone after the call was scratch."""
    call = f"_child({workload.name!r}, {list(dtypes)!r}, {torch.get_num_threads()})"
    command = [sys.executable, "-c", f"from {__name__} import _child; {call}"]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "PYTHONPATH": os.pathsep.join(sys.path)}
    out = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def _child(name: str, dtypes: list[str], threads: int) -> None:
    torch.set_num_threads(threads)
    workload = next(w for w in WORKLOADS if w.name == name)
    print(json.dumps([_shares(workload, dtype) for dtype in dtypes]))


def _shares(workload: Workload, dtype: str) -> dict[str, float]:
    args = workload.inputs(dtype)
    shares = {}
    for way, call in _calls(workload, args).items():
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        kept = call()
        shares[way] = (_status("VmHWM") - _status("VmRSS")) / args[0].nbytes
        del kept
    return shares
