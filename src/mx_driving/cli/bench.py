"""`mx-driving bench`: the operators on models' workloads, beside their rivals, in one run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from .._cli_support.files import writable, writable_picture
from .._cli_support.problems import matching
from .._cli_support.show import open_console, say, show
from ..measure import floor, report
from ..measure.module_workloads import MODULES, ModuleWorkload
from ..measure.modules import measure_module
from ..measure.plans import plans
from ..measure.report import OURS, Row
from ..measure.speed import measure as measure_call
from ..measure.traits import of_the_package, traits
from ..measure.workloads import WORKLOADS, Workload
from .options import DType, DTypes, OnlyWorkloads, Seconds, Threads, use_threads


def measure(one: Workload | ModuleWorkload, dtype: str, peers: bool, seconds: float) -> list[Row]:
    """The rows of a workload."""
    if isinstance(one, ModuleWorkload):
        return measure_module(one, peers, seconds)
    return measure_call(one, dtype, peers, seconds)


def bench(
    only: OnlyWorkloads = None,
    dtype: DTypes = None,
    threads: Threads = 0,
    peers: Annotated[
        bool, typer.Option("--peers", help="Also plain torch under torch.compile, and other packages where installed.")
    ] = False,
    seconds: Seconds = 3.0,
    out: Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file.")] = None,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw the rows to this file.")] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="An earlier --csv: end with 1 when a row of ours got slower.", exists=True, dir_okay=False),
    ] = None,
    tolerance: Annotated[float, typer.Option(min=0, help="For --compare: 0.25 lets a row take 1.25 times as long.")] = 0.25,
    with_traits: Annotated[
        bool, typer.Option("--traits", help="Also 16-bit / float32, 1 / 2 threads, memory, import and one query.")
    ] = False,
    names: Annotated[bool, typer.Option("--list", help="Print the workloads' names and stop.")] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print how the native kernels would do each workload, and stop.")
    ] = False,
) -> None:
    """Measure the operators on the workloads of known models, beside plain torch and other packages.

    Each row is checked against the float64 reference first. Then all implementations run in turn, round after round; the
    figures are medians, and "times ours" is how many times longer an implementation takes than this package. "gather
    floor" is a native loop that is given the rows beforehand and only reads and adds them (backward, into a gradient that it
    sets to zero): what memory allows. "gather floor, head-major" is the same where a head's rows lie side by side, the best
    layout known. That of bev_pool_v3 is of its forward alone: it reads no depth and writes the channels of a cell side by side.
    A wheel does not hold them; `make native` in the source tree builds them.

    Gradients are those that the model needs: reference points of a grid have none. Beside an operator with logits, "bare
    operator" is given locations and weights that are ready. A row "Module: ..." is a module of `mx_driving.nn`, always in
    float32: its forward without gradients, and forward and backward with those of its parameters. "layers + operator" runs
    its linear layers and its bare operator apart, on inputs that are ready.

    The peer is installed with `FORCE_CPU=1 pip install --no-build-isolation torch-ms-deform-attn==0.1.1`.

    Example: `mx-driving bench --only 'deformable-detr*' --peers --csv mine.csv --plot mine.png`
    """
    from rich.progress import track

    wanted = matching("--only", only, [w.name for w in (*WORKLOADS, *MODULES)])
    if names:
        print("\n".join(wanted))
        return
    dtypes = [d.value for d in dtype or [DType.float32]]
    chosen = [w for w in WORKLOADS if w.name in wanted]
    modules = [w for w in MODULES if w.name in wanted]
    calls = [(w, d) for d in dtypes for w in chosen]
    work = [*calls, *((w, d) for w in modules for d in dtypes if d == DType.float32.value)]
    use_threads(threads)
    if explain:
        console = open_console(f"mx-driving bench --explain: {report.machine()}")
        for one, name in calls:
            show(console, report.plans_table(f"{one.name}, {name}", plans(one, name)))
        return
    before = report.read(compare) if compare else None  # read first: --csv may overwrite this file
    if before is not None:
        report.in_common(before, {(w.name, d, OURS) for w, d in work})
    if out:
        writable("--csv", out)
    if picture:
        writable_picture("--plot", picture, "mx-driving bench --plot")
    console = open_console(f"mx-driving bench: {report.machine()}")
    if missing := floor.why_not():
        say(console, missing)
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
