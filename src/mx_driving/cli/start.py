"""Start a program, and options that several commands share.

A failure prints one sentence on standard error, with exit status 2. Status 1 means a wrong result.
"""

from __future__ import annotations

import difflib
import io
import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from .._io import read_arrays
from .._operator.rules import Problem

DTYPES = ("float32", "float64", "float16", "bfloat16")
_UsageError: Any = typer.BadParameter.__base__  # typer's class; click's with an older typer


class WrongValue(typer.BadParameter):
    """Raised if an option's parser refuses a value. The message continues a sentence that begins with the option's name."""


def start(program: str, command: typer.Typer | Callable[..., None]) -> None:
    """Run a command, or an app of several commands, on the arguments of this process, and exit.

    After a Problem, or if standard output cannot be written, end with a sentence instead of a traceback. End silently if the
    reader has closed the pipe (`| head -1`).
    """
    app = command if isinstance(command, typer.Typer) else typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if app is not command:
        app.command()(command)
    try:
        output = sys.stdout
        if output is None:
            raise Problem("standard output must be open; got a closed one")
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # an ASCII terminal cannot show every name
        try:
            status = app(sys.argv[1:], prog_name=program, standalone_mode=False)
        except typer.Abort:
            status = 130
        except _UsageError as error:
            message = " ".join(error.format_message().split())
            if isinstance(error, WrongValue):
                raise Problem(f"{error.param.opts[0]} {error.message}") from None  # pyright: ignore[reportOptionalMemberAccess]
            raise Problem(f"the command line must be as --help says; got: {message}") from None
        finally:
            output.flush()  # click's wrapper of sys.stdout may hide a closed pipe
        sys.exit(status)
    except Problem as problem:
        sentence = str(problem)
    except OSError as error:
        is_closed_pipe = isinstance(error, BrokenPipeError)
        if error.filename is not None and not is_closed_pipe:  # No command expects this error of a file: show the traceback.
            raise
        # Drop the buffered output: Python would write it at exit, and fail again.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if is_closed_pipe:
            sys.exit(1)
        sentence = f"standard output must take what is printed; got {error.strerror or error}"
    with suppress(OSError):
        print(f"{program}: {sentence}", file=sys.stderr, flush=True)
    sys.exit(2)


def matching(option: str, patterns: Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """Return the names that equal or match a pattern; all names if there is no pattern. Each pattern must match a name."""
    names = list(names)
    if not patterns:
        return names
    matches: set[str] = set()
    for pattern in patterns:
        alike = {n for n in names if pattern == n or fnmatchcase(n.lower(), pattern.lower())}
        if not alike:
            similar = difflib.get_close_matches(pattern, names, n=3, cutoff=0) or names[:3]
            raise Problem(
                f"{option} must match one of {len(names)} names, such as {', '.join(map(repr, similar))}; got {pattern!r}"
            )
        matches |= alike
    return [n for n in names if n in matches]


# Options. Each has one help text and one effect.


def one_of(*words: str) -> Callable[[Any], Any]:
    return _parser(f"one of {', '.join(words)}", lambda text: text if text in words else None)


def _parser(rule: str, read: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a parser. It refuses a text for which `read` returns None or raises a ValueError."""

    def parse(text: Any) -> Any:
        with suppress(ValueError):
            if (value := read(text)) is not None:
                return value
        raise WrongValue(f"must be {rule}; got {text!r}")

    return parse


_ONLY = "Only rows whose name matches, e.g. `'*detr*'`, in either case; may be repeated."
Only = Annotated[list[str] | None, typer.Option("--only", help=_ONLY)]
OnlyWorkloads = Annotated[list[str] | None, typer.Option("--only", "--workload", help=_ONLY)]
_DTYPE = f"Dtype of the inputs: {', '.join(DTYPES)}; may be repeated."
DTypes = Annotated[list[str] | None, typer.Option("--dtype", metavar="NAME", parser=one_of(*DTYPES), help=_DTYPE)]
_count = _parser("a whole number from 0 to 4096", lambda text: n if 0 <= (n := int(text)) <= 4096 else None)
_THREADS = "Threads; 0: as many as torch uses."
Threads = Annotated[int, typer.Option("--threads", metavar="N", parser=_count, help=_THREADS)]
Inputs = Annotated[Path | None, typer.Option("--inputs", help="An .npz file of all inputs of the file by name; else random.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write the rows to this file.")]
_time = _parser("a number of 0 or more", lambda text: n if 0 <= (n := float(text)) < math.inf else None)
_SECONDS = "Measure each comparison about this long."
Seconds = Annotated[float, typer.Option("--seconds", metavar="N", parser=_time, help=_SECONDS)]


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
