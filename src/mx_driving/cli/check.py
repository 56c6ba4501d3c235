"""`mx-driving check`: every operator on the vendor documents' examples, against the float64 reference."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import Enum
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.markup import escape
from torch import Tensor

from .. import _library, reference
from .._programs.problems import ruled
from .._programs.show import grid, open_console, say, show
from ..measure import plain
from ..measure.examples import EXAMPLES, Example

CHUNK = 605  # queries at a time through the reference, which keeps every sample of a level in memory
QUICK = 121  # queries with --quick
ULPS = 16


class DType(str, Enum):
    float32 = "float32"
    float64 = "float64"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Row(NamedTuple):
    """One operator on one example. errors and allowed: the output's and each gradient's, relative to the largest entry."""

    example: Example
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
            f"{what} of {self.example.operator} is off by {error:.2g}, allowed {self.allowed[what]:.2g}"
            for what, error in self.errors.items()
            if not error <= self.allowed[what]
        ]
        if self.backend.startswith("reference") and "cpu" in self.backend:
            wrong.append(f"{self.example.operator} runs on the reference: {self.backend}")
        return wrong


def _queries(args: tuple[Tensor, ...], begin: int, end: int) -> tuple[Tensor, ...]:
    """The same call for some of its queries (or anchors)."""
    return (*args[:3], args[3][:, begin:end], args[4][:, begin:end])


def _cast(args: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(a.to(dtype) if a.is_floating_point() else a for a in args)


def _with_gradients(run: tuple[Callable[..., Any], Callable[..., Any]], args: tuple[Tensor, ...], grad: Tensor, n: int):
    forward, backward = run
    return [forward(*args), *backward(grad, *args, [True] * n)]


def _in_float64(example: Example, args: tuple[Tensor, ...], grad: Tensor, tick: Callable[[], None]) -> list[Tensor]:
    """The reference in float64, some queries at a time: the value's gradient adds up, everything else is put together."""
    run = getattr(reference, example.operator), getattr(reference, example.operator + "_backward")
    wide, wide_grad = _cast(args, torch.float64), grad.double()
    parts, total = [], torch.zeros_like(wide[0])
    for begin in range(0, args[3].shape[1], CHUNK):
        end = begin + CHUNK
        output, grad_value, *rest = _with_gradients(
            run, _queries(wide, begin, end), wide_grad[:, begin:end], len(example.gradients)
        )
        total += grad_value
        parts.append((output, *rest))
        tick()
    output, *rest = (torch.cat(results, 1) for results in zip(*parts, strict=True))
    return [output, total, *rest]


def _errors(example: Example, got: list[Tensor], true: list[Tensor]) -> dict[str, float]:
    names = ("output", *example.gradients)
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


def _forward_backward(function: Callable[..., Tensor], example: Example, args: tuple[Tensor, ...], grad: Tensor) -> Any:
    leaves = tuple(a.detach().requires_grad_(i in example.differentiable) for i, a in enumerate(args))
    return lambda: torch.autograd.grad(function(*leaves), [leaves[i] for i in example.differentiable], grad)


def _times(example: Example, args: tuple[Tensor, ...], grad: Tensor, device: str) -> tuple[float, float]:
    """Seconds of this package and of plain torch."""
    op = getattr(torch.ops.mx_driving, example.operator).default
    ours = _timed(_forward_backward(op, example, args, grad), device)
    # grid_sample has no 16-bit form on a CPU: there people compute in float32
    usual = args if args[0].dtype in (torch.float32, torch.float64) else _cast(args, torch.float32)
    usually = getattr(plain, example.operator)
    return ours, _timed(_forward_backward(usually, example, usual, grad.to(usual[0].dtype)), device)


