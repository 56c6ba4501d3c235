"""What a package has that `patch` knows, and what its unknown code computes: the rows of known.py are made here."""

from __future__ import annotations

import importlib
import math
import pathlib
import sys
from dataclasses import dataclass
from typing import Any

from ._code import Reader
from ._fit import Fit
from ._forms import AUTOGRAD
from ._patch import Taking
from ._recognize import FORMS, Unknown, read, recognize
from ._search import Candidate, Candidates, find, find_marked, is_core
from ._trial import try_forms
from .known import TABLE, Known


@dataclass(frozen=True)
class Finding:
    """A core, an autograd function, a pool or an attention module.

    Attributes:
        name: of the class or function, with its module.
        key: of its code, or nothing.
        state: "known", "tried" or "unknown".
        form: the name of the form that it has, or of the nearest one.
        difference: the largest difference between its results and those of the form, in float64; nan if it did not run.
        reason: why no form serves it.
        fit: what the form serves.
    """

    name: str
    key: str
    state: str
    form: str = ""
    difference: float = math.nan
    reason: str = ""
    fit: Fit | None = None

    def __str__(self) -> str:
        difference = "" if math.isnan(self.difference) else f", difference {self.difference:.1e}"
        return f"{self.state:8}{self.name}: {self.form or 'no form'}{difference}{': ' if self.reason else ''}{self.reason}"

    def format_row(self, seen: str) -> str:
        """Return the row of known.py."""
        assert self.fit is not None
        defaults = Known("", "")
        facts = {"flags": dict(self.fit.flags), "options": dict(self.fit.options), "widths": self.fit.widths}
        facts = {**facts, "masked": self.fit.masked, "casts": getattr(self.fit.form, "casts", "")}
        words = [f"{name}={value!r}" for name, value in facts.items() if value != getattr(defaults, name)]
        place = f"{seen} {self.name.rpartition('.')[2]}".strip()
        return f'    "{self.key}": Known({", ".join([repr(self.form), repr(place), f"{self.difference:.0e}", *words])}),'


def survey(target: Any) -> list[Finding]:
    """Return what a package, a module or a folder has. Every core and attention module of unknown code is tried."""
    candidates = _find_in_folder(pathlib.Path(target)) if pathlib.Path(str(target)).is_dir() else find(target, True)
    return survey_candidates(candidates)


def survey_candidates(candidates: Candidates) -> list[Finding]:
    taking, reader = Taking({}, {}), Reader(is_core)
    findings = [_examine(name, candidate, reader) for turn in candidates.turns[:2] for name, candidate in turn.items()]
    try:
        for turn in candidates.turns[:2]:  # modules are tried over replaced cores, which need no compiled extension
            taking.take(turn)
        findings += [_examine(name, candidate, reader) for name, candidate in candidates.turns[2].items()]
    finally:
        taking.undo()
    return findings


def _examine(name: str, candidate: Candidate, reader: Reader) -> Finding:
    code, _ = read(candidate.thing, reader)
    if row := TABLE.get(code.key):
        return Finding(name, code.key, "known", row.form, row.difference)
    named = [(word, form) for word, forms in FORMS.items() for form in forms if word not in ("core", "pool")]
    fitting = {
        w: f for w, f in named if f.kind == candidate.kind and f.fits(candidate.thing.__qualname__, f.kind, candidate[2])
    }
    if candidate.kind == AUTOGRAD:
        return _examine_extension(name, candidate, reader, code.key, fitting)
    differences = {}
    for word, form in fitting.items():
        fit, why, difference = try_forms([form], candidate.thing, code)
        if fit is not None:
            return Finding(name, code.key, "tried", word, difference, fit=fit)
        differences[word] = (difference, why)
    if not differences:
        return Finding(name, code.key, "unknown", reason=f"no known form has the parameters {candidate.parameters}")
    nearest = min(differences, key=lambda word: differences[word][0])
    return Finding(name, code.key, "unknown", nearest, *differences[nearest])


def _examine_extension(name: str, candidate: Candidate, reader: Reader, key: str, fitting: dict[str, Any]) -> Finding:
    """Return an autograd function over a compiled one, which cannot be tried."""
    try:
        fit = recognize(candidate, reader, None, lambda thing: False)
    except Unknown as error:
        return Finding(name, key, "unknown", next(iter(fitting), ""), reason=error.args[0])
    return Finding(name, key, "by name", next(word for word, form in fitting.items() if form == fit.form), fit=fit)


def _find_in_folder(folder: pathlib.Path) -> Candidates:
    """Import the files of a folder that mention a core or an attention module, and search them."""
    candidates = Candidates(True)
    sys.path.insert(0, str(folder.resolve()))
    for module_name in find_marked([folder], "**/*.py", ""):
        try:
            candidates.search(importlib.import_module(module_name))
        except Exception as error:  # other people's files may ask for anything
            candidates.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {error}"
    return candidates
