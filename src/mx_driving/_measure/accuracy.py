"""Errors of output and gradients on a workload against the float64 reference, and the allowed errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import reference
from .._agreement import ULPS, output_difference
from .._dispatch import choose
from .rivals import make_plain, make_training_call
from .workloads import Args, Workload, cast, take_queries

CHUNK = 605  # most queries of a call of the reference, which holds all samples of a level in memory
QUICK = 121  # queries that --quick checks
CHANNELS = 16  # channels of pooling that --quick checks, and most channels of a call of the reference


class WorkloadErrors(NamedTuple):
    """The errors of an operator on a workload. `errors` and `allowed` are relative to the largest entry of each result."""

    workload: Workload
    dtype: str
    backend: str
    errors: dict[str, float]
    allowed: dict[str, float]
    seconds: float
    plain_seconds: float
    cpu_lacks_kernels: bool = False

    @property
    def failures(self) -> list[str]:
        """Return sentences about errors that are too large, and about a CPU without kernels."""
        failures = [
            f"{result} of {self.workload.operator} is off by {error:.2g}, allowed {self.allowed[result]:.2g}"
            for result, error in self.errors.items()
            if not error <= self.allowed[result]
        ]
        if self.cpu_lacks_kernels:
            failures.append(f"{self.workload.operator} runs on the reference: {self.backend}")
        return failures


def _query_counts(workload: Workload) -> tuple[int, int]:
    """Return (most queries of a call of the reference, queries that --quick checks). Channels are the queries of pooling."""
    return (CHUNK, QUICK) if workload.description.kind != "pooling" else (CHANNELS, CHANNELS)


def _run_reference(workload: Workload, args: Args, grad: Tensor) -> list[Tensor]:
    """Return the output and all gradients of the reference."""
    forward, backward = getattr(reference, workload.operator), getattr(reference, workload.operator + "_backward")
    return [forward(*args), *backward(grad, *args, [True] * len(workload.differentiable_names))]


def _compute_in_float64(workload: Workload, args: Args, grad: Tensor) -> list[Tensor]:
    """Compute the reference in float64, in pieces of queries. Concatenate results with an axis of queries; sum the others."""
    wide, wide_grad = cast(args, torch.float64), grad.double()
    query_axes = workload.description.axes[workload.description.queries]
    axes = (query_axes[-1], *(query_axes[i] for i in workload.description.differentiable))
    parts_of: list[list[Tensor]] = [[] for _ in axes]
    step, _ = _query_counts(workload)
    for begin in range(0, grad.shape[1], step):
        some = take_queries(workload.operator, wide, begin, begin + step)
        results = _run_reference(workload, some, wide_grad[:, begin : begin + step])
        for axis, parts, result in zip(axes, parts_of, results, strict=True):
            if axis is None and parts:
                parts[0] += result
            else:
                parts.append(result)
    return [parts[0] if axis is None else torch.cat(parts, axis) for axis, parts in zip(axes, parts_of, strict=True)]


def _measure_errors(workload: Workload, results: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    names = ("output", *workload.differentiable_names)
    return {name: output_difference(r, t) for name, r, t in zip(names, results, truth, strict=True)}


def _time_call(call: Callable[[], Any], device: str) -> float:
    """Return the time of the shortest of four calls, or of two if a call takes over a second."""
    best, synchronise = float("inf"), torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    for turn in range(4):
        if turn > 1 and best > 1:
            break
        synchronise()
        began = time.perf_counter()
        call()
        synchronise()
        best = min(best, time.perf_counter() - began)
    return best


def _time_ours_and_plain(workload: Workload, args: Args, grad: Tensor, device: str) -> tuple[float, float]:
    """Return the seconds of one forward and backward by this package, and by plain torch."""
    operator, differentiable = getattr(torch.ops.mx_driving, workload.operator).default, workload.description.differentiable
    ours = _time_call(make_training_call(operator, args, differentiable, grad), device)
    # On a CPU, torch's 16-bit grid_sample is missing or wrong (see plain.py), so people compute in float32.
    wide = args if args[0].dtype in (torch.float32, torch.float64) else cast(args, torch.float32)
    plain = make_training_call(make_plain(workload.operator), wide, differentiable, grad.to(wide[0].dtype))
    return ours, _time_call(plain, device)


def check_one(workload: Workload, dtype: str, device: str, quick: bool, timed: bool = True) -> WorkloadErrors:
    """Return errors and times of a workload on all queries; with `quick`, on the first queries."""
    args, (_, few) = workload.inputs(dtype), _query_counts(workload)
    if quick:
        args = take_queries(workload.operator, args, 0, few)
    args = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
    op = getattr(torch.ops.mx_driving, workload.operator).default
    backward = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    output = op(*args)
    grad = torch.rand(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    truth = _compute_in_float64(workload, args, grad)
    errors = _measure_errors(workload, [output, *backward(grad, *args, [True] * len(workload.differentiable_names))], truth)
    some, some_grad = take_queries(workload.operator, args, 0, few), grad[:, :few]
    truth_of_some = truth if quick else _compute_in_float64(workload, some, some_grad)
    losses = _measure_errors(workload, _run_reference(workload, some, some_grad), truth_of_some)
    allowed = {result: loss + ULPS * torch.finfo(args[0].dtype).eps for result, loss in losses.items()}
    seconds, plain_seconds = _time_ours_and_plain(workload, args, grad, device) if timed else (0.0, 0.0)
    kind = device if device in ("cpu", "cuda") else "other"
    on_reference = choose.choose(workload.description, kind)[0] == "reference"
    sentence = choose.backends()[kind][workload.operator]
    backend = f"reference ({device}: {sentence})" if on_reference else f"{device}: {sentence}"
    return WorkloadErrors(workload, dtype, backend, errors, allowed, seconds, plain_seconds, on_reference and kind == "cpu")
