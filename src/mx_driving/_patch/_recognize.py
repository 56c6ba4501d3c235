"""Decide whether a core, an autograd function, a pool or an attention module is replaced, and by which form.

In this order: its code is known; a user has named its form, which is tried; it is an unknown core in plain torch that is pure,
which is tried; it is an unknown autograd function over a known compiled function. All other code stays.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._foreign_functions import FUNCTIONS
from ._attention import ATTENTION_FORMS, Attention
from ._code import Code, NoKey, Reader, list_globals
from ._extensions import EXTENSIONS
from ._fit import Fit, make_fit
from ._forms import AUTOGRAD, CORES, MODULE, Form
from ._parameters import collect_words, list_code
from ._pools import POOLS
from ._pure import explain_impurity
from ._search import Candidate
from ._trial import Outcome, try_forms
from .known import TABLE, Known

# The name that a user writes -> the form, or the forms to try.
FORMS: Mapping[str, Form] = {**ATTENTION_FORMS, **CORES, **EXTENSIONS, **POOLS}
GROUPS: Mapping[str, Mapping[str, Form]] = {"core": CORES, "pool": POOLS}
_CASTS = {"half", "float16", "float", "float32", "double", "float64", "bfloat16", "type_as", "to", "type"}


@dataclass(frozen=True)
class Finding:
    """Which form a candidate has.

    Attributes:
        name: of the function or class, with its Python module.
        key: of its code, or nothing.
        state: "known", "by name", "tried" or "unknown".
        form: the name of the form, or of the nearest one.
        difference: the largest difference between its results and those of the form, in float64; nan if it was not tried.
        reason: why no form serves it.
        fit: the calls that the form serves.
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


def recognize(
    candidate: Candidate,
    reader: Reader,
    is_replaced: Callable[[Any], bool],
    named: str = "",
    tries_all: bool = False,
) -> Finding:
    """Return which form a candidate has.

    Args:
        named: the form that a user names. It is tried, even if the code is known.
        tries_all: whether code is tried that `patch` tries only if its form is named.
    """
    try:
        code, unknown = reader.read(candidate.original), "its code is not known"
    except NoKey as error:
        code, unknown = Code(), f"its code is not known, because {error}"
    if not named and (entry := TABLE.get(code.key)):
        outcome = Outcome(entry.form, entry.difference, "", _fit_known(entry, candidate, code))
        return Finding(candidate.name, code.key, "known", *outcome)
    forms = {name: form for name, form in _list_forms(named).items() if _may_have(candidate, form)}
    state = "tried"
    if candidate.kind == AUTOGRAD and not named:
        state, outcome = "by name", _find_compiled_function(candidate, reader, forms, unknown)
    elif not code.key:
        outcome = Outcome(reason=unknown)
    elif not named and not tries_all and (reason := _explain_untried(candidate, forms, reader, is_replaced, unknown)):
        outcome = Outcome(reason=reason)
    elif not forms:
        outcome = Outcome(reason=f"no known form has the parameters {candidate.parameters}")
    else:
        outcome = try_forms(forms, candidate, code)
    return Finding(candidate.name, code.key, state if outcome.fit else "unknown", *outcome)


def _list_forms(named: str) -> Mapping[str, Form]:
    return GROUPS.get(named) or ({named: FORMS[named]} if named else FORMS)


def _may_have(candidate: Candidate, form: Form) -> bool:
    return form.fits(candidate.original.__qualname__, candidate.kind, candidate.parameters)


def find_nearest(candidate: Candidate) -> str:
    """Return the name of the form to try first on an attention module, or nothing."""
    words = {*collect_words(candidate.function), *candidate.parameters.all}
    names = [name for name, form in ATTENTION_FORMS.items() if _may_have(candidate, form)]
    marked = [name for name in names if (mark := ATTENTION_FORMS[name].mark) and mark in words]
    return next(iter([*marked[-1:], *(name for name in names if not ATTENTION_FORMS[name].mark)]), "")


def _fit_known(entry: Known, candidate: Candidate, code: Code) -> Fit:
    """Return the fit of known code."""
    form: Any = FORMS[entry.form]
    if entry.casts:
        form = dataclasses.replace(form, casts=entry.casts)
    fit = make_fit(form, candidate, code, entry.flags)
    options = {**fit.options, **entry.options}
    return dataclasses.replace(fit, options=options, widths=tuple(entry.widths), masked=entry.masked)


def _explain_untried(
    candidate: Candidate, forms: Mapping[str, Form], reader: Reader, is_replaced: Callable[[Any], bool], unknown: str
) -> str:
    """Return why unknown code whose form no user names is not tried, or nothing."""
    if candidate.kind == MODULE and (not forms or any(isinstance(form, Attention) for form in forms.values())):
        return unknown
    impurity = explain_impurity(candidate.function, reader, is_replaced) if forms else ""
    return f"{unknown}, and it cannot be tried, because it {impurity}" if impurity else ""


def _find_compiled_function(candidate: Candidate, reader: Reader, forms: Mapping[str, Form], unknown: str) -> Outcome:
    """Return the form of an unknown autograd function that calls a known compiled function of a known module."""
    forward = candidate.function
    called = {name for own in list_code(forward) for name in own.co_names}
    modules = [reader.name_module(forward, name) for name in list_globals(forward)] if called else []
    for name, form in forms.items():
        operator = form.foreign.operator  # type: ignore[attr-defined]
        functions = [f for f in FUNCTIONS if f.operator == operator and not f.backward and f.name in called]
        if any(_is_module(module, function.module) for module in modules for function in functions):
            if casts := _CASTS & called:
                return Outcome(name, reason=f"{unknown}, and it converts its inputs by {min(casts)}")
            return Outcome(name, fit=Fit(form))
    return Outcome(next(iter(forms), ""), reason=f"{unknown}, and it calls no compiled function that is known")


def _is_module(name: str, known: str) -> bool:
    """Return whether a module, or the text that binds it, has a known last part of its name."""
    return re.search(rf"(^|[.' ]){re.escape(known.rpartition('.')[2])}('|$)", name) is not None
