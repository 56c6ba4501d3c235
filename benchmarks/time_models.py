"""Deformable models of the installed transformers before and after `mx_driving.patch`: `python benchmarks/time_models.py`."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal

import torch
import typer
from models import Subject, Times, build, carriers, compare, need_transformers, output_difference, time_model
from rich import box

from mx_driving._cli_support.problems import matching
from mx_driving._cli_support.show import open_console, show
from mx_driving._cli_support.start import start
from mx_driving._measure.report import machine
from mx_driving.cli.options import Only, Seconds, Threads, use_threads


def models(
    only: Only = None,
    height: Annotated[int, typer.Option(min=1, help="Height of the photograph in pixels.")] = 480,
    width: Annotated[int, typer.Option(min=1, help="Width of the photograph in pixels.")] = 640,
    threads: Threads = 0,
    seconds: Seconds = 4.0,
    gradients: Annotated[bool, typer.Option(help="Compare gradients too, which takes longer than the times.")] = False,
    mode: Annotated[Literal["float32", "autocast", "bfloat16"], typer.Option(help="Autocast is to bfloat16.")] = "float32",
) -> None:
    """Compare and time every deformable model of the installed transformers, before and after `mx_driving.patch`.

    The models have default configurations and random weights, and see a photograph of scikit-learn's. Nothing is downloaded.
    A difference is a fraction of the largest magnitude, and is taken in float32 alone. Queries that differ by more than 1e-3
    are counted as "off" instead: in two-stage models they are near ties of the ranking. Times are lower quartiles in
    milliseconds. "Cores" has the sampling replaced alone, "modules" whole attention modules; "gain" is the one over the
    other. Below are the attention modules alone, and the sampling alone, through grid_sample and through the operator, on
    the inputs that the model gives them.
    """
    from rich.progress import track

    need_transformers("time_models.py")
    warnings.filterwarnings("ignore", module="transformers")
    names = matching("--only", only, carriers())
    use_threads(threads)
    console = open_console(f"time_models.py, {height} x {width}, {mode}: {machine()}")
    whole, parts = _table(_WHOLE), _table(_PARTS)
    try:  # what is measured is shown even when a later model fails
        for name in track(names, description="measuring", console=console, transient=True):
            subject = build(name, height, width)
            if mode == "bfloat16":
                subject.model.bfloat16()
                subject.inputs = {n: t.bfloat16() if t.is_floating_point() else t for n, t in subject.inputs.items()}
            with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
                difference = _difference(subject, gradients) if mode == "float32" else ["", ""]
                of_whole, of_parts = _rows(subject, seconds)
            whole.add_row(name, *difference, *of_whole)
            parts.add_row(name, *of_parts)
    finally:
        show(console, whole)
        show(console, parts)


_WHOLE = ("differs\nby", "off", "whole\nbefore", "\ncores", "\nmodules", "\nspeed-up", "\ngain")
_PARTS = ("modules\nbefore", "\ncores", "\nmodules", "\nspeed-up", "\ngain", "cores\nbefore", "\nafter", "\nspeed-up")


def _table(columns: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))  # nine columns side by side in 80 characters
    table.add_column("model")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _difference(subject: Subject, gradients: bool) -> list[str]:
    difference, off = output_difference(subject)
    return [f"{max(difference, compare(subject)[1]) if gradients else difference:.0e}", str(off)]


def _rows(subject: Subject, seconds: float) -> tuple[list[str], list[str]]:
    """Of the whole model, and of its parts."""
    found = time_model(subject, seconds)
    before, after = found.cores
    cores = [_milliseconds(before), _milliseconds(after), f"{before / after:.1f}"]
    return _cells(found.whole), [*_cells(found.modules), *cores]


def _cells(times: Times) -> list[str]:
    milliseconds = [_milliseconds(time) for time in (times.before, times.cores, times.modules)]
    return [*milliseconds, f"{times.speed_up:.2f}", f"{times.gain:.2f}"]


def _milliseconds(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"


if __name__ == "__main__":
    start("time_models.py", models)
