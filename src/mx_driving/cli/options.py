"""Options that several commands have, with one text and one effect."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .._cli_support.files import read_arrays
from .._cli_support.problems import Problem


class DType(str, Enum):
    float32 = "float32"
    float64 = "float64"
    float16 = "float16"
    bfloat16 = "bfloat16"


_ONLY = "Only rows whose name matches, e.g. `'*detr*'`, in either case; may be repeated."
Only = Annotated[list[str] | None, typer.Option("--only", help=_ONLY)]
OnlyWorkloads = Annotated[list[str] | None, typer.Option("--only", "--workload", help=_ONLY)]
_DTYPE = f"Dtype of the inputs: {', '.join(d.value for d in DType)}; may be repeated."
# metavar, because typer would break its own list of choices within a word
DTypes = Annotated[list[DType] | None, typer.Option("--dtype", metavar="NAME", help=_DTYPE)]
Threads = Annotated[int, typer.Option("--threads", min=0, help="Threads; 0: as many as torch uses.")]
Inputs = Annotated[Path | None, typer.Option("--inputs", help="An .npz file of all inputs of the file by name; else random.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Seconds = Annotated[float, typer.Option("--seconds", min=0, help="Measure each comparison about this long.")]


def use_threads(threads: int) -> None:
    """Set torch's number of threads; 0 leaves it."""
    if threads:
        torch.set_num_threads(threads)


def arrays(path: Path | None) -> dict[str, Any]:
    """Return the arrays of --inputs by name; none without it."""
    if path is None:
        return {}
    if by_name := read_arrays("--inputs", path):
        return by_name
    raise Problem(f"--inputs must have an array for each input of the file; got {path}, which has none")
