"""Decide whether a core, an autograd function, a pool or an attention module is replaced, and by which form.

The first case that applies decides. A user names the form: it is tried. The code is known: the table has its form. It is an
unknown, pure core in plain torch: forms are tried. It is an unknown autograd function: it must call a known compiled function.
All other code stays.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
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
from ._trial import Finding, try_forms
from .known import Known, read_table

# In patch(forms=...) a user writes the name of a form, a key of FORMS, or of a group of forms that are tried in turn, a key of
# GROUPS.
FORMS: Mapping[str, Form] = {**ATTENTION_FORMS, **CORES, **EXTENSIONS, **POOLS}
GROUPS: Mapping[str, Mapping[str, Form]] = {"core": CORES, "pool": POOLS}
_CASTS = {"half", "float16", "float", "float32", "double", "float64", "bfloat16", "type_as", "to", "type"}


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
        tries_all: whether to try all code, also code that `patch` tries only if a user names its form.
    """
    try:
        code, reason = reader.read(candidate.original), "its code is not known"
    except NoKey as error:
        code, reason = Code(), f"its code is not known, because {error}"
    if not named and (entry := read_table().get(code.key)):
        fit = _fit_known(entry, candidate, code)
        return Finding(candidate.name, code.key, "known", entry.form, entry.difference, fit=fit)
    unknown = Finding(candidate.name, code.key, reason=reason)
    forms = {name: form for name, form in _list_forms(named).items() if _may_have(candidate, form)}
    if candidate.kind == AUTOGRAD and not named:
        return _find_compiled_function(candidate, reader, forms, unknown)
    is_asked_for = bool(named) or tries_all
    if not code.key or not (is_asked_for or _is_tried(candidate, forms)):
        return unknown
    if not forms:
        return dataclasses.replace(unknown, reason=f"no known form has the parameters {candidate.parameters}")
    if not is_asked_for and (impurity := _explain_impurity(candidate, Reader(is_replaced, reader.files))):
        return dataclasses.replace(unknown, reason=f"{reason}, and it cannot be tried, because it {impurity}")
    return try_forms(forms, candidate, code)


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


def _explain_impurity(candidate: Candidate, reader: Reader) -> str:
    """Return why a core cannot be tried, or nothing. Also read the code of cores that it calls, unless they are replaced."""
    try:
        return explain_impurity(reader.read(candidate.original))
    except NoKey as error:
        return f"calls code without a key: {error}"


def _is_tried(candidate: Candidate, forms: Mapping[str, Form]) -> bool:
    """Return whether unknown code is tried although no user names its form: a core, not an attention module."""
    return candidate.kind != MODULE or (bool(forms) and not any(isinstance(form, Attention) for form in forms.values()))


def _find_compiled_function(candidate: Candidate, reader: Reader, forms: Mapping[str, Form], unknown: Finding) -> Finding:
    """Find the form of an unknown autograd function that calls a known compiled function of a known module."""
    forward = candidate.function
    called = {name for own in list_code(forward) for name in own.co_names}
    modules = [reader.name_module(forward, name) for name in list_globals(forward)] if called else []
    for name, form in forms.items():
        operator = form.foreign.operator  # type: ignore[attr-defined]
        functions = [f for f in FUNCTIONS if f.operator == operator and not f.backward and f.name in called]
        if any(_is_module(module, function.module) for module in modules for function in functions):
            if casts := _CASTS & called:
                reason = f"{unknown.reason}, and it converts its inputs by {min(casts)}"
                return dataclasses.replace(unknown, form=name, reason=reason)
            return dataclasses.replace(unknown, state="by name", form=name, reason="", fit=Fit(form))
    reason = f"{unknown.reason}, and it calls no compiled function that is known"
    return dataclasses.replace(unknown, form=next(iter(forms), ""), reason=reason)


def _is_module(name: str, known: str) -> bool:
    """Return whether `name`, a module's name or the text of its import, ends in the last part of a known module's name."""
    return re.search(rf"(^|[.' ]){re.escape(known.rpartition('.')[2])}('|$)", name) is not None
