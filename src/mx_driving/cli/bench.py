"""`mx-driving bench`: time the operators and plain torch on workloads of models."""

from __future__ import annotations

from typing import Annotated

import typer

from .._io import open_console, show, writable
from .._measure import report
from .._measure.report import Row
from .._measure.speed import measure
from .._measure.workloads import WORKLOADS
from .start import Csv, DTypes, OnlyWorkloads, Seconds, Threads, matching, use_threads


def bench(
    only: OnlyWorkloads = None,
    dtype: DTypes = None,
    threads: Threads = 0,
    seconds: Seconds = 3.0,
    out: Csv = None,
    names: Annotated[bool, typer.Option("--list", help="Print the workloads' names and stop.")] = False,
) -> None:
    """Measure the operators on the workloads of known models, beside plain torch.

    Each row is checked against the float64 reference first. Then all implementations run in turn, round after round. Times
    are medians; "times ours" is the time of an implementation divided by ours.

    Only the gradients that the model needs are computed: reference points of a grid have none. "bare operator" is the
    operator without logits, whose locations and weights are already in memory. `python benchmarks/bench.py`, in the
    repository, measures other packages, modules and memory, too.

    Example: `mx-driving bench --only 'deformable-detr*' --csv mine.csv`
    """
    from rich.progress import Progress

    chosen = matching("--only", only, [w.name for w in WORKLOADS])
    if names:
        print("\n".join(chosen))
        return
    work = [(w, name) for name in dtype or ["float32"] for w in WORKLOADS if w.name in chosen]
    use_threads(threads)
    if out:
        writable("--csv", out)
    console = open_console(f"mx-driving bench: {report.describe_machine()}")
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(work))
        for workload, name in work:
            progress.update(task, description=f"{workload.name} {name}")
            rows += measure(workload, name, seconds)
            progress.advance(task)
    for table in report.make_tables(rows):
        show(console, table)
    if out:
        report.write_rows(rows, out)
