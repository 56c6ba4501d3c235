"""Make the rows of `mx-driving bench`: times of the operator and of plain torch, for each direction of a workload."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch

from .._operator.description import OPERATORS
from .._operator.problems import Problem
from .accuracy import check_one
from .report import BARE, OURS, PLAIN, Row
from .rivals import Rival, ours, plain_form, recorded
from .timing import Call, interleaved
from .workloads import Args, Workload

Calls = dict[str, dict[str, Call]]  # implementation -> direction -> call
Others = Callable[[Workload, str, Args, torch.Tensor], Calls]  # (workload, dtype, arguments, grad_output)


def calls_of(rival: Rival, grad: torch.Tensor) -> dict[str, Call]:
    function, args, differentiable = rival
    return {"forward": lambda: function(*args), "forward + backward": recorded(function, args, differentiable, grad)}


def _backward(operator: str, args: Args, grad: torch.Tensor, learned: tuple[int, ...]) -> Call:
    function = getattr(torch.ops.mx_driving, operator + "_backward").default
    return lambda: function(grad, *args, [i in learned for i in OPERATORS[operator].differentiable])


def measure(workload: Workload, dtype: str, seconds: float, others: Others = lambda *_: {}) -> list[Row]:
    """Check errors first, then return a row for each direction and implementation. `others` returns further calls to time."""
    failures = check_one(workload, dtype, "cpu", quick=True, timed=False).failures
    if failures:
        raise Problem("; ".join(failures))
    args = workload.inputs(dtype)
    own = ours(workload, args)
    output = own[OURS].function(*args)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    calls: Calls = {name: calls_of(rival, grad) for name, rival in own.items()}
    if dtype in ("float32", "float64"):  # plain torch does not compute in 16 bits on a CPU
        calls[PLAIN] = calls_of(Rival(plain_form(workload.operator), args, workload.learned), grad)
    bare, bare_args = workload.bare(args)
    calls[OURS]["backward"] = _backward(workload.operator, args, grad, workload.learned)
    if BARE in calls:
        calls[BARE]["backward"] = _backward(bare, bare_args, grad, OPERATORS[bare].differentiable)
    return timed_rows(workload.name, dtype, calls | others(workload, dtype, args, grad), seconds)


def timed_rows(name: str, dtype: str, calls: Calls, seconds: float) -> list[Row]:
    """Time all implementations of each direction in turn, round after round. The directions are those of this package."""
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
