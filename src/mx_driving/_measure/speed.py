"""Make the rows of `mx-driving bench`: times of the operator and of plain torch, forward and backward, for a workload."""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .._operator.description import OPERATORS
from .._operator.rules import Problem
from .accuracy import check_one
from .plain import Rival, make_ours, make_plain, make_training_call
from .report import OURS, PLAIN, Row
from .workloads import Args, Call, Workload

Calls = dict[str, dict[str, Call]]  # implementation -> direction -> call
Others = Callable[[Workload, str, Args, torch.Tensor], Calls]  # (workload, dtype, arguments, grad_output)
SHORT = 1.0  # seconds; shorter calls are run once before they are timed


def interleaved(
    calls: dict[str, Call], seconds: float, within: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext()
) -> dict[str, list[float]]:
    """Return the times of each call. Calls alternate in rounds, so that other load of the machine affects all calls alike.

    Run 3 rounds, then further rounds for about `seconds`. After 3 rounds, skip a call while its total time is more than
    twice the smallest total, so that quick calls are timed often. Run a short call once before timing it, for two reasons: the
    caches then hold the call's own data, and its memory was freed recently. The host of a virtual machine may take back memory
    that was freed seconds ago; to get it back takes twenty times as long. Shuffle each round, because calls are slower
    for a while after a call that frees much memory. `within` makes the context of a call; entry and exit are not timed.
    """
    times: dict[str, list[float]] = {name: [] for name in calls}
    totals = dict.fromkeys(calls, 0.0)
    for name, call in calls.items():
        with within(name):
            call()
    order = random.Random(0)
    rounds, least = 0, 0.0
    while rounds < 3 or least < seconds / len(calls) / 2:
        for name in order.sample(list(calls), len(calls)):
            if rounds >= 3 and totals[name] > 2 * least:
                continue
            with within(name):
                entered = time.perf_counter()
                if not times[name] or times[name][-1] < SHORT:
                    calls[name]()
                start = time.perf_counter()
                calls[name]()
                ended = time.perf_counter()
            times[name].append(ended - start)
            totals[name] += ended - entered
        rounds += 1
        least = min(totals.values())
    return times


def make_calls(rival: Rival, grad: torch.Tensor) -> dict[str, Call]:
    """Return the calls of an implementation by direction."""
    function, args, differentiable = rival
    return {"forward": lambda: function(*args), "forward + backward": make_training_call(function, args, differentiable, grad)}


def measure(workload: Workload, dtype: str, seconds: float, others: Others = lambda *_: {}) -> list[Row]:
    """Check errors first, then return a row for each direction and implementation. `others` returns further calls to time."""
    failures = check_one(workload, dtype, "cpu", quick=True, timed=False).failures
    if failures:
        raise Problem("; ".join(failures))
    args = workload.inputs(dtype)
    ours = make_ours(workload, args)
    output = ours[OURS].function(*args)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    calls: Calls = {name: make_calls(rival, grad) for name, rival in ours.items()}
    if dtype in ("float32", "float64"):  # on a CPU, plain torch has no correct 16-bit grid_sample
        calls[PLAIN] = make_calls(Rival(make_plain(workload.operator), args, workload.differentiable), grad)
    for (name, rival), operator in zip(ours.items(), (workload.operator, workload.description.bare), strict=False):
        backward = getattr(torch.ops.mx_driving, operator + "_backward").default
        mask = [i in rival.differentiable for i in OPERATORS[operator].differentiable]
        calls[name]["backward"] = functools.partial(backward, grad, *rival.args, mask)
    return time_rows(workload.name, dtype, calls | others(workload, dtype, args, grad), seconds)


def time_rows(workload: str, dtype: str, calls: Calls, seconds: float) -> list[Row]:
    """For each direction that our operator has, time all implementations in turn, round after round."""
    rows = []
    for direction in calls[OURS]:
        times = interleaved({name: by[direction] for name, by in calls.items() if direction in by}, seconds)
        medians = {name: statistics.median(t) for name, t in times.items()}
        rows += [
            {
                "workload": workload,
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
