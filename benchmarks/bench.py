"""Measure operators and modules on the workloads of models, beside plain torch, other packages and the gather loop.

python benchmarks/bench.py --only 'deformable-detr*' --peers --csv mine.csv --plot mine.png
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import figures
import floor
import torch
import typer
from figures import FLOOR, HEAD_MAJOR_FLOOR
from module_workloads import MODULES, ModuleWorkload
from modules import measure_module
from peers import peers as peers_of
from plans import plans
from rich.markup import escape
from rich.progress import track
from traits import of_the_package, traits

from mx_driving._io import open_console, say, show, writable
from mx_driving._measure import report, speed
from mx_driving._measure.report import OURS, Row
from mx_driving._measure.speed import Call
from mx_driving._measure.workloads import WORKLOADS, Args, Workload
from mx_driving._operator.description import OPERATORS
from mx_driving.cli.start import Csv, DTypes, OnlyWorkloads, Seconds, Threads, matching, start, use_threads


def calls_of_floor(operator: str, args: Args, dtype: str, head_major: bool) -> dict[str, Call]:
    calls = {"forward": floor.gather_floor(operator, args, backward=False, head_major=head_major)}
    if dtype in ("float32", "float64"):  # the loop adds in place; our 16-bit gradients do not
        calls["backward"] = floor.gather_floor(operator, args, backward=True, head_major=head_major)
    return calls


def floors(workload: Workload, dtype: str, args: Args) -> speed.Calls:
    """Return the gather loops of a workload, or nothing if their library is not built."""
    if floor.why_not() is not None:
        return {}
    if workload.description.kind == "pooling":
        return {FLOOR: {"forward": floor.pooling_floor(args)}}
    bare, bare_args = workload.bare(args)
    calls = {FLOOR: calls_of_floor(bare, bare_args, dtype, head_major=False)}
    if OPERATORS[bare].blocks == "num_heads":
        calls[HEAD_MAJOR_FLOOR] = calls_of_floor(bare, bare_args, dtype, head_major=True)
    return calls


def measure(one: Workload | ModuleWorkload, dtype: str, peers: bool, seconds: float) -> list[Row]:
    """Return the rows of a workload."""
    if isinstance(one, ModuleWorkload):
        return measure_module(one, peers, seconds, dtype)

    def others(workload: Workload, dtype: str, args: Args, grad: torch.Tensor) -> speed.Calls:
        rivals = peers_of(workload, args) if peers and dtype in ("float32", "float64") else {}
        calls = {name: speed.make_calls(rival, grad) for name, rival in rivals.items()}
        return calls | floors(workload, dtype, args)

    return speed.measure(one, dtype, seconds, others)


def bench(
    only: OnlyWorkloads = None,
    dtype: DTypes = None,
    threads: Threads = 0,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also plain torch under torch.compile, and other packages where installed.")
    ] = False,
    seconds: Seconds = 3.0,
    out: Csv = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the rows to this file.")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="An earlier --csv: end with 1 when our time is 1.25 times as long.", exists=True, dir_okay=False),
    ] = None,
    with_traits: Annotated[
        bool, typer.Option("--traits", help="Also 16-bit / float32, 1 / 2 threads, memory, import and one query.")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the workloads' names and stop.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print how the native kernels would do each workload, and stop.")
    ] = False,
) -> None:
    """Measure the operators on the workloads of known models, beside plain torch and other packages.

    Each row is checked against the float64 reference first. Then all implementations run in turn, round after round. Times are
    medians; "times ours" is the time of an implementation divided by ours.

    "gather loop" is a native loop that gets the rows in advance and only reads and adds them. In the backward it adds to a
    gradient that it first sets to zero. "gather loop, head-major" reads a copy of value in which the rows of a head are
    contiguous. Neither is a lower bound: the package packs rows before it reads them. The loop of bev_pool_v3 has a forward
    only; it reads no depth and writes the channels of a cell side by side. `make native` in a clone builds the loops.

    The backward computes the gradients that the model needs; reference points of a grid need none. Beside an operator with
    logits, "bare operator" is the operator without logits on locations and weights that are computed before. A row
    "Module: ..." is a module of `mx_driving.nn` in float32, or with --dtype bfloat16 under autocast and in bfloat16. Its
    forward runs without gradients; forward and backward computes the gradients of its parameters. "layers + operator" is the
    sum of the module's linear layers and its bare operator, each on inputs that are computed before.

    Install the other package by `FORCE_CPU=1 pip install --no-build-isolation torch-ms-deform-attn==0.1.1`.
    """
    chosen_names = matching("--only", only, [w.name for w in (*WORKLOADS, *MODULES)])
    if names:
        print("\n".join(chosen_names))
        return
    dtypes = dtype or ["float32"]
    chosen = [w for w in WORKLOADS if w.name in chosen_names]
    modules = [w for w in MODULES if w.name in chosen_names]
    calls = [(w, d) for d in dtypes for w in chosen]
    work = [*calls, *((w, d) for w in modules for d in dtypes if d in ("float32", "bfloat16"))]
    use_threads(threads)
    if explain:
        console = open_console(f"bench.py --explain: {report.describe_machine()}")
        for one, name in calls:
            show(console, figures.plans_table(f"{one.name}, {name}", plans(one, name)))
        return
    before = figures.read(compare) if compare else None  # read now: --csv may overwrite this file
    if before is not None:
        figures.in_common(before, {(w.name, d, OURS) for w, d in work})
    if out:
        writable("--csv", out)
    if picture:
        figures.writable_picture("--plot", picture, "bench.py --plot")
    console = open_console(f"bench.py: {report.describe_machine()}")
    if missing := floor.why_not():
        say(console, missing)
    rows: list[Row] = []
    for one, name in track(work, description="measuring", console=console, transient=True):
        rows += measure(one, name, peers, seconds)
    for table in report.make_tables(rows):
        show(console, table)
    if out:
        report.write_rows(rows, out)
    if picture:
        figures.plot(rows, picture)
    if with_traits:
        for one in track(chosen, description="traits", console=console, transient=True):
            show(console, figures.traits_table(one.name, traits(one, seconds)))
        say(console, of_the_package())
    if before is not None:
        sentences = figures.slower(rows, before)
        say(console, escape("\n".join(sentences) or f"no row is more than {figures.SLOWER - 1:.0%} slower than in {compare}"))
        raise typer.Exit(1 if sentences else 0)


app = typer.Typer(add_completion=False)
app.command()(bench)

if __name__ == "__main__":
    start("bench.py", app)
