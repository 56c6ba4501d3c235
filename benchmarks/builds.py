"""Compare the times of native libraries in one process. Run: python benchmarks/builds.py OLD.so NEW.so

Each library is loaded several times, because its address can change its times: processors predict by the addresses of
instructions. A cell has two times in milliseconds: the best time of the best copy and of the worst copy. If they differ by
more than noise, the address decides. Without arguments, the program measures the installed library alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import mx_driving  # noqa: F401  registers the operators
from mx_driving import _backends, config
from mx_driving._measure.speed import interleaved
from mx_driving._measure.workloads import WORKLOADS, Workload
from mx_driving._operator.description import OPERATORS
from mx_driving.cli.start import OnlyWorkloads, Seconds, Threads, matching, start, use_threads


def load(library: Path, folder: Path, number: int) -> ctypes.CDLL:
    copy = folder / f"{number}-{library.name}"
    shutil.copy(library, copy)
    return ctypes.CDLL(str(copy))


@contextlib.contextmanager
def using(library: ctypes.CDLL) -> Iterator[None]:
    before = _backends.native.loaded
    _backends.native.loaded = lambda: library  # a mock's own calls would be measured, too
    try:
        yield
    finally:
        _backends.native.loaded = before


def calls(workload: Workload):
    args = workload.inputs()
    forward, backward = (_backends.native.Kernel(workload.operator, is_backward) for is_backward in (False, True))
    grad = torch.randn_like(forward(*args))
    others = len(OPERATORS[workload.operator].differentiable) - 1  # the other differentiable inputs, after value
    return {
        "forward": lambda: forward(*args),
        "gradient of value": lambda: backward(grad, *args, [True, *[False] * others]),
        "gradients of samples": lambda: backward(grad, *args, [False, *[True] * others]),
        "all gradients": lambda: backward(grad, *args, [True] * (1 + others)),
    }


def main(
    libraries: Annotated[list[Path] | None, typer.Argument(help="libmx_driving.so of each build.", exists=True)] = None,
    only: OnlyWorkloads = None,
    copies: Annotated[int, typer.Option(help="How often each library is loaded.")] = 4,
    threads: Threads = 1,
    seconds: Seconds = 3.0,
) -> None:
    use_threads(threads)
    builds = libraries or [config.library_path()]
    names = matching("--only", only, [w.name for w in WORKLOADS])
    chosen = [w for w in WORKLOADS if w.name in names]
    table = Table("workload", "call", *(f"{build.parent.name}/{build.name}" for build in builds))
    with tempfile.TemporaryDirectory() as folder:
        loaded = {f"{b} {c}": load(builds[b], Path(folder), b * copies + c) for b in range(len(builds)) for c in range(copies)}
        for one in track(chosen, console=Console(stderr=True), transient=True):
            for what, call in calls(one).items():
                times_of_copies = interleaved(dict.fromkeys(loaded, call), seconds, lambda key: using(loaded[key]))
                milliseconds = {key: min(times) * 1e3 for key, times in times_of_copies.items()}
                of_build = [[milliseconds[f"{b} {c}"] for c in range(copies)] for b in range(len(builds))]
                table.add_row(one.name, what, *(f"{min(best):.3f} to {max(best):.3f}" for best in of_build))
    console = Console()
    console.print(table, width=max(console.width, 120))


if __name__ == "__main__":
    start("builds.py", main)
