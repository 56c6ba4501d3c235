"""The parameters of a function of another library, and which of them its code reads.

An argument that the code never reads may be left out. An argument that it reads must have a meaning in a known form, or
the call belongs to the function's own code.
"""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

_STARS = {"*": inspect.CO_VARARGS, "**": inspect.CO_VARKEYWORDS}
_BY_NAME = {"locals", "vars", "eval", "exec"}  # builtins that reach arguments without naming them in the bytecode


def undecorated(function: Any) -> Any:
    """Return the function as it was written, without decorators."""
    return inspect.unwrap(function.__func__ if isinstance(function, staticmethod) else function)


def names_in(instruction: dis.Instruction) -> tuple[Any, ...]:
    """Return the names in an instruction. From Python 3.13 on, one instruction may have two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)


class Parameters:
    """The parameters of a function, without self or ctx: the first `bound` ones are left out.

    Attributes:
        names: those that may be given by position.
        keyword_only: those that may be given by name alone.
        all: both.
        variadic: *args and **kwargs, with their stars.
        defaults: the defaults of those that have one.
    """

    def __init__(self, function: Any, bound: int = 0) -> None:
        own = undecorated(function)
        code = own.__code__
        names, rest = code.co_varnames[: code.co_argcount], code.co_varnames[code.co_argcount :]
        stars = [star for star, flag in _STARS.items() if code.co_flags & flag]
        defaults = own.__defaults__ or ()
        self._function = function
        self.names, self.keyword_only = names[bound:], rest[: code.co_kwonlyargcount]
        self.all = self.names + self.keyword_only
        self.variadic = tuple(map("".join, zip(stars, rest[code.co_kwonlyargcount :], strict=False)))
        self.defaults = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (own.__kwdefaults__ or {})

    @functools.cached_property
    def read(self) -> tuple[str, ...]:
        """The parameters that the code or a decorator reads."""
        names = {*_names_read(undecorated(self._function)), *self._mentioned}
        return tuple(name for name in self.all if name in names)

    @functools.cached_property
    def _mentioned(self) -> frozenset[str]:
        return frozenset(_words_of_decorators(self._function))

    @functools.cached_property
    def ignores_more(self) -> bool:
        """Whether there is a **kwargs at which the code never looks."""
        names = set(_names_read(undecorated(self._function)))
        return any(name[:2] == "**" and name[2:] not in names for name in self.variadic)

    def __str__(self) -> str:
        more, words = [v for v in self.variadic if v[:2] != "**"], [v for v in self.variadic if v[:2] == "**"]
        more = more or (["*"] if self.keyword_only else [])
        return f"({', '.join([*self.names, *more, *self.keyword_only, *words])})"

    def binder(self) -> Callable[[tuple[Any, ...], Mapping[str, Any]], dict[str, Any] | None]:
        """Return a function of a call's arguments: those that the code reads, by name, or None for a call that only the code
        itself can answer, because it refuses them or reads more than its parameters."""
        everything, by_place, read, defaults = frozenset(self.all), self.names, self.read, self.defaults
        unknown = self._mentioned if self.ignores_more else None  # keywords that are not parameters and count all the same

        def bind(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
            named = {**dict(zip(by_place, args, strict=False)), **kwargs}
            if len(named) < len(args) + len(kwargs):  # too many, or one of them twice
                return None
            if any(name not in everything and (unknown is None or name in unknown) for name in kwargs):
                return None
            arguments = {**defaults, **named}
            if any(name not in arguments for name in everything):
                return None
            return {name: arguments[name] for name in read}

        return bind


def _names_read(function: types.FunctionType) -> Iterator[str]:
    """Return the local names that the code of a function reads. A name that an inner function uses counts as read."""
    code = function.__code__
    yield from code.co_cellvars
    if _BY_NAME & set(code.co_names):
        yield from code.co_varnames
    for step in dis.get_instructions(code):
        if "LOAD" in step.opname and ("FAST" in step.opname or "DEREF" in step.opname):
            yield from names_in(step)


def _words_of_decorators(function: Any) -> Iterator[str]:
    """Return all words in the decorators of a function. mmcv's looks for an argument under its former name."""
    function = function.__func__ if isinstance(function, staticmethod) else function
    while hasattr(function, "__wrapped__"):
        wrapper, function = function, function.__wrapped__
        yield from _words((wrapper.__code__, *(cell.cell_contents for cell in wrapper.__closure__ or ())))


def _words(thing: Any, depth: int = 4) -> Iterator[str]:
    if isinstance(thing, str):
        yield thing
    elif isinstance(thing, types.CodeType):
        yield from thing.co_varnames[: thing.co_argcount + thing.co_kwonlyargcount]
        yield from _words(thing.co_consts, depth)
    elif depth and isinstance(thing, (tuple, list, set, frozenset, dict)):
        for part in (*thing, *thing.values()) if isinstance(thing, dict) else thing:
            yield from _words(part, depth - 1)


def attributes_used(kind: type, method: Any) -> frozenset[str]:
    """Return the names in the code of a class's method, and in that of the methods that it names."""
    names: set[str] = set()
    waiting = [undecorated(method)]
    while waiting:
        code = getattr(waiting.pop(), "__code__", None)
        words = {*code.co_names, *(c for c in code.co_consts if isinstance(c, str))} - names if code else set()
        names |= words
        waiting += [undecorated(inspect.getattr_static(kind, name, None)) for name in words]
    return frozenset(names)


def overrides(derived: type, kind: type, names: frozenset[str]) -> bool:
    """Return whether a derived class has its own attribute of one of these names, before the class itself."""
    before = derived.__mro__[: derived.__mro__.index(kind)]
    return any(name in vars(base) for base in before for name in names if name[:2] != "__")
