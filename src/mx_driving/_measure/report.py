"""Write measurements as tables and as CSV files."""

from __future__ import annotations

import platform
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from functools import cache
from itertools import chain, groupby, repeat
from pathlib import Path
from typing import Any

import torch

from .. import _backends
from .._io import grid, write_csv

Row = dict[str, Any]
OURS = "mx_driving"
BARE = "bare operator"  # timed beside an operator with logits, on locations and weights that are computed before
PLAIN = "plain torch"


@cache
def _describe_commit() -> str:
    """Return the commit of the source tree that this package runs from; "" for a wheel, even inside a repository of the user.
    The commit is read once, because a report that overwrites a tracked file makes the commit dirty."""
    git = ["git", "-C", str(Path(__file__).parent)]
    try:
        subprocess.run([*git, "ls-files", "--error-unmatch", Path(__file__).name], capture_output=True, check=True)
        described = subprocess.run([*git, "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", commit {described.stdout.strip()}"


def find_processor() -> str:
    """Return the processor's name, and on Linux its family and model, because virtual machines often hide the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    facts = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}
    if "model name" in facts:
        return "{model name} (family {cpu family}, model {model})".format_map(defaultdict(lambda: "?", facts))
    return platform.processor() or platform.machine()


def describe_machine() -> str:
    """Return date, machine, versions and commit of a measurement."""
    kernels = f"{_backends.native.isa()}, {torch.get_num_threads()} threads"
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    return f"{date.today()}, {find_processor()}, {kernels}, {versions}{_describe_commit()}"


def make_tables(rows: list[Row]) -> Iterator[Any]:
    """Yield a table for each workload and dtype. All tables have the same width."""
    for (workload, dtype), workload_rows in groupby(rows, lambda row: (row["workload"], row["dtype"])):
        table = grid(f"{workload}, {dtype}", {"direction": 18, "implementation": 20}, {"ms": 10, "times ours": 10})
        for direction, direction_rows in groupby(workload_rows, lambda row: row["direction"]):
            table.add_section()
            for label, row in zip(chain([direction], repeat("")), direction_rows, strict=False):
                table.add_row(label, row["implementation"], f"{row['milliseconds']:.2f}", f"{row['times ours']:.2f}")
        yield table


def write_rows(rows: list[Row], path: Path, *facts: str) -> None:
    """Write rows as CSV. The last column holds the machine and facts about all rows."""
    machine = ", ".join([describe_machine(), *facts])
    write_csv([{**row, "machine": machine} for row in rows], path)
