"""The key of a function: a hash of its syntax tree, and of those of the functions and methods that it calls.

Two functions with the same key compute the same. A key does not depend on the Python version. It does not depend on comments,
docstrings, annotations, asserts and branches that only raise. A function has no key if its source cannot be read, or is not the
source of the running code.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import itertools
import linecache
import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from ._parameters import find_source, list_code, read_names, unwrap

_DROPPED = {"ctx", "type_comment", "kind", "type_params", "decorator_list", "returns", "annotation", "simple"}
# These functions have no side effects. So a key leaves out an `if` whose test calls only them and whose body only raises.
_HARMLESS = {"size", "sum", "dim", "len", "isinstance", "numel", "prod", "item", "all", "any", "type", "format"}
# A key leaves out an assert whose test calls only these functions and those of _HARMLESS.
_ASSERTED = {"set", "list", "sorted", "min", "max", "hasattr", "allclose", "equal", "isfinite", "is_floating_point", "issubset"}
_WORDS = {"print", "warn", "torch_compilable_check"}  # functions that only print or check
_KNOWN_PACKAGES = {"torch", "math", "numpy", "typing", "builtins", "torchvision", "functools", "itertools", "warnings"}
_STATEMENT = re.compile(r"[^\s#)\]}]")  # the first character of a statement at the top level of a file
_DEFINES = ("@", "def ", "class ", "async ")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_ABSENT = object()


class NoKey(Exception):
    """Raised for a function that has no key. `args[0]` is the reason."""


@dataclass
class Code:
    """The key of a function, and the names in its code and in the code of the functions that it calls.

    Attributes:
        key: equal for equal code.
        cores: the sampling cores that the code calls. They are not read.
        functions: the functions that were read -> the path to them, such as "calls helper, which ", and the syntax tree.
        values: global names that stand neither for a function nor for a member of a known library -> the path to them.
        builtins: names of builtins -> the path to them.
        attributes: names of the layer's attributes that the code reads, without methods.
        methods: names of the layer's methods that the code calls.
        writes: names of the layer's attributes that the code sets.
        passes_self: whether the code passes the layer itself to other code, which may read any attribute.
    """

    key: str = ""
    cores: list[Any] = field(default_factory=list)
    functions: dict[types.FunctionType, tuple[str, ast.FunctionDef]] = field(default_factory=dict)
    values: dict[str, str] = field(default_factory=dict)
    builtins: dict[str, str] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    passes_self: bool = False


class Reader:
    """Reads the code of functions. A call of a core is a part of the caller's key, but the core's own code is not.

    A reader keeps the syntax trees of files for one call of `patch`, in which files do not change. Readers may share `files`.
    """

    def __init__(self, is_core: Callable[[Any], bool], files: dict[str, _File] | None = None) -> None:
        self._is_core = is_core
        self.files: dict[str, _File] = {} if files is None else files

    def read(self, original: Any) -> Code:
        """Return the code of a function, of a module class's forward, or of an autograd function's forward and backward."""
        code = Code()
        if not isinstance(original, type):
            parts = [self._read_function(original, None, code)]
        elif not isinstance(inspect.getattr_static(original, "forward", None), (types.FunctionType, staticmethod)):
            raise NoKey("its forward is not a function")
        elif issubclass(original, torch.autograd.Function):
            methods = [inspect.getattr_static(original, name) for name in ("forward", "backward")]
            parts = [self._read_function(method, None, code, decorated=True) for method in methods]
        else:
            parts = [self._read_function(vars(original)["forward"], original, code)]
        code.key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
        return code

    def name_module(self, function: Any, name: str) -> str:
        """Return the name of the module that a global name stands for. If its import failed, return the import as text."""
        source = find_source(function)
        module = source.__globals__.get(name)
        return module.__name__ if isinstance(module, types.ModuleType) else str(self._open(source.__code__).find_binding(name))

    def _open(self, code: types.CodeType) -> _File:
        if code.co_filename not in self.files:
            self.files[code.co_filename] = _File(code.co_filename)
        return self.files[code.co_filename]

    def _read_function(self, function: Any, kind: type | None, code: Code, path: str = "", decorated: bool = False) -> Any:
        source, is_static = find_source(function), isinstance(function, staticmethod)
        if source in code.functions:
            return "again"
        if set(source.__code__.co_freevars) - {"__class__"}:
            raise NoKey(f"{source.__qualname__} has a closure")
        tree = self._open(source.__code__).find(source.__code__)
        code.functions[source] = path, tree
        own = source.__code__.co_varnames[0] if kind and source.__code__.co_argcount and not is_static else ""
        text = _Text(own)
        parts = [text.dump_function(tree), [_Text("").dump(d) for d in tree.decorator_list] if decorated else []]
        if "super" in text.names:
            raise NoKey(f"{source.__qualname__} calls super()")
        if any(not isinstance(default, ast.Constant) for default in (*tree.args.defaults, *tree.args.kw_defaults) if default):
            parts.append(repr((source.__defaults__, source.__kwdefaults__)))
        code.passes_self |= text.passes_self
        code.writes |= text.writes
        names = set(list_globals(source))
        code.builtins |= {name: path for name in sorted(names) if name not in source.__globals__}
        for name in sorted(names & text.names):
            parts.append([name, self._describe_global(source, name, code, path)])
        for name in sorted(text.attributes):
            method = inspect.getattr_static(kind, name, None)
            method = method.fget if isinstance(method, property) else method
            below = unwrap(getattr(method, "__func__", method))
            if isinstance(method, staticmethod) and self._is_core(below):
                code.cores.append(below)
                parts.append([name, "core"])
            elif isinstance(below, types.FunctionType) and not is_of_known_library(below):
                code.methods.add(name)
                parts.append([name, self._read_function(method, kind, code, f"{path}calls {name}, which ")])
            else:
                code.attributes.add(name)
        return parts

    def _describe_global(self, function: Any, name: str, code: Code, path: str) -> Any:
        value = function.__globals__.get(name, getattr(builtins, name, _ABSENT))
        if self._is_core(value):
            code.cores.append(value)
            return "core"
        if is_of_known_library(value):
            return getattr(value, "__qualname__", None) or value.__name__
        if isinstance(below := unwrap(value) if callable(value) else value, types.FunctionType):
            return self._read_function(below, None, code, f"{path}calls {name}, which ")
        code.values[name] = path
        if isinstance(value, type):
            return value.__qualname__
        return self._open(function.__code__).find_binding(name)


class _File:
    """A Python file's syntax trees. To save time, a definition at the top level is parsed only if it is asked for."""

    def __init__(self, name: str) -> None:
        self._name, self._lines = name, linecache.getlines(name)
        lines = [k for k, line in enumerate(self._lines) if _STATEMENT.match(line)]
        starts = [k for n, k in enumerate(lines) if n == 0 or not self._lines[lines[n - 1]].startswith("@")]
        self._blocks = list(itertools.pairwise([*starts, len(self._lines)]))
        self._parsed: dict[int, tuple[ast.Module, list[types.CodeType]]] = {}

    def find(self, code: types.CodeType) -> ast.FunctionDef:
        """Return the definition that compiles to `code`. Compile to check it: the file may have changed since its import."""
        tree, compiled = self._parse(code.co_firstlineno - 1)
        for node in ast.walk(tree) if code in compiled else ():
            if isinstance(node, ast.FunctionDef) and (node.name, _get_first_line(node)) == (code.co_name, code.co_firstlineno):
                return node
        raise NoKey(f"the source of {code.co_name} is not at hand")

    def _parse(self, line: int) -> tuple[ast.Module, list[types.CodeType]]:
        """Return the syntax tree of the top-level definition that contains a line, and its compiled functions.

        The tree also has the top-level statements that define nothing, because imports change how calls are compiled.
        """
        start = next((a for a, b in self._blocks if a <= line < b), 0)
        if start not in self._parsed:
            kept = list(self._lines)
            for a, b in self._blocks:
                if a != start and kept[a].startswith(_DEFINES):
                    kept[a:b] = ["\n"] * (b - a)
            tree = _parse("".join(kept)) or _parse("".join(self._lines)) or ast.Module([], [])
            self._parsed[start] = tree, list(_list_nested(compile(tree, self._name, "exec", dont_inherit=True)))
        return self._parsed[start]

    def find_binding(self, name: str) -> Any:
        """Return the assignments and imports of a global name in the file, also imports that failed."""
        return [
            _Text("").dump(statement) if isinstance(statement, ast.Assign) else [getattr(statement, "module", ""), alias.name]
            for statement in _list_statements(self._parse(0)[0])
            for alias in _list_bound(statement)
            if (alias.asname or alias.name) == name
        ]


