"""`mx-driving models`: deformable models of the installed libraries before and after `mx_driving.patch`."""

from __future__ import annotations

import warnings
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box

from .._programs.problems import Problem, matching
from .._programs.show import grid, open_console, say, show
from ..measure.libraries import LIBRARIES, need_library, row
from ..measure.models import Subject, Times, build, carriers, compare, need_transformers, output_difference, time_model
from ..measure.report import machine, write
from .options import Only, Seconds, Threads, use_threads

_LIBRARY = f"Models of this library instead: {', '.join(LIBRARIES)}; may be repeated."


def models(
    only: Only = None,
    height: Annotated[int, typer.Option(min=1, help="Height of the photograph in pixels.")] = 480,
    width: Annotated[int, typer.Option(min=1, help="Width of the photograph in pixels.")] = 640,
    threads: Threads = 0,
    seconds: Seconds = 4.0,
    gradients: Annotated[bool, typer.Option(help="Compare gradients too, which takes longer than the times.")] = False,
    library: Annotated[list[str] | None, typer.Option(metavar="NAME", help=_LIBRARY)] = None,
    onnx: Annotated[bool, typer.Option(help="With --library: export each patched model and run it in onnxruntime.")] = False,
    csv: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
) -> None:
    """Compare and time every deformable model of the installed transformers, before and after `mx_driving.patch`.

    The models have default configurations and random weights, and see a photograph of scikit-learn's. Nothing is downloaded.
    A difference is a share of the largest magnitude. Queries that differ by more than 1e-3 are counted as "off" instead: in
    two-stage models they are near ties of the ranking. Times are lower quartiles in milliseconds. "Cores" has the sampling
    replaced alone, "modules" whole attention modules; "gain" is the one over the other. Below are the attention modules
    alone, and the sampling alone, through grid_sample and through the operator, on the inputs that the model gives them.

    With `--library` there is one table of a line for each model: what is replaced, the difference in float64, and medians of
    the whole model's time before and after.
    """
    from rich.progress import track

    if library:
        _of_libraries(
            matching("--library", library, LIBRARIES), only, (height, width), threads, (seconds, gradients, onnx), csv
        )
        return
    if onnx or csv:
        raise Problem("--onnx and --csv must come with --library; got none")
    need_transformers("mx-driving models")
    warnings.filterwarnings("ignore", module="transformers")
    names = matching("--only", only, carriers())
    use_threads(threads)
    console = open_console(f"mx-driving models, {height} x {width}: {machine()}")
    whole, parts = _table(_WHOLE), _table(_PARTS)
    try:  # what is measured is shown even when a later model fails
        for name in track(names, description="measuring", console=console, transient=True):
            of_whole, of_parts = _rows(build(name, height, width), seconds, gradients)
            whole.add_row(name, *of_whole)
            parts.add_row(name, *of_parts)
    finally:
        show(console, whole)
        show(console, parts)


def _of_libraries(
    names: list[str],
    only: list[str] | None,
    sides: tuple[int, int],
    threads: int,
    how: tuple[float, bool, bool],
    csv: Path | None,
) -> None:
    """A line for each model, printed when it is measured."""
    builders = {(name, model): build for name in names for model, build in need_library(name).models().items()}
    chosen = matching("--only", only, [model for _, model in builders])
    use_threads(threads)
    console = open_console(f"mx-driving models, {sides[0]} x {sides[1]}: {machine()}")
    rows = []
    try:
        for (name, model), build in builders.items():
            if model in chosen:
                rows.append(row(LIBRARIES[name], model, build(*sides), *how))
                say(
                    console,
                    "{library}, {model}: {speed-up} times in {rounds} rounds, differs by {difference}".format(**rows[-1]),
                )
    finally:  # what is measured is shown even when a later model fails
        if rows:
            _show_libraries(console, rows)
            if csv:
                write(rows, csv)


def _show_libraries(console: Any, rows: list[dict[str, Any]]) -> None:
    columns = {"difference": "differs by", "off": "off", "before ms": "before", "after ms": "after", "speed-up": "speed-up"}
    table = grid(None, {"model": 20, "replaced": 20}, dict.fromkeys(columns.values(), 6) | {"ONNX": 4})
    for name, some in groupby(rows, lambda found: found["library"]):
        table.add_section()
        table.add_row(name)
        for found in some:
            table.add_row(found["model"], found["replaced"], *(str(found[c]) for c in columns), found["onnx"].partition(":")[0])
    show(console, table)
    for found in rows:
        if found["onnx"].startswith("no:"):
            say(console, f"{found['model']} in ONNX: {found['onnx'][4:]}")


_WHOLE = ("differs\nby", "off", "whole\nbefore", "\ncores", "\nmodules", "\nspeed-up", "\ngain")
_PARTS = ("modules\nbefore", "\ncores", "\nmodules", "\nspeed-up", "\ngain", "cores\nbefore", "\nafter", "\nspeed-up")


def _table(columns: tuple[str, ...]) -> Any:
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0))  # nine columns side by side in 80 characters
    table.add_column("model")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _rows(subject: Subject, seconds: float, gradients: bool) -> tuple[list[str], list[str]]:
    """Of the whole model, and of its parts."""
    difference, off = output_difference(subject)
    if gradients:
        difference = max(difference, compare(subject)[1])
    found = time_model(subject, seconds)
    before, after = found.cores
    cores = [_milliseconds(before), _milliseconds(after), f"{before / after:.1f}"]
    return [f"{difference:.0e}", str(off), *_cells(found.whole)], [*_cells(found.modules), *cores]


def _cells(times: Times) -> list[str]:
    milliseconds = [_milliseconds(time) for time in (times.before, times.cores, times.modules)]
    return [*milliseconds, f"{times.speed_up:.2f}", f"{times.gain:.2f}"]


def _milliseconds(time: float) -> str:
    return f"{time:.1f}" if time < 100 else f"{time:.0f}"
