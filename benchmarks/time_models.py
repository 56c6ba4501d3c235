"""Compare and time the deformable models of the installed transformers before and after `mx_driving.patch`.

    python benchmarks/time_models.py --mode float32 --mode autocast --mode bfloat16 --csv benchmarks/results/mine.csv

The models have default configurations and random weights. The input is scikit-learn's photograph. Nothing is downloaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Annotated

import models
import torch
import typer

from mx_driving._io import writable
from mx_driving._measure.report import Row, describe_machine
from mx_driving.cli.start import Csv, Only, Seconds, Threads, matching, one_of, start, use_threads

MODES = ("float32", "autocast", "bfloat16")


def cast(subject: models.Subject) -> None:
    models.forget(subject.model)
    subject.model.bfloat16()
    subject.inputs = {n: t.bfloat16() if t.is_floating_point() else t for n, t in subject.inputs.items()}


def rows_of_modes(subject: models.Subject, modes: list[str], seconds: float) -> Iterator[Row]:
    """Yield the medians of a whole model before and after, in each mode. The model stays in bfloat16, the last mode."""
    for mode in sorted(modes, key=lambda mode: mode == "bfloat16"):
        if mode == "bfloat16":
            cast(subject)
        with torch.autocast("cpu", torch.bfloat16, enabled=mode == "autocast"):
            before, after, _ = models.before_and_after(subject, seconds)
        times = {"before s": f"{before:.3f}", "after s": f"{after:.3f}", "speed-up": f"{before / after:.2f}"}
        yield {"model": models.TITLES.get(subject.name, subject.name), "mode": mode, **times}


def main(
    only: Only = None,
    height: models.Height = 480,
    width: models.Width = 640,
    threads: Threads = 0,
    seconds: Seconds = 4.0,
    mode: Annotated[
        list[str] | None,
        typer.Option(parser=one_of(*MODES), help="Time whole models alone, float32, autocast or bfloat16. May be repeated."),
    ] = None,
    csv: Csv = None,
) -> None:
    """Compare and time every deformable model of the installed transformers, before and after `mx_driving.patch`.

    A difference is a fraction of the largest magnitude. In two-stage models queries with nearly equal scores exchange their
    ranks: such queries are counted as "off" instead. Times are lower quartiles in milliseconds. For
    "cores" only the sampling is replaced, for "modules" whole attention modules; "gain" is the time of "cores" divided by that
    of "modules". Attention modules and cores are also timed alone, on the inputs that they get in the model. With --mode,
    times are medians in seconds of the whole model.
    """
    models.need_transformers("time_models.py")
    import transformers

    warnings.filterwarnings("ignore", module="transformers")
    names = matching("--only", only, models.carriers())
    use_threads(threads)
    if csv:
        writable("--csv", csv)
    print(f"time_models.py, {height} x {width}: {describe_machine()}", flush=True)

    def rows() -> Iterator[Row]:
        for name in names:
            subject = models.build(name, height, width)
            if mode:
                yield from rows_of_modes(subject, mode, seconds)
                continue
            difference, off = models.output_difference(subject)
            yield {"model": name, "difference": f"{difference:.0e}", "off": off, **models.time_parts(subject, seconds)}

    models.print_rows(rows(), csv, f"transformers {transformers.__version__}", f"{height} x {width}", "random weights")


if __name__ == "__main__":
    start("time_models.py", main)
