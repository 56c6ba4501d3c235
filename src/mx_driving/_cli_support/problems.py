"""A program reports a failure in one sentence on standard error, with exit status 2. Status 1 is a wrong result."""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase

from .._installing import pip_install
from .._operator.rules import first_line


class Problem(ValueError):
    """An error that the user can mend. Its message is one sentence: *name* must *rule*; got *fact*."""


@contextmanager
def ruled(rule: str, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds (of any kind if none is given) into a Problem: the rule, and "got" with the error."""
    try:
        yield
    except Problem:
        raise
    except Exception as error:
        if kinds and not isinstance(error, kinds):
            raise
        raise Problem(f"{rule}; got {first_line(error).split('. ')[0]}") from None


@contextmanager
def in_a_sentence(program: str) -> Iterator[None]:
    """End the program with a sentence instead of a traceback after a Problem, or if standard output takes no more. End it
    quietly if the reader has gone away (`| head -1`)."""
    try:
        output = sys.stdout
        if output is None:
            raise Problem("standard output must be open; got a closed one")
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")  # an ASCII terminal cannot show every name
        try:
            yield
        finally:
            output.flush()  # click may have put a file around sys.stdout that hides a reader's leaving
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except Problem as problem:
        _say(f"{program}: {problem}")
        sys.exit(2)
    except OSError as error:
        if error.filename is not None:  # a file's error that nobody foresaw: our fault
            raise
        _drop_output()
        _say(f"{program}: standard output must take what is printed; got {error.strerror or error}")
        sys.exit(2)


def _say(sentence: str) -> None:
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Drop the rest of the buffer: Python writes it at exit, and would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def need(what: str, install: str, *modules: str) -> None:
    """Raise a Problem that says what to install, packages with blanks between them, unless all modules can be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Problem(f"{what} must have {module} installed ({pip_install(*install.split())}); got: {error}") from None


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