def _parse(text: str) -> ast.Module | None:
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError):
        return None


def _list_statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Return the statements at the top level of a file, also those in `try` and `if`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, (ast.stmt, ast.excepthandler)) and not isinstance(child, _DEFINITIONS):
            yield child
            yield from _list_statements(child)


def _list_bound(statement: ast.AST) -> list[ast.alias]:
    if isinstance(statement, (ast.Import, ast.ImportFrom)):
        return statement.names
    if isinstance(statement, ast.Assign):
        return [ast.alias(target.id) for target in statement.targets if isinstance(target, ast.Name)]
    return []


def _get_first_line(definition: ast.FunctionDef) -> int:
    return min([definition.lineno, *(decorator.lineno for decorator in definition.decorator_list)])


def _list_nested(code: types.CodeType) -> Iterator[types.CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield constant
            yield from _list_nested(constant)


def list_globals(function: Any) -> Iterator[str]:
    """Return the global names that a function and its nested functions load."""
    for code in list_code(function):
        for step in dis.get_instructions(code):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield from read_names(step)


def is_of_known_library(value: Any) -> bool:
    """Return whether a module, class or function is of Python or of `_KNOWN_PACKAGES`. Its name then stands for its code."""
    module = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
    is_named = isinstance(value, types.ModuleType) or callable(value)
    return is_named and str(module).partition(".")[0] in {*_KNOWN_PACKAGES, "_operator", "None"} and hasattr(value, "__name__")


class _Text:
    """Writes a syntax tree as nested lists.

    Drops docstrings, annotations, statements that only check or print, empty fields, and fields of the tree that only some
    Python versions have.

    Attributes:
        names: the names that are loaded.
        attributes, writes: the names of a layer's attributes that are loaded and set.
        passes_self: whether the layer itself is loaded.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self.names: set[str] = set()
        self.attributes: set[str] = set()
        self.writes: set[str] = set()
        self.passes_self = False

    def dump_function(self, node: ast.FunctionDef) -> Any:
        return [self.dump(node.args), self._dump_body(node.body, node)]

    def dump(self, node: Any) -> Any:
        if not isinstance(node, ast.AST):
            return list(map(self.dump, node)) if isinstance(node, list) else repr(node)
        if isinstance(node, ast.Name):
            self.names.add(node.id)
            self.passes_self |= node.id == self._own
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self._own != "":
            (self.attributes if isinstance(node.ctx, ast.Load) else self.writes).add(node.attr)
            return ["Attribute", self._own, node.attr, isinstance(node.ctx, ast.Load)]
        return [type(node).__name__, *self._dump_fields(node)]

    def _dump_fields(self, node: ast.AST) -> Iterator[Any]:
        for name in node._fields:
            value = getattr(node, name, None)
            if name in _DROPPED or value == [] or (value is None and name != "value"):
                continue
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                value = self._dump_body(value, node)
                if not value:
                    continue
            yield [name, value if name in ("body", "orelse", "finalbody") and isinstance(value, list) else self.dump(value)]

    def _dump_body(self, statements: list[ast.stmt], owner: ast.AST) -> list[Any]:
        if isinstance(owner, ast.If) and statements is owner.orelse and all(isinstance(s, ast.Raise) for s in statements):
            return []
        return [self.dump(s) for k, s in enumerate(statements) if not _is_for_readers(s, owner, k)]


def _is_for_readers(statement: ast.stmt, owner: Any, place: int) -> bool:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return place == 0 and isinstance(owner, _DEFINITIONS)
    if isinstance(statement, ast.If) and not statement.orelse and all(isinstance(s, ast.Raise) for s in statement.body):
        return _is_harmless(statement.test, _HARMLESS)
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _get_called(statement.value) in _WORDS and _is_harmless(statement.value, _HARMLESS | _WORDS)
    return isinstance(statement, ast.Assert) and _is_harmless(statement.test, _HARMLESS | _ASSERTED)


def _is_harmless(node: ast.AST, allowed: set[str]) -> bool:
    """Return whether an expression calls only `allowed` functions and methods, and assigns nothing."""
    calls = {_get_called(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
    return calls <= allowed and not any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))


def _get_called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
