"""Errors of the programs of this folder: one message on standard error, raised before the work begins."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def in_a_sentence(program: str) -> Iterator[None]:
    """Print an error as one line on standard error, and end with status 1."""
    try:
        yield
        sys.stdout.flush()
    except (ImportError, OSError, ValueError) as error:
        print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(1) from None


def at_least_one(text: str) -> int:
    """Read a count on the command line."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of 1 or more; got {text}")
    return int(text)


def check_place(option: str, path: Path) -> None:
    """Raise an error now if a file cannot be written after the work."""
    if not path.parent.is_dir():
        raise ValueError(f"the folder of {option} must exist; got {path.parent}")
