"""Errors that the user of a command or of a file can mend, each in one sentence."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from .._installing import pip_install
from .rules import first_line


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


def need(what: str, install: str, *modules: str) -> None:
    """Raise a Problem that says what to install, packages with blanks between them, unless all modules can be imported."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Problem(f"{what} must have {module} installed ({pip_install(*install.split())}); got: {error}") from None
