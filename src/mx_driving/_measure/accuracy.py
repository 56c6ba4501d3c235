"""Errors of output and gradients on a workload against the float64 reference, and the allowed errors."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _dispatch, reference
from .._agreement import ULPS, output_difference
from .rivals import plain_form, recorded
from .workloads import Args, Workload, cast, some_queries

CHUNK = 605  # queries of one call of the reference: it holds all samples of a level in memory
QUICK = 121  # queries that --quick checks
CHANNELS = 16  # CHUNK and QUICK of pooling, in channels


class WorkloadErrors(NamedTuple):
    """The errors of an operator on a workload. `errors` and `allowed` are relative to the largest entry of each result."""

    workload: Workload
    dtype: str
    backend: str
    errors: dict[str, float]
    allowed: dict[str, float]
    seconds: float
    plain_seconds: float

    @property
    def failures(self) -> list[str]:
        wrong = [
            f"{what} of {self.workload.operator} is off by {error:.2g}, allowed {self.allowed[what]:.2g}"
            for what, error in self.errors.items()
            if not error <= self.allowed[what]
        ]
        if self.backend.startswith("reference") and "cpu" in self.backend:
            wrong.append(f"{self.workload.operator} runs on the reference: {self.backend}")
        return wrong


def _pieces(workload: Workload) -> tuple[int, int]:
    """Return (queries of one call of the reference, queries that --quick checks); channels instead of queries for pooling."""
    return (CHUNK, QUICK) if workload.row.kind != "pooling" else (CHANNELS, CHANNELS)


def _by_reference(workload: Workload, args: Args, grad: Tensor) -> list[Tensor]:
    """Return the output and all gradients of the reference."""
    forward, backward = getattr(reference, workload.operator), getattr(reference, workload.operator + "_backward")
    return [forward(*args), *backward(grad, *args, [True] * len(workload.gradients))]


def _in_float64(workload: Workload, args: Args, grad: Tensor) -> list[Tensor]:
    """Compute the reference in float64, in pieces of queries. Concatenate results with an axis of queries; sum the others."""
    wide, wide_grad = cast(args, torch.float64), grad.double()
    query_axes = workload.row.axes[workload.row.queries]
    axes = (query_axes[-1], *(query_axes[i] for i in workload.row.differentiable))
    parts_of: list[list[Tensor]] = [[] for _ in axes]
    step, _ = _pieces(workload)
    for begin in range(0, grad.shape[1], step):
        some = some_queries(workload.operator, wide, begin, begin + step)
        results = _by_reference(workload, some, wide_grad[:, begin : begin + step])
        for axis, parts, result in zip(axes, parts_of, results, strict=True):
            if axis is None and parts:
                parts[0] += result
            else:
                parts.append(result)
    return [parts[0] if axis is None else torch.cat(parts, axis) for axis, parts in zip(axes, parts_of, strict=True)]


def _errors(workload: Workload, got: list[Tensor], true: list[Tensor]) -> dict[str, float]:
    names = ("output", *workload.gradients)
    return {name: output_difference(g, t) for name, g, t in zip(names, got, true, strict=True)}


def _timed(function: Callable[[], Any], device: str) -> float:
    """Return the shortest of four calls, or of two if a call takes over a second."""
    best, synchronise = float("inf"), torch.cuda.synchronize if device == "cuda" else torch.cpu.synchronize
    for turn in range(4):
        if turn > 1 and best > 1:
            break
        synchronise()
        began = time.perf_counter()
        function()
        synchronise()
        best = min(best, time.perf_counter() - began)
    return best


def _times(workload: Workload, args: Args, grad: Tensor, device: str) -> tuple[float, float]:
    """Return the seconds of one forward and backward by this package, and by plain torch."""
    operator, differentiable = getattr(torch.ops.mx_driving, workload.operator).default, workload.row.differentiable
    ours = _timed(recorded(operator, args, differentiable, grad), device)
    # a CPU has no 16-bit grid_sample, so people compute in float32
    wide = args if args[0].dtype in (torch.float32, torch.float64) else cast(args, torch.float32)
    plain = recorded(plain_form(workload.operator), wide, differentiable, grad.to(wide[0].dtype))
    return ours, _timed(plain, device)


def check_one(workload: Workload, dtype: str, device: str, quick: bool, timed: bool = True) -> WorkloadErrors:
    """Return errors and times of a workload on all queries; with `quick`, on the first queries."""
    args, (_, few) = workload.inputs(dtype), _pieces(workload)
    if quick:
        args = some_queries(workload.operator, args, 0, few)
    args = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
    op = getattr(torch.ops.mx_driving, workload.operator).default
    backward = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    output = op(*args)
    grad = torch.rand(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    true = _in_float64(workload, args, grad)
    errors = _errors(workload, [output, *backward(grad, *args, [True] * len(workload.gradients))], true)
    some, some_grad = some_queries(workload.operator, args, 0, few), grad[:, :few]
    true_of_some = true if quick else _in_float64(workload, some, some_grad)
    lost = _errors(workload, _by_reference(workload, some, some_grad), true_of_some)
    allowed = {what: loss + ULPS * torch.finfo(args[0].dtype).eps for what, loss in lost.items()}
    ours = theirs = 0.0
    if timed:
        ours, theirs = _times(workload, args, grad, device)
    kind = device if device in ("cpu", "cuda") else "other"
    serving = _dispatch.choose.backends()[kind][workload.operator]
    backend = f"reference ({device}: {serving})" if serving.startswith("reference") else f"{device}: {serving}"
    return WorkloadErrors(workload, dtype, backend, errors, allowed, ours, theirs)
