"""Start a program. A failure prints one sentence on standard error, with exit status 2. Status 1 means a wrong result."""

from __future__ import annotations

import difflib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from typing import Any

import typer

from .._operator.problems import Problem

_UsageError: Any = typer.BadParameter.__base__  # typer's class; click's with an older typer


class WrongValue(typer.BadParameter):
    """Raised if an option's parser refuses a value. The message continues a sentence that begins with the option's name."""


def start(program: str, command: typer.Typer | Callable[..., None]) -> None:
    """Run a command, or an app of several commands, on the arguments of this process, and exit."""
    app = command if isinstance(command, typer.Typer) else typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    if app is not command:
        app.command()(command)
    with in_a_sentence(program):
        try:
            status = app(sys.argv[1:], prog_name=program, standalone_mode=False)
        except typer.Abort:
            sys.exit(130)
        except _UsageError as error:
            message = " ".join(error.format_message().split())
            if isinstance(error, WrongValue):
                raise Problem(f"{error.param.opts[0]} {error.message}") from None  # pyright: ignore[reportOptionalMemberAccess]
            raise Problem(f"the command line must be as --help says; got: {message}") from None
        sys.exit(status)


@contextmanager
def in_a_sentence(program: str) -> Iterator[None]:
    """After a Problem, or if standard output cannot be written, end the program with a sentence instead of a traceback. End
    silently if the reader has closed the pipe (`| head -1`)."""
    try:
        output = sys.stdout
        if output is None:
            raise Problem("standard output must be open; got a closed one")
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # an ASCII terminal cannot show every name
        try:
            yield
        finally:
            output.flush()  # click's wrapper of sys.stdout may hide a closed pipe
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except Problem as problem:
        _say(f"{program}: {problem}")
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:  # The error is of a file, not of printing. No command expects it: show the traceback.
            raise
        _drop_output()
        _say(f"{program}: standard output must take what is printed; got {error.strerror or error}")
        sys.exit(2)


def _say(sentence: str) -> None:
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Drop the buffered output: Python would write it at exit, and fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
