"""Commands that are programs of the repository now: they say where."""

from __future__ import annotations

from .._cli_support.problems import Problem

ANY_OPTIONS = {"ignore_unknown_options": True, "allow_extra_args": True}


def demo() -> None:
    """Moved: `make demo`, in the repository."""
    raise Problem("mx-driving demo must be run in the repository, by `make demo`; got the old command")


def models() -> None:
    """Moved: `python benchmarks/time_models.py`, in the repository."""
    raise Problem("mx-driving models must be run in the repository, by `python benchmarks/time_models.py`; got the old command")
