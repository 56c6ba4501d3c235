"""The one reader of the package's switches in the environment."""

from __future__ import annotations

import os

from . import _check

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")


def flag(name: str) -> bool:
    """Whether the environment turns `name` on. A word that means neither on nor off is refused.

    The package reads its switches at import, so a misspelt one stops a program at its first line and not in mid-run.
    """
    word = os.environ.get(name, "")
    if word.lower() not in ON + OFF:
        _check.flag(name, word)
    return word.lower() in ON
