"""`mx-driving check`: every operator, against the float64 reference."""

from __future__ import annotations

import re
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

import mx_driving_portable

from .._measure.accuracy import CHANNELS, QUICK, WorkloadErrors, check_one
from .._measure.workloads import CHECKED
from .._operator.problems import ruled
from .._show import grid, open_console, print_json, say, show
from .options import DTypes, Json, Only, Threads, use_threads
from .start import matching


def _table(rows: list[WorkloadErrors]) -> Any:
    """Return a table within 80 columns. The operator, workload and dtype of a row stand above its errors."""
    table = grid(None, {"largest error of": 27, "error / allowed": 17}, {"ms": 8, "speed-up over\nplain torch": 13})
    for row in rows:
        name = re.sub(r" (?=[\[\d])", "\n", row.workload.name, count=1)  # sizes on a new line
        operator = row.workload.operator.replace("_with_logits", "\n  _with_logits")  # room for times
        table.add_row(f"[bold]{operator}[/]\n{escape(name)}\n{row.dtype}")
        errors = "\n".join(
            f"[{'red' if not error <= row.allowed[what] else 'green'}]{error:.1e}[/] / {row.allowed[what]:.1e}"
            for what, error in row.errors.items()
        )
        times = f"{row.plain_seconds / row.seconds:.1f} x"
        table.add_row(
            "\n".join(f"  {what}" for what in row.errors), errors, f"{row.seconds * 1e3:.2f}", times, end_section=True
        )
    return table


def _backends(rows: list[WorkloadErrors]) -> list[str]:
    """Return a line for each backend, with the operators that it served."""
    served: dict[str, dict[str, None]] = {}
    for row in rows:
        served.setdefault(row.backend, {})[row.workload.operator] = None
    return [f"{backend.split(';')[0]}: {', '.join(operators)}" for backend, operators in served.items()]


def _facts(rows: list[WorkloadErrors]) -> dict[str, Any]:
    """Return the facts that --json prints."""
    failures = [failure for row in rows for failure in row.failures]
    lines = [
        {
            "operator": row.workload.operator,
            "workload": row.workload.name,
            "dtype": row.dtype,
            "backend": row.backend,
            "errors": row.errors,
            "allowed": row.allowed,
            "milliseconds": row.seconds * 1e3,
            "plain_torch_milliseconds": row.plain_seconds * 1e3,
        }
        for row in rows
    ]
    return {"right": not failures, "rows": lines, "failures": failures, "beside": mx_driving_portable.beside()}


def _usable(name: str) -> str:
    """Return the type of a device. Copy a number to the device and back first, to check that it works."""
    with ruled(f"--device={name} must be a device that torch can use here", RuntimeError, AssertionError, ImportError):
        device = torch.device(name)
        torch.zeros(1, device=device).item()
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)
    return device.type


def check(
    device: Annotated[str, typer.Option(help="Device to check: cpu, cuda, ...")] = "cpu",
    only: Only = None,
    dtype: DTypes = None,
    threads: Threads = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Only {QUICK} queries, or {CHANNELS} channels, of each example.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare every operator and gradient on this machine with a float64 computation, and time it.

    Each row is a call from the vendor's documents or from a known model. Its error is the largest difference divided by the
    largest true entry. Allowed error: that of the plain PyTorch reference in the same dtype, plus 16 units in the last
    place. The time is one forward and backward, the best of four. The last column is the time of plain PyTorch
    (grid_sample, which mmcv and transformers use on a CPU, or index_add_) divided by ours.

    Exit status 0: every error is allowed, and the CPU has kernels, not only the reference.

    Example: `mx-driving check --dtype float32 --dtype bfloat16 --quick`
    """
    from rich.console import Console
    from rich.progress import Progress

    device = _usable(device)
    names = matching("--only", only, [w.name for w in CHECKED])
    chosen = [w for w in CHECKED if w.name in names]
    use_threads(threads)
    used = torch.get_num_threads()
    where = f"on {device}, {used} thread{'s' * (used > 1)}, torch {torch.__version__}"
    work = [(workload, name) for name in dtype or ["float32"] for workload in chosen]
    effort = f"{len(work)} calls against float64, which takes {'a minute' if quick else 'some minutes'}"
    console = Console(stderr=True) if as_json else open_console(f"mx-driving check {where}: {effort}")
    rows: list[WorkloadErrors] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for workload, name in work:
            progress.update(task, description=f"{workload.name} {name}")
            rows.append(check_one(workload, name, device, quick))
            progress.advance(task)
    failures = [failure for row in rows for failure in row.failures]
    if as_json:
        print_json(_facts(rows))
        raise typer.Exit(bool(failures))
    show(console, _table(rows))
    for line in _backends(rows):
        say(console, escape(line))
    if beside := mx_driving_portable.beside():
        say(console, f"[bold yellow]beside:[/] {escape(beside)}")
    for failure in failures:
        say(console, f"[bold red]wrong:[/] {escape(failure)}")
    if failures:
        raise typer.Exit(1)
    say(console, f"[bold green]all is well[/] {where}")
