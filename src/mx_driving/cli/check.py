"""`mx-driving check`: compare every operator with the float64 reference."""

from __future__ import annotations

import re
from typing import Annotated

import torch
import typer
from rich.markup import escape

import mx_driving_portable

from .._io import grid, open_console, print_json, say, show
from .._measure.accuracy import CHANNELS, QUICK, WorkloadErrors, check_one
from .._measure.workloads import CHECKED
from .._operator.rules import ruled
from .start import DTypes, Json, Only, Threads, matching, use_threads


def check(
    device: Annotated[str, typer.Option(help="Device to check: cpu, cuda, xpu, mps, ...")] = "cpu",
    only: Only = None,
    dtype: DTypes = None,
    threads: Threads = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"Only {QUICK} queries, or {CHANNELS} channels, of each example.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare every operator and gradient on this machine with a float64 computation, and time it.

    Each row is a call from the vendor's documents or from a known model. Errors are divided by the largest true entry. The
    table has the entry that uses most of its allowed error. The allowed error is that of the plain PyTorch reference in
    float32, plus 16 units in the last place of float32, plus half a unit in the last place of the entry in 16 bits. The
    time is one forward and backward, the best of four. The last column is the time of plain PyTorch (grid_sample, which
    mmcv and transformers use on a CPU, or index_add_) divided by ours.

    Exit status 0: every error is allowed, and the CPU has kernels, not only the reference.

    Example: `mx-driving check --dtype float32 --dtype bfloat16 --quick`
    """
    from rich.console import Console
    from rich.progress import Progress

    # Copy a number to the device and back, to check that it works.
    with ruled(f"--device={device} must be a device that torch can use here", RuntimeError, AssertionError, ImportError):
        chosen_device = torch.device(device)
        torch.zeros(1, device=chosen_device).item()
        if chosen_device.index and chosen_device.type != "cpu":
            torch.get_device_module(chosen_device).set_device(chosen_device)
    device = chosen_device.type
    names = matching("--only", only, [w.name for w in CHECKED])
    chosen = [w for w in CHECKED if w.name in names]
    use_threads(threads)
    num_threads = torch.get_num_threads()
    where = f"on {device}, {num_threads} thread{'s' * (num_threads > 1)}, torch {torch.__version__}"
    work = [(workload, name) for name in dtype or ["float32"] for workload in chosen]
    effort = f"{len(work)} calls against float64, which takes {'a minute' if quick else 'some minutes'}"
    console = Console(stderr=True) if as_json else open_console(f"mx-driving check {where}: {effort}")
    results: list[WorkloadErrors] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for workload, name in work:
            progress.update(task, description=f"{workload.name} {name}")
            results.append(check_one(workload, name, device, quick))
            progress.advance(task)
    failures = [failure for result in results for failure in result.failures]
    if as_json:
        rows = [
            {
                "operator": result.workload.operator,
                "workload": result.workload.name,
                "dtype": result.dtype,
                "backend": result.backend,
                "errors": result.errors,
                "allowed": result.allowed,
                "milliseconds": result.seconds * 1e3,
                "plain_torch_milliseconds": result.plain_seconds * 1e3,
            }
            for result in results
        ]
        print_json({"right": not failures, "rows": rows, "failures": failures, "beside": mx_driving_portable.beside()})
        raise typer.Exit(bool(failures))
    # A table within 80 columns. The operator, workload and dtype of a result stand above its errors.
    table = grid(None, {"largest error of": 27, "error / allowed": 17}, {"ms": 8, "speed-up over\nplain torch": 13})
    for result in results:
        title = re.sub(r" (?=[\[\d])", "\n", result.workload.name, count=1)  # The sizes get a line of their own.
        operator = result.workload.operator.replace("_with_logits", "\n  _with_logits")  # two lines, for room for the times
        table.add_row(f"[bold]{operator}[/]\n{escape(title)}\n{result.dtype}")
        errors = "\n".join(
            f"[{'red' if not error <= result.allowed[name] else 'green'}]{error:.1e}[/] / {result.allowed[name]:.1e}"
            for name, error in result.errors.items()
        )
        names = "\n".join(f"  {name}" for name in result.errors)
        speed_up = f"{result.plain_seconds / result.seconds:.1f} x"
        table.add_row(names, errors, f"{result.seconds * 1e3:.2f}", speed_up, end_section=True)
    show(console, table)
    served: dict[str, dict[str, None]] = {}  # backend, without its dtypes -> its operators
    for result in results:
        served.setdefault(result.backend.partition(";")[0], {})[result.workload.operator] = None
    for backend, operators in served.items():
        say(console, escape(f"{backend}: {', '.join(operators)}"))
    if beside := mx_driving_portable.beside():
        say(console, f"[bold yellow]beside:[/] {escape(beside)}")
    for failure in failures:
        say(console, f"[bold red]wrong:[/] {escape(failure)}")
    if failures:
        raise typer.Exit(1)
    say(console, f"[bold green]all is well[/] {where}")