def check_one(
    example: Example, dtype: str, device: str, quick: bool, tick: Callable[[], None] = lambda: None, timed: bool = True
) -> Row:
    """Errors on all queries (some of them when quick), times on the same call."""
    generator = torch.Generator().manual_seed(0)
    args = example.make(generator)
    if quick:
        args = _queries(args, 0, QUICK)
    args = tuple(a.to(device) for a in _cast(args, getattr(torch, dtype)))
    op = getattr(torch.ops.mx_driving, example.operator).default
    backward = getattr(torch.ops.mx_driving, example.operator + "_backward").default
    n = len(example.gradients)
    output = op(*args)
    grad = torch.rand(output.shape, generator=generator).to(output)
    true = _in_float64(example, args, grad, tick)
    errors = _errors(example, [output, *backward(grad, *args, [True] * n)], true)
    some = _queries(args, 0, QUICK)
    lost = _errors(
        example,
        _with_gradients(
            (getattr(reference, example.operator), getattr(reference, example.operator + "_backward")), some, grad[:, :QUICK], n
        ),
        _in_float64(example, some, grad[:, :QUICK], lambda: None),
    )
    allowed = {what: loss + ULPS * torch.finfo(args[0].dtype).eps for what, loss in lost.items()}
    ours = theirs = 0.0
    if timed:
        ours, theirs = _times(example, args, grad, device)
        tick()
    kind = device if device in ("cpu", "cuda") else "other"
    serving = _library.backends()[kind][example.operator]
    backend = f"reference ({device}: {serving})" if serving.startswith("reference") else f"{device}: {serving}"
    return Row(example, dtype, backend, errors, allowed, ours, theirs)


def _table(rows: list[Row]) -> Any:
    """What a row is of stands above its errors, which keeps the table within 80 columns."""
    table = grid(None, {"largest error of": 27, "error / allowed": 17}, {"ms": 8, "speed-up over\nplain torch": 13})
    for row in rows:
        example = row.example
        table.add_row(f"[bold]{example.operator}[/]\n{escape(example.name)}\n{row.dtype}")
        errors = "\n".join(
            f"[{'red' if not error <= row.allowed[what] else 'green'}]{error:.1e}[/] / {row.allowed[what]:.1e}"
            for what, error in row.errors.items()
        )
        times = f"{row.plain_seconds / row.seconds:.1f} x"
        table.add_row(
            "\n".join(f"  {what}" for what in row.errors), errors, f"{row.seconds * 1e3:.2f}", times, end_section=True
        )
    return table


def _backends(rows: list[Row]) -> list[str]:
    """Who served which operators: a line for each."""
    served: dict[str, dict[str, None]] = {}
    for row in rows:
        served.setdefault(row.backend, {})[row.example.operator] = None
    return [f"{backend.split(';')[0]}: {', '.join(operators)}" for backend, operators in served.items()]


def _usable(name: str) -> str:
    """The device's type, once a number has been on the device and back."""
    with ruled(f"--device={name} must be a device that torch can use here", RuntimeError, AssertionError, ImportError):
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    return device.type


def check(
    device: Annotated[str, typer.Option(help="Device to check: cpu, cuda, ...")] = "cpu",
    dtype: Annotated[list[DType] | None, typer.Option(help="Dtype of the inputs; may be given several times.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"Only {QUICK} queries of each example.")] = False,
) -> None:
    """Run every operator, forward and backward, on the vendor documents' own examples.

    Each row compares the output and every gradient with the float64 reference. An error is the largest difference divided
    by the largest true entry; it may be what the plain reference loses in that dtype on the same inputs, plus 16 units in
    the last place. The time is one forward and backward, the best of four; the last column says how many times longer
    the same takes in plain torch (grid_sample), as mmcv and transformers run it on a CPU.

    Exit status 0 means: every error is within what is allowed, and a kernel (not the reference) serves the CPU.

    Example: `mx-driving check --dtype float32 --dtype bfloat16 --quick`
    """
    from rich.progress import Progress

    device = _usable(device)
    console = open_console(f"mx-driving check on {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    rows: list[Row] = []
    work = [(example, d.value) for d in dtype or [DType.float32] for example in EXAMPLES]
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("checking", total=None)
        for example, name in work:
            progress.update(task, description=f"{example.operator} {example.name} {name}")
            rows.append(check_one(example, name, device, quick, lambda: progress.advance(task)))
    show(console, _table(rows))
    for line in _backends(rows):
        say(console, escape(line))
    failures = [failure for row in rows for failure in row.failures]
    for failure in failures:
        say(console, f"[bold red]wrong:[/] {escape(failure)}")
    if failures:
        raise typer.Exit(1)
    say(console, f"[bold green]all is well[/] on {device}, {torch.get_num_threads()} threads, torch {torch.__version__}")
