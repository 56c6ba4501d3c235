"""`mx-driving bench`: the operators on models' workloads, beside their rivals, in one run."""

from __future__ import annotations

import csv
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from .. import _native
from . import plain
from .check import DType, check_one
from .examples import Example
from .workloads import GEOMETRIC, MULTI_SCALE, WORKLOADS, Workload

Call = Callable[[], Any]
DIRECTIONS = ("forward", "forward + backward")


def _rivals(workload: Workload, peers: bool) -> dict[str, Callable[..., Tensor]]:
    """By name, ours first."""
    found = {
        "mx_driving": getattr(torch.ops.mx_driving, workload.operator).default,
        "plain torch": getattr(plain, workload.operator),
    }
    if peers and workload.operator == MULTI_SCALE:
        try:
            from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore
        except ImportError:
            raise typer.BadParameter("--peers needs torch-ms-deform-attn==0.1.1 (see --help)") from None
        found["torch-ms-deform-attn"] = ms_deform_attn
    return found


def _differentiable(workload: Workload) -> tuple[int, ...]:
    return (0, 4) if workload.operator == GEOMETRIC else (0, 3, 4)


def _calls(workload: Workload, function: Callable[..., Tensor], args: tuple[Tensor, ...], grad: Tensor) -> dict[str, Call]:
    places = _differentiable(workload)
    leaves = tuple(a.detach().requires_grad_(i in places) for i, a in enumerate(args))
    wanted = [leaves[i] for i in places]
    return {
        "forward": lambda: function(*args),
        "forward + backward": lambda: torch.autograd.grad(function(*leaves), wanted, grad),
    }


def interleaved(calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Times of each call, in turn, round after round: at least 3 rounds and about `seconds`. Whatever else the machine does
    falls on all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    began = time.perf_counter()
    while len(next(iter(times.values()))) < 3 or time.perf_counter() - began < seconds:
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - start)
    return times


def measure(workload: Workload, dtype: str, peers: bool, seconds: float) -> list[dict[str, Any]]:
    """One row per direction and rival; correctness first."""
    names = ("value", "weights") if workload.operator == GEOMETRIC else ("value", "locations", "weights")
    example = Example(workload.operator, workload.name, workload.make, _differentiable(workload), names)
    failures = check_one(example, dtype, "cpu", quick=True, timed=False).failures
    if failures:
        raise RuntimeError("; ".join(failures))
    args = workload.make(torch.Generator().manual_seed(0))
    args = tuple(a.to(getattr(torch, dtype)) if a.is_floating_point() else a for a in args)
    rivals = _rivals(workload, peers)
    if dtype in ("float16", "bfloat16"):
        rivals = {"mx_driving": rivals["mx_driving"]}  # no rival computes 16 bits on a CPU
    output = rivals["mx_driving"](*args)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    rows = []
    for direction in DIRECTIONS:
        times = interleaved({n: _calls(workload, f, args, grad)[direction] for n, f in rivals.items()}, seconds)
        medians = {name: statistics.median(t) for name, t in times.items()}
        rows += [
            {
                "workload": workload.name,
                "dtype": dtype,
                "direction": direction,
                "implementation": name,
                "milliseconds": round(median * 1e3, 4),
                "times ours": round(median / medians["mx_driving"], 2),
                "rounds": len(times[name]),
            }
            for name, median in medians.items()
        ]
    return rows


def _table(rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(title="mx-driving bench", title_justify="left")
    for name in ("workload", "dtype", "direction", "implementation"):
        table.add_column(name)
    for name in ("ms", "times ours"):
        table.add_column(name, justify="right")
    previous = None
    for row in rows:
        key = (row["workload"], row["dtype"], row["direction"])
        if previous is not None and key != previous:
            table.add_section()
        first = key if key != previous else ("", "", "")
        table.add_row(*first, row["implementation"], f"{row['milliseconds']:.2f}", f"{row['times ours']:.1f}")
        previous = key
    return table


def machine() -> str:
    """Machine, versions, date: what a number means nothing without."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        models = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        cpu = models[0] if models else cpu
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{date.today()}, {cpu}, {_native.isa()}, {torch.get_num_threads()} threads, {versions}"


def bench(
    workload: Annotated[
        list[str] | None, typer.Option(help="Only rows whose name matches, e.g. 'DETR*'; may be repeated.")
    ] = None,
    dtype: Annotated[list[DType] | None, typer.Option(help="Dtype of the inputs; may be repeated.")] = None,
    threads: Annotated[int, typer.Option(help="Threads; 0: as many as torch uses.")] = 0,
    peers: Annotated[bool, typer.Option("--peers", help="Also torch-ms-deform-attn, where installed.")] = False,
    seconds: Annotated[float, typer.Option(help="Measure each row and direction about this long.")] = 3.0,
    out: Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file.")] = None,
    names: Annotated[bool, typer.Option("--list", help="Print the workloads' names and stop.")] = False,
) -> None:
    """Measure the operators on the workloads of known models, beside plain torch and other packages.

    Each row is checked against the float64 reference first. Then all implementations run in turn, round after round; the
    figures are medians, and "times ours" is how many times longer an implementation takes than this package.

    The peer is installed with `FORCE_CPU=1 pip install --no-build-isolation torch-ms-deform-attn==0.1.1`.

    Example: `mx-driving bench --workload 'Deformable-DETR*' --peers --csv mine.csv`
    """
    from rich.console import Console
    from rich.progress import track

    console = Console()
    chosen = [w for w in WORKLOADS if not workload or any(fnmatch(w.name.lower(), p.lower()) for p in workload)]
    if names or not chosen:
        console.print("\n".join(w.name for w in (chosen or WORKLOADS)), highlight=False)
        raise typer.Exit(0 if names else 1)
    if threads:
        torch.set_num_threads(threads)
    work = [(w, d.value) for d in dtype or [DType.float32] for w in chosen]
    rows: list[dict[str, Any]] = []
    for one, name in track(work, description="measuring", console=console, transient=True):
        rows += measure(one, name, peers, seconds)
    console.print(_table(rows))
    console.print(machine(), highlight=False)
    if out:
        with out.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0], "machine"])
            writer.writeheader()
            writer.writerows({**row, "machine": machine()} for row in rows)
