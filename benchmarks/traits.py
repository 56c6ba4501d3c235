"""Compare the package with itself: 16 bits with 32 bits, one thread with two; measure memory, the import and one query."""

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
from mx_driving._measure.plain import make_rival, make_training_call
from mx_driving._measure.speed import Call, interleaved
from mx_driving._measure.workloads import WORKLOADS, Args, Workload

PROCESSES = 5  # fresh processes that time an import
TIMED = ("forward", "backward")
CALLS = 500  # calls in one measurement, because a call takes microseconds


def _ratio(calls: dict[str, Call], seconds: float) -> float:
    """Return the time of the first call divided by the time of the second."""
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
    """Return name -> figures: forward, backward; for memory also forward + backward."""
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
    """Return sentences with the time of the import and of a call of one query."""
    plain, with_graph = one_query()
    return (
        f"import mx_driving: {1e3 * import_seconds():.0f} ms after torch's own, median of {PROCESSES} fresh processes\n"
        f"one query, forward: {1e6 * plain:.1f} us, where gradients are recorded {1e6 * with_graph:.1f} us"
    )


def import_seconds() -> float:
    """Return the seconds that the import of this package takes after torch's."""
    code = "import time, torch; start = time.perf_counter(); import mx_driving; print(time.perf_counter() - start)"
    command, env = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [subprocess.run(command, env=env, check=True, capture_output=True, text=True) for _ in range(PROCESSES)]
    return statistics.median(float(run.stdout.split()[-1]) for run in runs)


def one_query() -> tuple[float, float]:
    """Return the seconds of a call with one query and one point, without a graph and with a graph for the backward."""
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
    """Return the peak memory beside inputs, outputs and gradients, as a fraction of value's size, by dtype and direction.

    Forward + backward includes the tensors that autograd saves. In the fresh process the allocator returns every freed block
    above 64 KB to the system at once, so that the peak minus the memory after the call is scratch memory.
    """
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
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        kept = call()
        shares[way] = (_status("VmHWM") - _status("VmRSS")) / args[0].nbytes
        del kept
    return shares
