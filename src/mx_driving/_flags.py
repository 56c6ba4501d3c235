"""The one reader of the package's switches in the environment."""

from __future__ import annotations

import os

from . import _check

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")


def flag(name: str) -> bool:
    """Whether the environment turns `name` on; a word that says neither is refused.

    Read when the package is imported: a misspelt switch stops the program at its first line and not in the middle of a run.
    """
    word = os.environ.get(name, "")
    if word.lower() not in ON + OFF:
        _check.flag(name, word)
    return word.lower() in ON
