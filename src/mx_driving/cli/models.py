"""`mx-driving models`: the installed transformers' deformable models before and after `mx_driving.patch`."""

from __future__ import annotations

import warnings
from typing import Annotated, Any

import typer
from rich import box

from .._programs.problems import matching
from .._programs.show import open_console, show
from ..measure.models import Subject, build, carriers, compare, need_transformers, output_difference, time_model
from ..measure.report import machine
from .options import Only, Seconds, Threads, use_threads


def models(
    only: Only = None,
    height: Annotated[int, typer.Option(min=1, help="Height of the photograph in pixels.")] = 480,
    width: Annotated[int, typer.Option(min=1, help="Width of the photograph in pixels.")] = 640,
    threads: Threads = 0,
    seconds: Seconds = 4.0,
    gradients: Annotated[bool, typer.Option(help="Compare gradients too, which takes longer than the times.")] = False,
) -> None:
    """Compare and time every deformable model of the installed transformers, before and after `mx_driving.patch`.

    The models have default configurations and random weights, and see a photograph of scikit-learn's. Nothing is downloaded.
    A difference is a share of the largest magnitude. Queries that differ by more than 1e-3 are counted as "off" instead: in
    two-stage models they are near ties of the ranking. "Core" is the sampling alone: the same inputs through grid_sample and
    through the operator.
    """
    from rich.progress import track

    need_transformers("mx-driving models")
    warnings.filterwarnings("ignore", module="transformers")
    names = matching("--only", only, carriers())
    use_threads(threads)
    console = open_console(f"mx-driving models, {height} x {width}: {machine()}")
    table = _table()
    try:  # what is measured is shown even when a later model fails
        for name in track(names, description="measuring", console=console, transient=True):
            table.add_row(name, *_row(build(name, height, width), seconds, gradients))
    finally:
        show(console, table)


def _table() -> Any:
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))  # nine columns side by side in 80 characters
    table.add_column("model")
    for column in ("differs\nby", "off", "ms\nbefore", "ms\nafter", "speed-up", "core\nbefore", "core\nafter", "speed-up"):
        table.add_column(column, justify="right")
    return table


def _row(subject: Subject, seconds: float, gradients: bool) -> list[str]:
    difference, off = output_difference(subject)
    if gradients:
        difference = max(difference, compare(subject)[1])
    before, after, core_before, core_after = time_model(subject, seconds)
    numbers = [f"{difference:.0e}", str(off), f"{before:.0f}", f"{after:.0f}", f"{before / after:.2f}"]
    return [*numbers, f"{core_before:.1f}", f"{core_after:.1f}", f"{core_before / core_after:.1f}"]
