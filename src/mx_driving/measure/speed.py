"""The rows of `mx-driving bench`: every direction of a workload, timed beside its rivals and the gather floor."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from .._programs.problems import Problem
from . import floor
from .accuracy import check_one
from .report import OURS, Row
from .rivals import rivals
from .timing import Call, interleaved
from .workloads import Workload

FLOOR = "gather floor"


def _calls(workload: Workload, function: Callable[..., Tensor], args: tuple[Tensor, ...], grad: Tensor) -> dict[str, Call]:
    places = workload.differentiable
    leaves = tuple(a.detach().requires_grad_(i in places) for i, a in enumerate(args))
    wanted = [leaves[i] for i in places]
    return {
        "forward": lambda: function(*args),
        "forward + backward": lambda: torch.autograd.grad(function(*leaves), wanted, grad),
    }


def _backward(workload: Workload, args: tuple[Tensor, ...], grad: Tensor) -> Call:
    operator = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    return lambda: operator(grad, *args, [True] * len(workload.differentiable))


def _floor(workload: Workload, args: tuple[Tensor, ...], dtype: str) -> dict[str, Call]:
    found = {"forward": floor.gather_floor(workload.operator, args, backward=False)}
    if dtype in ("float32", "float64"):  # the floor adds up in place, which no 16-bit gradient does
        found["backward"] = floor.gather_floor(workload.operator, args, backward=True)
    return found


def measure(workload: Workload, dtype: str, peers: bool, seconds: float) -> list[Row]:
    """One row per direction and implementation; errors are checked first."""
    failures = check_one(workload, dtype, "cpu", quick=True, timed=False).failures
    if failures:
        raise Problem("; ".join(failures))
    args = workload.make(torch.Generator().manual_seed(0))
    args = tuple(a.to(getattr(torch, dtype)) if a.is_floating_point() else a for a in args)
    found = rivals(workload, args, peers)
    if dtype in ("float16", "bfloat16"):
        found = {OURS: found[OURS]}  # no rival computes 16 bits on a CPU
    output = found[OURS](*args)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    calls = {name: _calls(workload, rival, args, grad) for name, rival in found.items()}
    calls[OURS]["backward"] = _backward(workload, args, grad)
    if floor.why_not() is None:
        calls[FLOOR] = _floor(workload, args, dtype)
    rows = []
    for direction in calls[OURS]:
        times = interleaved({name: by[direction] for name, by in calls.items() if direction in by}, seconds)
        medians = {name: statistics.median(t) for name, t in times.items()}
        rows += [
            {
                "workload": workload.name,
                "dtype": dtype,
                "direction": direction,
                "implementation": name,
                "milliseconds": round(median * 1e3, 4),
                "times ours": round(median / medians[OURS], 3),
                "rounds": len(times[name]),
            }
            for name, median in medians.items()
        ]
    return rows
