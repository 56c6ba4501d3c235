"""Options that several commands share. Each has one help text and one effect."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .._files import read_arrays
from .._operator.problems import Problem
from .start import WrongValue

DTYPES = ("float32", "float64", "float16", "bfloat16")


def one_of(*words: str) -> Callable[[str], str]:

    def read(word: str) -> str:
        if word in words:
            return word
        raise WrongValue(f"must be one of {', '.join(words)}; got {word!r}")

    return read


def _number(kind: type, rule: str, most: float = sys.float_info.max) -> Callable[[Any], Any]:
    """Return a parser of numbers from 0 to `most`."""

    def read(text: Any) -> Any:
        with suppress(ValueError):
            if 0 <= (number := kind(text)) <= most:
                return number
        raise WrongValue(f"must be {rule}; got {text!r}")

    return read


_ONLY = "Only rows whose name matches, e.g. `'*detr*'`, in either case; may be repeated."
Only = Annotated[list[str] | None, typer.Option("--only", help=_ONLY)]
OnlyWorkloads = Annotated[list[str] | None, typer.Option("--only", "--workload", help=_ONLY)]
_DTYPE = f"Dtype of the inputs: {', '.join(DTYPES)}; may be repeated."
DTypes = Annotated[list[str] | None, typer.Option("--dtype", metavar="NAME", parser=one_of(*DTYPES), help=_DTYPE)]
_THREADS, _COUNT = "Threads; 0: as many as torch uses.", "a whole number from 0 to 4096"
Threads = Annotated[int, typer.Option("--threads", metavar="N", parser=_number(int, _COUNT, 4096), help=_THREADS)]
Inputs = Annotated[Path | None, typer.Option("--inputs", help="An .npz file of all inputs of the file by name; else random.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file.")]
_SECONDS, _TIME = "Measure each comparison about this long.", "a number of 0 or more"
Seconds = Annotated[float, typer.Option("--seconds", metavar="N", parser=_number(float, _TIME), help=_SECONDS)]


def use_threads(threads: int) -> None:
    """Set torch's number of threads; 0 leaves it unchanged."""
    if threads:
        torch.set_num_threads(threads)


def arrays(path: Path | None) -> dict[str, Any]:
    """Return the arrays in the file that the option --inputs names, by name; an empty dictionary without the option."""
    if path is None:
        return {}
    if by_name := read_arrays("--inputs", path):
        return by_name
    raise Problem(f"--inputs must have an array for each input of the file; got {path}, which has none")
