"""Instructions and cache misses of a call on processors that are not at hand, by valgrind's cachegrind.

Run: python benchmarks/cache_simulation.py [--library SO] [--only NAME]. Needs valgrind and a C compiler. Cachegrind knows AVX2
but not AVX-512, has no prefetcher, and ignores prefetch instructions: it counts lines that a cache does not hold, not time. Its
last level stands for the second-level cache here. Counts are of one call on one thread, beside inputs that lie in memory.
"""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from mx_driving import _backends, config
from mx_driving._cli_support.problems import in_a_sentence, matching
from mx_driving.measure.workloads import WORKLOADS, Workload

# First-level data and second-level cache: bytes, ways, bytes of a line.
PROCESSORS = {
    "Cascade Lake": ("32768,8,64", "1048576,16,64"),
    "Ice Lake": ("49152,12,64", "1310720,20,64"),
    "Zen 2": ("32768,8,64", "524288,8,64"),
    "Zen 5": ("49152,12,64", "1048576,16,64"),
}
NAMES = ("Deformable-DETR encoder", "BEVFormer spatial cross-attention, 6 x 2500")
NUMBER, NOTHING, TENSOR = range(3)  # what an argument is, as in replay.c
_BYTES = {number: dtype.itemsize for dtype, number in _backends.native._DTYPE.items()}
COUNTS = {
    "instructions": r"I\s+refs:\s+([\d,]+)",
    "first level": r"D1\s+misses:\s+([\d,]+)",
    "second level": r"LLd misses:\s+([\d,]+)",
}


def write(path: Path, workload: Workload, backward: bool) -> None:
    """The arguments of a workload's C function, for replay.c; of the backward with all gradients that a model asks for."""
    args = workload.inputs()
    mask = [i in workload.learned for i in workload.differentiable]
    given = (torch.ones_like(_backends.native.kernel(workload.operator, False)(*args)), *args, mask) if backward else args
    with path.open("wb") as file:

        def to_file(_: bytes, tensors: list[bytes], numbers: Sequence[int]) -> int:
            for argument in (*tensors, *numbers, 1):  # one thread
                file.write(_argument(argument))
            return 0

        _backends.native.kernel(workload.operator, backward, to_file)(*given)


def _argument(argument: bytes | int) -> bytes:
    """One argument as replay.c reads it: its kind, a number, and what follows."""
    if not isinstance(argument, bytes):
        return struct.pack("2q", NUMBER, argument)
    if argument == _backends.native._NOT_GIVEN:
        return struct.pack("2q", NOTHING, 0)
    data, dtype, *sizes = struct.unpack("14q", argument)
    shape, strides = sizes[:6], sizes[6:]
    elements = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True) if n)
    memory = ctypes.string_at(data, elements * _BYTES[dtype])
    return struct.pack("2q", TENSOR, len(memory)) + argument + memory


def counts(replay: Path, library: Path, function: str, arguments: Path, first: str, second: str) -> dict[str, int]:
    """Of one call: two calls beside one."""

    def run(times: int) -> dict[str, int]:
        tool = [
            "valgrind",
            "--tool=cachegrind",
            "--cache-sim=yes",
            f"--D1={first}",
            f"--LL={second}",
            "--cachegrind-out-file=/dev/null",
        ]
        command = [*tool, replay, library, function, "avx2", arguments, str(times)]
        said = subprocess.run(command, check=True, capture_output=True, text=True).stderr
        return {name: int(re.search(pattern, said)[1].replace(",", "")) for name, pattern in COUNTS.items()}

    one, two = run(1), run(2)
    return {name: two[name] - one[name] for name in one}


def main(
    library: Annotated[Path | None, typer.Option(help="Another build of the library.")] | None = None,
    only: Annotated[list[str] | None, typer.Option(help="Names of workloads; may be repeated.")] = None,
) -> None:
    names = matching("--only", only or list(NAMES), [w.name for w in WORKLOADS])
    library = (library or config.library_path()).resolve()
    table = Table(title=f"One call, AVX2, in millions: {library.name}")
    for heading in ("workload", "direction", "processor", *COUNTS):
        table.add_column(heading, justify="left" if heading in ("workload", "direction", "processor") else "right")
    with tempfile.TemporaryDirectory() as folder:
        replay, arguments = Path(folder) / "replay", Path(folder) / "arguments"
        source = Path(__file__).with_name("replay.c")
        subprocess.run(["cc", "-O2", f"-I{config.includedir()}", source, "-o", replay, "-ldl"], check=True)
        wanted = [(w, b) for w in WORKLOADS if w.name in names for b in (False, True)]
        for workload, backward in track(wanted, console=Console(stderr=True)):
            write(arguments, workload, backward)
            function = f"mxd_{workload.operator}{'_backward' if backward else ''}"
            for processor, caches in PROCESSORS.items():
                found = counts(replay, library, function, arguments, *caches)
                cells = (f"{n / 1e6:,.1f}" for n in found.values())
                table.add_row(workload.name, "backward" if backward else "forward", processor, *cells)
    Console().print(table)


if __name__ == "__main__":
    with in_a_sentence("cache_simulation.py"):
        typer.run(main)
