"""Errors of output and gradients on a workload against the float64 reference, and the allowed errors."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _backends, reference
from .._agreement import entry_differences, largest_magnitude, output_difference, rounding_limit
from .plain import make_plain, make_training_call
from .workloads import Args, Workload, cast, take_queries

CHUNK = 605  # most queries of a call of the reference, which holds all samples of a level in memory
QUICK = 121  # queries that --quick checks
CHANNELS = 16  # channels of pooling that --quick checks, and most channels of a call of the reference


class WorkloadErrors(NamedTuple):
    """The errors of an operator on a workload. `errors` and `allowed` have an entry for each result, output or gradient: the
    error and the allowed error where error / allowed error is largest, relative to the largest number of the result."""

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
    step = CHUNK if workload.description.kind != "pooling" else CHANNELS
    for begin in range(0, grad.shape[1], step):
        some = take_queries(workload.operator, wide, begin, begin + step)
        results = _run_reference(workload, some, wide_grad[:, begin : begin + step])
        for axis, parts, result in zip(axes, parts_of, results, strict=True):
            if axis is None and parts:
                parts[0] += result
            else:
                parts.append(result)
    return [parts[0] if axis is None else torch.cat(parts, axis) for axis, parts in zip(axes, parts_of, strict=True)]


def _compare(result: Any, true: Tensor, loss: float, dtype: torch.dtype, compute: torch.dtype) -> tuple[float, float]:
    """Return (error, allowed error) of the entry with the largest error / allowed error, both relative to the largest true
    entry. `loss` is the relative error that the reference would have in the arithmetic `compute`."""
    scale = largest_magnitude(true) or 1.0
    limit = loss * scale + rounding_limit(dtype, compute, true.abs() + loss * scale, scale, 0, 0)
    limit = torch.as_tensor(limit, dtype=true.dtype, device=true.device).expand_as(true).flatten()
    if not isinstance(result, Tensor) or result.dtype != dtype or result.shape != true.shape:
        return math.inf, loss
    if not true.numel():
        return 0.0, 0.0
    difference = entry_differences(result.to(true.device), true).flatten()
    worst = (difference / limit.clamp_min(1e-300)).argmax()
    return float(difference[worst]) / scale, float(limit[worst]) / scale


def _time_call(call: Callable[[], Any], device: str) -> float:
    """Return the time of the shortest of four calls, or of two if a call takes over a second."""
    best, synchronise = math.inf, torch.get_device_module(device).synchronize
    for turn in range(4):
        if turn > 1 and best > 1:
            break
        synchronise()
        began = time.perf_counter()
        call()
        synchronise()
        best = min(best, time.perf_counter() - began)
    return best


def check_one(workload: Workload, dtype: str, device: str, quick: bool, timed: bool = True) -> WorkloadErrors:
    """Return errors and times of a workload on all queries; with `quick`, on the first queries. The allowed error is the
    reference's own error in float32 on the first queries, scaled to the ulp of `compute`, plus `rounding_limit`."""
    args, few = workload.inputs(dtype), QUICK if workload.description.kind != "pooling" else CHANNELS
    if quick:
        args = take_queries(workload.operator, args, 0, few)
    compute = torch.float64 if dtype == "float64" else torch.float32
    args = tuple(a.to(device) if isinstance(a, Tensor) else a for a in args)
    operator = getattr(torch.ops.mx_driving, workload.operator).default
    output = operator(*args)
    grad = torch.rand(output.shape, generator=torch.Generator().manual_seed(1)).to(args[0])
    backward = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    results = [output, *backward(grad, *args, [True] * len(workload.differentiable_names))]

    exact, exact_grad = args, grad
    try:
        grad.double()
    except (TypeError, RuntimeError):  # a device without float64, such as mps: compute the truth on the CPU
        exact, exact_grad = tuple(a.cpu() if isinstance(a, Tensor) else a for a in args), grad.cpu()
    truth = _compute_in_float64(workload, exact, exact_grad)
    some, some_grad = take_queries(workload.operator, exact, 0, few), exact_grad[:, :few]
    truth_of_some = truth if quick else _compute_in_float64(workload, some, some_grad)
    of_reference = _run_reference(workload, cast(some, torch.float32), some_grad.float())
    ulps = torch.finfo(compute).eps / torch.finfo(torch.float32).eps
    losses = [ulps * output_difference(plain, true) for plain, true in zip(of_reference, truth_of_some, strict=True)]
    errors, allowed = {}, {}
    for name, result, true, loss in zip(("output", *workload.differentiable_names), results, truth, losses, strict=True):
        errors[name], allowed[name] = _compare(result, true, loss, args[0].dtype, compute)

    seconds = plain_seconds = 0.0
    if timed:
        differentiable = workload.description.differentiable
        seconds = _time_call(make_training_call(operator, args, differentiable, grad), device)
        # On a CPU, torch's 16-bit grid_sample is missing or wrong (see plain.py), so people compute in float32.
        wide = args if args[0].dtype in (torch.float32, torch.float64) else cast(args, torch.float32)
        plain_call = make_training_call(make_plain(workload.operator), wide, differentiable, grad.to(wide[0].dtype))
        plain_seconds = _time_call(plain_call, device)
    kernels = _backends.backends()
    kind = device if device in kernels else "other"
    on_reference = _backends.choose(workload.description, kind)[0] == "reference"
    sentence = kernels[kind][workload.operator]
    backend = f"reference ({device}: {sentence})" if on_reference else f"{device}: {sentence}"
    return WorkloadErrors(workload, dtype, backend, errors, allowed, seconds, plain_seconds, on_reference and kind == "cpu")
