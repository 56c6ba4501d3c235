"""Which commit a record was made at."""

from __future__ import annotations

import pathlib
import subprocess

ROOT = pathlib.Path(__file__).parents[2]


def commit() -> str:
    """Its short name, and "changed" where the package or its tests differ from it; nothing where there is no git."""
    try:
        name, changes = (
            subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], ["status", "--porcelain", "src", "native", "tests"])
        )
    except (OSError, subprocess.CalledProcessError):
        return ""
    return f", commit {name}{' changed' if changes else ''}"
