"""List a package's sampling cores and attention modules, and the form of each (_forms.py).

`make known` prints them as entries of known.jsonl, the table of known code.
"""

from __future__ import annotations

import contextlib
import importlib
import pathlib
import sys
from typing import Any

from ._code import Reader
from ._patch import Patch, Replacements
from ._search import Candidate, Candidates, find, find_marked, is_core
from ._trial import Finding, recognize


def survey(target: Any) -> tuple[list[Finding], dict[str, str]]:
    """Return the forms of all candidates of a package, a module or a folder, and the modules that cannot be searched -> reason.

    Unknown cores and attention modules are tried.
    """
    candidates = Candidates(True)
    folder, arguments = pathlib.Path(str(target)), sys.argv
    if not folder.is_dir():
        candidates = find(target, True)
    else:
        sys.path.insert(0, str(folder.resolve()))
        for module_name in find_marked([folder], "**/*.py", ""):
            sys.argv = [module_name]  # A file may parse the command's arguments.
            try:
                with contextlib.redirect_stdout(sys.stderr):  # What imported code prints is no result.
                    candidates.search(importlib.import_module(module_name))
            except (Exception, SystemExit) as error:  # The import of an unknown file may raise anything.
                candidates.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {error}"
            finally:
                sys.argv = arguments
    replacements, reader = Replacements({}, {}), Reader(is_core)

    def examine(group: dict[str, Candidate]) -> list[Finding]:
        return [recognize(candidate, reader, tries_all=True) for candidate in group.values()]

    findings = examine(candidates.cores) + examine(candidates.pools)
    try:
        replacements.add(candidates.cores)  # In a trial, modules call replaced cores, which need no compiled extension.
        replacements.add(candidates.pools)
        return findings + examine(candidates.modules), candidates.unknown
    finally:
        Patch(replacements.originals, {}).restore()
