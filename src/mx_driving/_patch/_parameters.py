"""The parameters of another library's function, and the names that its code reads.

A form ignores an argument that the code never reads. An argument that the code reads must have a role in the form (ROLES of
_forms.py), or keep its default.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Iterator
from typing import Any

import torch

STAND_IN = "mx_driving.patch"  # co_filename of the code that `patch` puts into a function
PLAIN = (bool, int, float, str, type(None))  # the types of flags and options
_STARS = {"*": inspect.CO_VARARGS, "**": inspect.CO_VARKEYWORDS}
_BY_NAME = {"locals", "vars", "eval", "exec"}  # builtins that read arguments whose names are not in the bytecode


def unwrap(function: Any) -> Any:
    """Return the function below its decorators."""
    function = function.__func__ if isinstance(function, staticmethod) else function
    return inspect.unwrap(function, stop=lambda f: getattr(getattr(f, "__code__", None), "co_filename", "") == STAND_IN)


def is_autograd(member: Any) -> bool:
    """Return whether an object is an autograd function."""
    return isinstance(member, type) and issubclass(member, torch.autograd.Function)


def find_wrapper(core: Any) -> str:
    """Return the name of the wrapper around a core, or "". The key of an autograd function has its wrappers: return ""."""
    if is_autograd(core):
        return ""
    outer = vars(core).get("forward") if isinstance(core, type) else core
    outer = outer.__func__ if isinstance(outer, staticmethod) else outer
    if outer is None or unwrap(outer) is outer:
        return ""
    return outer.__code__.co_name if isinstance(outer, types.FunctionType) else type(outer).__name__


def find_source(function: Any) -> Any:
    """Return the function below its decorators. If `patch` has changed its code, return a copy with the original code."""
    return inspect.unwrap(unwrap(function))


@functools.lru_cache(2000)
def list_loads(code: types.CodeType, *kinds: str) -> tuple[str, ...]:
    """Return the names that instructions of these kinds load. From Python 3.13 on, one instruction may load two names."""
    steps = [s for s in dis.get_instructions(code) if "LOAD" in s.opname and any(kind in s.opname for kind in kinds)]
    return tuple(name for s in steps for name in (s.argval if isinstance(s.argval, tuple) else (s.argval,)))


class Parameters:
    """The parameters of a function below its decorators, without the first `bound` parameters (self or ctx).

    Attributes:
        names: the parameters that a caller may give by position.
        keyword_only: the parameters that a caller gives by name alone.
        all: names and keyword_only.
        variadic: *args and **kwargs, with their stars.
        defaults: name -> default.
    """

    def __init__(self, function: Any, bound: int = 0) -> None:
        self._function = own = find_source(function)
        code, defaults = own.__code__, own.__defaults__ or ()
        names, rest = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount :]
        stars = [star for star, flag in _STARS.items() if code.co_flags & flag]
        self.names, self.keyword_only = names[bound:], rest[: code.co_kwonlyargcount]
        self.all = self.names + self.keyword_only
        self.variadic = tuple(map("".join, zip(stars, rest[code.co_kwonlyargcount :], strict=False)))
        self.defaults = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (own.__kwdefaults__ or {})

    @functools.cached_property
    def names_read(self) -> frozenset[str]:
        """The local names that the code reads. A name that an inner function uses counts as read."""
        code = self._function.__code__
        by_name = code.co_varnames if _BY_NAME & set(code.co_names) else ()
        return frozenset((*code.co_cellvars, *by_name, *list_loads(code, "FAST", "DEREF")))

    @property
    def read(self) -> tuple[str, ...]:
        """The parameters that the code reads."""
        return tuple(name for name in self.all if name in self.names_read)

    def __str__(self) -> str:
        more, words = ([v for v in self.variadic if (v[:2] == "**") == double] for double in (False, True))
        more = more or (["*"] if self.keyword_only else [])
        return f"({', '.join([*self.names, *more, *self.keyword_only, *words])})"


def list_code(function: Any) -> Iterator[types.CodeType]:
    """Yield the code of a function and of its nested functions. `function` may also be a code object."""
    waiting = [function if isinstance(function, types.CodeType) else getattr(find_source(function), "__code__", None)]
    while waiting:
        if code := waiting.pop():
            yield code
            waiting += [c for c in code.co_consts if isinstance(c, types.CodeType)]


def collect_words(function: Any) -> set[str]:
    """Return the names and strings in the code of a function and of its nested functions."""
    return {w for code in list_code(function) for w in (*code.co_names, *code.co_consts) if isinstance(w, str)}
