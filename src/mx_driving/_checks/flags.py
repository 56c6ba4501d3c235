"""The one reader of the package's switches in the environment."""

from __future__ import annotations

import os

from . import rules

ON = ("1", "true", "yes", "on")
OFF = ("0", "false", "no", "off", "")


def flag(name: str, default: bool = False) -> bool:
    """Whether the environment turns `name` on; `default` where it says nothing. A word that is neither is refused.

    The package reads its switches at import, so a misspelt one stops a program at its first line and not in mid-run.
    """
    word = os.environ.get(name, "")
    if not word:
        return default
    if word.lower() not in ON + OFF:
        rules.flag(name, word)
    return word.lower() in ON
