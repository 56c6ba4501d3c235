"""The rows of `mx-driving bench`: every direction of a workload, timed beside its rivals and the gather floor."""

from __future__ import annotations

import statistics

import torch

from .._cli_support.problems import Problem
from .._operators import OPERATORS
from . import floor
from .accuracy import check_one
from .report import BARE, FLOOR, HEAD_MAJOR_FLOOR, OURS, Row
from .rivals import Rival, ours, recorded, rivals
from .timing import Call, interleaved
from .workloads import Args, Workload

Calls = dict[str, dict[str, Call]]  # of each implementation: direction -> call


def _calls(rival: Rival, grad: torch.Tensor) -> dict[str, Call]:
    function, args, differentiable = rival
    return {
        "forward": lambda: function(*args),
        "forward + backward": recorded(function, args, differentiable, grad),
    }


def _backward(operator: str, args: Args, grad: torch.Tensor, learned: tuple[int, ...]) -> Call:
    function = getattr(torch.ops.mx_driving, operator + "_backward").default
    return lambda: function(grad, *args, [i in learned for i in OPERATORS[operator].differentiable])


def _floor(operator: str, args: Args, dtype: str, head_major: bool) -> dict[str, Call]:
    found = {"forward": floor.gather_floor(operator, args, backward=False, head_major=head_major)}
    if dtype in ("float32", "float64"):  # the floor adds up in place, which no 16-bit gradient does
        found["backward"] = floor.gather_floor(operator, args, backward=True, head_major=head_major)
    return found


def measure(workload: Workload, dtype: str, peers: bool, seconds: float) -> list[Row]:
    """One row per direction and implementation; errors are checked first."""
    failures = check_one(workload, dtype, "cpu", quick=True, timed=False).failures
    if failures:
        raise Problem("; ".join(failures))
    args = workload.inputs(dtype)
    own = ours(workload, args)
    output = own[OURS].function(*args)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    calls: Calls = {name: _calls(rival, grad) for name, rival in own.items()}
    if dtype in ("float32", "float64"):  # no rival computes 16 bits on a CPU
        calls |= {name: _calls(rival, grad) for name, rival in rivals(workload, args, peers).items()}
    bare, bare_args = workload.bare(args)
    calls[OURS]["backward"] = _backward(workload.operator, args, grad, workload.learned)
    if BARE in calls:
        calls[BARE]["backward"] = _backward(bare, bare_args, grad, OPERATORS[bare].differentiable)
    if floor.why_not() is None and not workload.row.samples:
        calls[FLOOR] = {"forward": floor.pooling_floor(args)}
    elif floor.why_not() is None:
        calls[FLOOR] = _floor(bare, bare_args, dtype, head_major=False)
        if OPERATORS[bare].blocks == "num_heads":
            calls[HEAD_MAJOR_FLOOR] = _floor(bare, bare_args, dtype, head_major=True)
    return timed_rows(workload.name, dtype, calls, seconds)


def timed_rows(name: str, dtype: str, calls: Calls, seconds: float) -> list[Row]:
    """All implementations of a direction in turn, round after round; directions are those of this package."""
    rows = []
    for direction in calls[OURS]:
        times = interleaved({one: by[direction] for one, by in calls.items() if direction in by}, seconds)
        medians = {one: statistics.median(t) for one, t in times.items()}
        rows += [
            {
                "workload": name,
                "dtype": dtype,
                "direction": direction,
                "implementation": one,
                "milliseconds": round(median * 1e3, 4),
                "times ours": round(median / medians[OURS], 3),
                "rounds": len(times[one]),
            }
            for one, median in medians.items()
        ]
    return rows
