"""List a package's sampling cores and attention modules, and the form of each (_forms.py).

`make known` prints them as entries of known.jsonl, the table of known code.
"""

from __future__ import annotations

import importlib
import math
import pathlib
import sys
from typing import Any

from ._code import Reader
from ._patch import Replacements
from ._recognize import recognize
from ._search import Candidate, Candidates, find, find_marked, is_core
from ._trial import Finding
from .known import Known, format_entry


def survey(target: Any) -> list[Finding]:
    """Return the forms of all candidates of a package, a module or a folder. Unknown cores and attention modules are tried."""
    candidates = _find_in_folder(pathlib.Path(target)) if pathlib.Path(str(target)).is_dir() else find(target, True)
    replacements, reader = Replacements({}, {}), Reader(is_core)

    def examine(group: dict[str, Candidate]) -> list[Finding]:
        return [recognize(candidate, reader, lambda member: False, tries_all=True) for candidate in group.values()]

    findings = examine(candidates.cores) + examine(candidates.pools)
    try:
        replacements.add(candidates.cores)  # In a trial, modules call replaced cores, which need no compiled extension.
        replacements.add(candidates.pools)
        return findings + examine(candidates.modules)
    finally:
        replacements.undo()


def make_entry(finding: Finding, seen: str) -> str:
    """Return the line of known.jsonl for code that has a form. `seen` is the project and its version."""
    fit = finding.fit
    assert fit is not None
    place = f"{seen} {finding.name.rpartition('.')[2]}".strip()
    casts = getattr(fit.form, "casts", "")
    difference = 0.0 if math.isnan(finding.difference) else float(f"{finding.difference:.0e}")
    entry = Known(finding.form, place, difference, dict(fit.flags), dict(fit.options), fit.widths, fit.masked, casts)
    return format_entry(finding.key, entry)


def _find_in_folder(folder: pathlib.Path) -> Candidates:
    """Import the files of a folder that mention a core or an attention module, and search them."""
    candidates = Candidates(True)
    sys.path.insert(0, str(folder.resolve()))
    for module_name in find_marked([folder], "**/*.py", ""):
        try:
            candidates.search(importlib.import_module(module_name))
        except Exception as error:  # The import of an unknown file may raise anything.
            candidates.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {error}"
    return candidates
