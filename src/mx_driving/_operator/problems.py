"""Errors that the user of a command or a file can correct. The message is a single sentence."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

from .._package_files import pip_install
from .rules import first_line


class Problem(ValueError):
    """An error that the user can correct. Its message is a single sentence: *name* must *rule*; got *fact*."""


@contextmanager
def ruled(rule: str, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds to a Problem with the message `rule; got <error>`. Without kinds, convert all errors."""
    try:
        yield
    except Problem:
        raise
    except Exception as error:
        if kinds and not isinstance(error, kinds):
            raise
        raise Problem(f"{rule}; got {first_line(error).split('. ')[0]}") from None


def need(feature: str, install: str, *modules: str) -> None:
    """Raise a Problem if a module that a feature needs cannot be imported. `install` names packages, separated by blanks."""
    for module in modules:
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise Problem(f"{feature} must have {module} installed ({pip_install(*install.split())}); got: {error}") from None
