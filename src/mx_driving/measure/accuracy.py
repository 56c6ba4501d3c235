"""Errors of output and gradients on a workload, against the float64 reference, and the errors that are allowed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _library, reference
from . import plain
from .workloads import Workload

CHUNK = 605  # queries at a time through the reference, which keeps every sample of a level in memory
QUICK = 121  # queries with --quick
ULPS = 16


class Checked(NamedTuple):
    """One operator on one workload. errors and allowed: the output's and each gradient's, relative to the largest entry."""

    workload: Workload
    dtype: str
    backend: str
    errors: dict[str, float]
    allowed: dict[str, float]
    seconds: float
    plain_seconds: float

    @property
    def failures(self) -> list[str]:
        """What is wrong, in words; empty when all is well."""
        wrong = [
            f"{what} of {self.workload.operator} is off by {error:.2g}, allowed {self.allowed[what]:.2g}"
            for what, error in self.errors.items()
            if not error <= self.allowed[what]
        ]
        if self.backend.startswith("reference") and "cpu" in self.backend:
            wrong.append(f"{self.workload.operator} runs on the reference: {self.backend}")
        return wrong


def _queries(args: tuple[Tensor, ...], begin: int, end: int) -> tuple[Tensor, ...]:
    """The same call for some of its queries (or anchors)."""
    return (*args[:3], args[3][:, begin:end], args[4][:, begin:end])


def _cast(args: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(a.to(dtype) if a.is_floating_point() else a for a in args)


def _with_gradients(run: tuple[Callable[..., Any], Callable[..., Any]], args: tuple[Tensor, ...], grad: Tensor, n: int):
    forward, backward = run
    return [forward(*args), *backward(grad, *args, [True] * n)]


def _in_float64(workload: Workload, args: tuple[Tensor, ...], grad: Tensor, tick: Callable[[], None]) -> list[Tensor]:
    """The reference in float64, some queries at a time. The gradients of value are added, all other results joined."""
    run = getattr(reference, workload.operator), getattr(reference, workload.operator + "_backward")
    wide, wide_grad = _cast(args, torch.float64), grad.double()
    parts, total = [], torch.zeros_like(wide[0])
    for begin in range(0, args[3].shape[1], CHUNK):
        end = begin + CHUNK
        output, grad_value, *rest = _with_gradients(
            run, _queries(wide, begin, end), wide_grad[:, begin:end], len(workload.gradients)
        )
        total += grad_value
        parts.append((output, *rest))
        tick()
    output, *rest = (torch.cat(results, 1) for results in zip(*parts, strict=True))
    return [output, total, *rest]


def _errors(workload: Workload, got: list[Tensor], true: list[Tensor]) -> dict[str, float]:
    names = ("output", *workload.gradients)
    return {
        name: float((g.double() - t).abs().max() / t.abs().max().clamp_min(1e-300))
        for name, g, t in zip(names, got, true, strict=True)
    }


def _synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _timed(function: Callable[[], Any], device: str) -> float:
    """The best of four (of two where one takes over a second): forward and backward together."""
    best = float("inf")
    for turn in range(4):
        if turn > 1 and best > 1:
            break
        _synchronise(device)
        began = time.perf_counter()
        function()
        _synchronise(device)
        best = min(best, time.perf_counter() - began)
    return best


def _forward_backward(function: Callable[..., Tensor], workload: Workload, args: tuple[Tensor, ...], grad: Tensor) -> Any:
    leaves = tuple(a.detach().requires_grad_(i in workload.differentiable) for i, a in enumerate(args))
    return lambda: torch.autograd.grad(function(*leaves), [leaves[i] for i in workload.differentiable], grad)


def _times(workload: Workload, args: tuple[Tensor, ...], grad: Tensor, device: str) -> tuple[float, float]:
    """Seconds of this package and of plain torch."""
    op = getattr(torch.ops.mx_driving, workload.operator).default
    ours = _timed(_forward_backward(op, workload, args, grad), device)
    # grid_sample has no 16-bit form on a CPU: there people compute in float32
    usual = args if args[0].dtype in (torch.float32, torch.float64) else _cast(args, torch.float32)
    usually = getattr(plain, workload.operator)
    return ours, _timed(_forward_backward(usually, workload, usual, grad.to(usual[0].dtype)), device)


def check_one(
    workload: Workload, dtype: str, device: str, quick: bool, tick: Callable[[], None] = lambda: None, timed: bool = True
) -> Checked:
    """Errors on all queries (some of them when quick), times on the same call."""
    generator = torch.Generator().manual_seed(0)
    args = workload.make(generator)
    if quick:
        args = _queries(args, 0, QUICK)
    args = tuple(a.to(device) for a in _cast(args, getattr(torch, dtype)))
    op = getattr(torch.ops.mx_driving, workload.operator).default
    backward = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    n = len(workload.gradients)
    output = op(*args)
    grad = torch.rand(output.shape, generator=generator).to(output)
    true = _in_float64(workload, args, grad, tick)
    errors = _errors(workload, [output, *backward(grad, *args, [True] * n)], true)
    some = _queries(args, 0, QUICK)
    plainly = getattr(reference, workload.operator), getattr(reference, workload.operator + "_backward")
    lost = _errors(
        workload,
        _with_gradients(plainly, some, grad[:, :QUICK], n),
        _in_float64(workload, some, grad[:, :QUICK], lambda: None),
    )
    allowed = {what: loss + ULPS * torch.finfo(args[0].dtype).eps for what, loss in lost.items()}
    ours = theirs = 0.0
    if timed:
        ours, theirs = _times(workload, args, grad, device)
        tick()
    kind = device if device in ("cpu", "cuda") else "other"
    serving = _library.backends()[kind][workload.operator]
    backend = f"reference ({device}: {serving})" if serving.startswith("reference") else f"{device}: {serving}"
    return Checked(workload, dtype, backend, errors, allowed, ours, theirs)
