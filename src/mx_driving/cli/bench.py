"""`mx-driving bench`: the operators on models' workloads, beside their rivals, in one run."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape
from torch import Tensor

from .._programs.files import writable, writable_picture
from .._programs.problems import Problem, matching
from .._programs.show import open_console, say, show
from ..measure import plain, report
from ..measure.examples import Example
from ..measure.floor import gather_floor
from ..measure.report import OURS, Row
from ..measure.timing import interleaved
from ..measure.traits import of_the_package, traits
from ..measure.workloads import GEOMETRIC, MULTI_SCALE, WORKLOADS, Workload
from .check import DType, check_one

Call = Callable[[], Any]
FLOOR = "gather floor"


def _rivals(workload: Workload, args: tuple[Tensor, ...], peers: bool) -> dict[str, Callable[..., Tensor]]:
    """By name, ours first."""
    form = getattr(plain, workload.operator)
    found = {OURS: getattr(torch.ops.mx_driving, workload.operator).default, "plain torch": form}
    if peers:
        torch.compiler.reset()
        shapes, starts = args[1], args[2]  # of one model always the same: constants to the compiler, as people write it
        core = torch.compile(lambda value, locations, weights: form(value, shapes, starts, locations, weights))
        found["torch.compile"] = lambda value, _shapes, _starts, locations, weights: core(value, locations, weights)
    if peers and workload.operator == MULTI_SCALE:
        try:
            from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore
        except ImportError:
            return found
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


def _backward(workload: Workload, args: tuple[Tensor, ...], grad: Tensor) -> Call:
    operator = getattr(torch.ops.mx_driving, workload.operator + "_backward").default
    return lambda: operator(grad, *args, [True] * len(_differentiable(workload)))


def measure(workload: Workload, dtype: str, peers: bool, seconds: float) -> list[Row]:
    """One row per direction and implementation; correctness first."""
    names = ("value", "weights") if workload.operator == GEOMETRIC else ("value", "locations", "weights")
    example = Example(workload.operator, workload.name, workload.make, _differentiable(workload), names)
    failures = check_one(example, dtype, "cpu", quick=True, timed=False).failures
    if failures:
        raise Problem("; ".join(failures))
    args = workload.make(torch.Generator().manual_seed(0))
    args = tuple(a.to(getattr(torch, dtype)) if a.is_floating_point() else a for a in args)
    rivals = _rivals(workload, args, peers)
    if dtype in ("float16", "bfloat16"):
        rivals = {OURS: rivals[OURS]}  # no rival computes 16 bits on a CPU
    output = rivals[OURS](*args)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output.dtype)
    calls = {name: _calls(workload, rival, args, grad) for name, rival in rivals.items()}
    calls[OURS]["backward"] = _backward(workload, args, grad)
    calls[FLOOR] = {"forward": gather_floor(workload.operator, args, backward=False)}
    if dtype in ("float32", "float64"):  # the floor adds up in place, which no 16-bit gradient does
        calls[FLOOR]["backward"] = gather_floor(workload.operator, args, backward=True)
    rows = []
    for direction in calls[OURS]:
        times = interleaved({name: by[direction] for name, by in calls.items() if direction in by}, seconds)
        medians = {name: statistics.median(t) for name, t in times.items()}
        rows += [
            {
                "workload": workload.name,
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


def bench(
    workload: Annotated[
        list[str] | None, typer.Option(help="Only rows whose name matches, e.g. 'DETR*'; may be repeated.")
    ] = None,
    dtype: Annotated[list[DType] | None, typer.Option(help="Dtype of the inputs; may be repeated.")] = None,
    threads: Annotated[int, typer.Option(min=0, help="Threads; 0: as many as torch uses.")] = 0,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also plain torch under torch.compile, and torch-ms-deform-attn where installed.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0, help="Measure each row and direction about this long.")] = 3.0,
    out: Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the rows as bars to this file.")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="An earlier --csv: end with 1 when a row of ours got slower.", exists=True, dir_okay=False),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="For --compare: 0.25 lets a row take 1.25 times as long.")] = 0.25,
    with_traits: Annotated[
        bool, typer.Option("--traits", help="Also 16-bit / float32, 1 / 2 threads, memory, import and one query.")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the workloads' names and stop.")] = False,
) -> None:
    """Measure the operators on the workloads of known models, beside plain torch and other packages.

    Each row is checked against the float64 reference first. Then all implementations run in turn, round after round; the
    figures are medians, and "times ours" is how many times longer an implementation takes than this package. "gather
    floor" is a native loop that knows the rows beforehand and only reads and adds them: what memory allows.

    The peer is installed with `FORCE_CPU=1 pip install --no-build-isolation torch-ms-deform-attn==0.1.1`.

    Example: `mx-driving bench --workload 'Deformable-DETR*' --peers --csv mine.csv --plot mine.png`
    """
    from rich.progress import track

    wanted = matching("--workload", workload, [w.name for w in WORKLOADS])
    if names:
        print("\n".join(wanted))
        return
    chosen = [w for w in WORKLOADS if w.name in wanted]
    work = [(w, d.value) for d in dtype or [DType.float32] for w in chosen]
    before = report.read(compare) if compare else None  # first: it may be the file that --csv overwrites
    if before is not None:
        report.in_common(before, {(w.name, d, OURS) for w, d in work})
    if out:
        writable("--csv", out)
    if picture:
        writable_picture("--plot", picture, "mx-driving bench --plot")
    if threads:
        torch.set_num_threads(threads)
    console = open_console(f"mx-driving bench: {report.machine()}")
    rows: list[Row] = []
    for one, name in track(work, description="measuring", console=console, transient=True):
        rows += measure(one, name, peers, seconds)
    for table in report.tables(rows):
        show(console, table)
    if out:
        report.write(rows, out)
    if picture:
        report.plot(rows, picture)
    if with_traits:
        for one in track(chosen, description="traits", console=console, transient=True):
            show(console, report.traits_table(one.name, traits(one, seconds)))
        say(console, of_the_package())
    if before is not None:
        found = report.slower(rows, before, tolerance)
        say(console, escape("\n".join(found) or f"no row is more than {tolerance:.0%} slower than in {compare}"))
        raise typer.Exit(1 if found else 0)
