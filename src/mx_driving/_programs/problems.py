"""What goes wrong on a command line is said in one sentence on standard error, with exit status 1."""

from __future__ import annotations

import importlib
import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase


class Problem(ValueError):
    """What a person can mend; the message is one sentence: *name* must *rule*; got *fact*."""


@contextmanager
def ruled(rule: str, *kinds: type[Exception]) -> Iterator[None]:
    """Errors of these kinds (of any, where readers have errors of their own) are a Problem: "name must rule"; got the error."""
    try:
        yield
    except Problem:
        raise
    except Exception as error:
        if kinds and not isinstance(error, kinds):
            raise
        fact = str(error).strip().split("\n")[0].split(". ")[0]
        raise Problem(f"{rule}; got {fact or type(error).__name__}") from None


@contextmanager
def in_a_sentence(program: str) -> Iterator[None]:
    """A Problem, or a standard output that takes no more, ends the program with a sentence instead of a traceback. A reader
    that has gone away (`| head -1`) ends it quietly."""
    try:
        if sys.stdout is None:
            raise Problem("standard output must be open; got a closed one")
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        _drop_output()
        sys.exit(1)
    except Problem as problem:
        _say(f"{program}: {problem}")
        sys.exit(1)
    except OSError as error:
        if error.filename is not None:  # a file's, and nobody foresaw it: a fault of ours
            raise
        _drop_output()
        _say(f"{program}: standard output must take what is printed; got {error.strerror or error}")
        sys.exit(1)


def _say(sentence: str) -> None:
    with suppress(OSError):
        print(sentence, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """Python writes what is left when it exits, and would fail again."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def need(what: str, install: str, *modules: str) -> None:
    """All modules can be imported, or a Problem says what to install."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Problem(f'{what} must have {module} installed (pip install "{install}"); got: {error}') from None


def matching(option: str, patterns: Sequence[str] | None, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches, or is; all of them without patterns. Each pattern must match one."""
    names = list(names)
    if not patterns:
        return names
    found: set[str] = set()
    for pattern in patterns:
        of_it = {n for n in names if pattern == n or fnmatchcase(n.lower(), pattern.lower())}
        if not of_it:
            raise Problem(f"{option} must match one of {', '.join(map(repr, names))}; got {pattern!r}")
        found |= of_it
    return [n for n in names if n in found]


def at_least_one(text: str) -> int:
    """A count on an argparse command line."""
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"must be a whole number of 1 or more; got {text}")
    return int(text)
