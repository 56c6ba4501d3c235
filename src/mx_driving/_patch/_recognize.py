"""Decide whether a core, an autograd function, a pool or an attention module is replaced, and by which form.

In this order: its code is known; a user has named its form, which is tried; it is an unknown core in plain torch that is pure,
which is tried; it is an unknown autograd function over a known compiled function. All else keeps its own code.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .._foreign_functions import FUNCTIONS
from ._attention import ATTENTION_FORMS, Attention
from ._code import Code, NoKey, Reader, list_globals
from ._extensions import EXTENSIONS
from ._fit import Fit
from ._forms import AUTOGRAD, CORES, MODULE, Form, find_role
from ._parameters import Parameters, collect_words, list_code, unwrap
from ._pools import POOLS
from ._pure import explain_impurity
from ._search import Candidate, describe
from ._trial import READ, try_forms
from .known import TABLE, Known

FORMS: Mapping[str, Sequence[Form]] = {
    **{name: (form,) for forms in (ATTENTION_FORMS, CORES, EXTENSIONS, POOLS) for name, form in forms.items()},
    "core": tuple(CORES.values()),
    "pool": tuple(POOLS.values()),
}
_CASTS = {"half", "float16", "float", "float32", "double", "float64", "bfloat16", "type_as", "to", "type"}


class Unknown(Exception):
    """Why something keeps its own code: `args[0]`."""


def recognize(candidate: Candidate, reader: Reader, named: str | None, is_replaced: Callable[[Any], bool]) -> Fit:
    """Return the fit of a thing; raise Unknown. `named` is the name of its form, if a user gives it."""
    thing, kind, parameters = candidate
    code, reason = read(thing, reader)
    if not named and (row := TABLE.get(code.key)):
        return _fit_row(row, thing, kind, parameters, code)
    fitting = [form for form in _find_forms(named, kind) if form.fits(thing.__qualname__, kind, parameters)]
    if not named and kind == AUTOGRAD:
        return _recognize_extension(thing, reader, fitting, reason)
    if not named and (kind == MODULE and not _is_core_layer(fitting)):
        raise Unknown(reason)
    if not code.key:
        raise Unknown(reason)
    if not fitting:
        raise Unknown(f"no known form has the parameters {parameters}")
    if not named:
        _check_purity(thing, kind, reader, reason, is_replaced)
    fit, why, _ = try_forms(fitting, thing, code)
    if fit is None:
        raise Unknown(why)
    return fit


def read(thing: Any, reader: Reader) -> tuple[Code, str]:
    """Return the code of a thing, and what to say if it is not known."""
    try:
        return reader.read(thing), "its code is not known"
    except NoKey as error:
        return Code(), f"its code is not known, because {error}"


def _is_core_layer(fitting: Sequence[Form]) -> bool:
    return bool(fitting) and not any(isinstance(form, Attention) for form in fitting)


def _find_forms(named: str | None, kind: str) -> Sequence[Form]:
    """Return the forms of a kind, or those of a name."""
    return [form for form in (FORMS[named] if named else [f for fs in FORMS.values() for f in fs]) if form.kind == kind]


def find_nearest(candidate: Candidate) -> str:
    """Return the name of the form to try first on an attention module, or nothing."""
    words = {*collect_words(vars(candidate.thing)["forward"]), *candidate.parameters.all}
    fitting = [name for name, form in ATTENTION_FORMS.items() if form.fits("", candidate.kind, candidate.parameters)]
    marked = [name for name in fitting if ATTENTION_FORMS[name].mark in words and ATTENTION_FORMS[name].mark]
    return next(iter([*marked[-1:], *(name for name in fitting if not ATTENTION_FORMS[name].mark)]), "")


def _fit_row(row: Known, thing: Any, kind: str, parameters: Parameters, code: Code) -> Fit:
    """Return the fit of known code."""
    form = FORMS[row.form][0]
    if row.casts:
        form = dataclasses.replace(form, casts=row.casts)  # type: ignore[type-var]
    names = [name for name in parameters.read if not form.reads_all and find_role(name) not in form.roles]
    options = {name: row.options.get(name, (parameters.defaults[name],)) for name in names}
    starts = isinstance(form, Attention) or reads_starts(thing)
    owner = thing if kind == MODULE else None
    holders = code.attributes - READ - form.reads - set(row.flags) if isinstance(form, Attention) else ()
    reached = tuple(sorted(holders)), tuple(code.cores), tuple(sorted(code.methods))
    return Fit(form, owner, row.flags, options, *reached, row.widths, row.masked, starts)


def reads_starts(core: Any) -> bool:
    """Return whether a core reads level_start_index. One in plain torch takes the levels one after the other."""
    candidate = describe(core)
    if candidate is None or candidate.kind == AUTOGRAD:
        return True
    return any(find_role(name) == "starts" for name in candidate.parameters.read)


def _check_purity(thing: Any, kind: str, reader: Reader, reason: str, is_replaced: Callable[[Any], bool]) -> None:
    function = vars(thing)["forward"] if kind == MODULE else thing
    if impurity := explain_impurity(unwrap(function), reader, is_replaced):
        raise Unknown(f"{reason}, and it cannot be tried, because it {impurity}")


def _recognize_extension(thing: Any, reader: Reader, fitting: Sequence[Form], reason: str) -> Fit:
    """Return the fit of an unknown autograd function that calls a known compiled function of a known module."""
    forward = unwrap(vars(thing)["forward"])
    called = {name for own in list_code(forward) for name in own.co_names}
    modules = [reader.name_module(forward, name) for name in list_globals(forward)] if called else []
    for form in fitting:
        row: Any = form.row  # type: ignore[attr-defined]
        functions = [f for f in FUNCTIONS if f.operator == row.operator and not f.backward and f.name in called]
        if any(_is_module(name, function.module) for name in modules for function in functions):
            if casts := _CASTS & called:
                raise Unknown(f"{reason}, and it converts its inputs by {min(casts)}")
            return Fit(form)
    raise Unknown(f"{reason}, and it calls no compiled function that is known")


def _is_module(name: str, known: str) -> bool:
    """Return whether a module, or the text that binds it, has a known last part of its name."""
    return re.search(rf"(^|[.' ]){re.escape(known.rpartition('.')[2])}('|$)", name) is not None
