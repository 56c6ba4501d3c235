"""The key of a function: a hash of its syntax tree, and of all that the function reaches.

The key has the code of the functions and methods that are called, not only their names, and the code of the wrappers around
them. A function has no key if it reaches a replaced function of torch, a callable object that is no function, a global
constant with another value than in the file, or a tensor, an array or an object whose content may change unseen. A function
has no key either if it imports a module of a library, or looks names up in a namespace. Two functions with the same key
compute the same.

A key does not depend on the Python version, nor on comments, docstrings, annotations, asserts and branches that only raise. A
function has no key if its source cannot be read, or is not the source of the running code.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import itertools
import linecache
import operator
import os
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import _torch_private
from ._parameters import find_source, find_wrapper, is_autograd, list_code, list_loads, unwrap

_DROPPED = {"ctx", "type_comment", "kind", "type_params", "decorator_list", "returns", "annotation", "simple"}
# These functions have no side effects. So a key leaves out an `if` whose test calls only these and whose body only raises.
_HARMLESS = {"size", "sum", "dim", "len", "isinstance", "numel", "prod", "item", "all", "any", "type", "format"}
# A key leaves out an assert whose test calls only these functions and those of _HARMLESS.
_ASSERTED = {"set", "list", "sorted", "min", "max", "hasattr", "allclose", "equal", "isfinite", "is_floating_point", "issubset"}
# Names by which code reaches what its text does not show.
_ASKING = {"globals", "eval", "exec", "__import__", "import_module", "__dict__"}
_WORDS = {"print", "warn", "torch_compilable_check"}  # functions that only print or check
_KNOWN_PACKAGES = {
    *("torch", "numpy", "torchvision", "einops", "math", "typing", "builtins", "functools", "itertools", "warnings"),
    *("collections", "contextlib", "copy", "importlib"),
}
# LibreYOLO's registry of kernels. A function there computes what LibreYOLO's own code does, or says that there is no kernel.
KERNELS = "libreyolo.kernels"
_STATEMENT = re.compile(r"[^\s#)\]}]")  # the first character of a statement at the top level of a file
_DEFINES = ("@", "def ", "class ", "async ")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_KINDS = ("staticmethod", "classmethod", "property")  # decorators that leave the function as it is
_CONTAINERS = (tuple, frozenset, list, dict, set)
_CONSTANTS = (bool, int, float, complex, str, bytes, range, type(None), torch.dtype, torch.device, *_CONTAINERS)
_LATE_CORE = "easycv.thirdparty.deformable_attention.functions"  # EasyCV imports its core in the forward of its layer.
# A global of LibreYOLO that switches between two ways to compute the same output.
_SWITCHES = ("_FORCE_MANUAL_GRID_SAMPLE",)
_ABSENT = object()
# The attributes that change if a function, a layer or an autograd function is replaced.
_get_code = operator.attrgetter("__code__", "__defaults__", "__kwdefaults__")
_get_forward = operator.attrgetter("forward")
_get_apply = operator.attrgetter("apply", "forward", "backward")


def _is_constant(value: Any) -> bool:
    """Return whether a value is a constant, or a container of constants."""
    parts = (*value, *value.values()) if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
    return isinstance(value, _CONSTANTS) and all(map(_is_constant, parts))


def _is_mutable(value: Any) -> bool:
    """Return whether a container's content may change while it stays the same object."""
    return isinstance(value, (list, dict, set)) or (isinstance(value, tuple) and any(map(_is_mutable, value)))


class NoKey(Exception):
    """Raised for a function that has no key. `args[0]` is the reason."""


@dataclass
class Code:
    """The key of a function, and what the function and the functions that it calls reach.

    Attributes:
        key: equal for equal code.
        cores: the sampling cores that the code calls. Their code is not read.
        functions: the functions that were read, without the function whose code `patch` replaces.
        names: id of a namespace -> the namespace, and the names that the code reads in it.
        attributes: names of the layer's attributes that the code reads, without methods.
        methods: names of the layer's methods that the code calls.
        writes: names of the layer's attributes that the code sets.
        passes_self: whether the code passes the layer itself to other code, which may read any attribute.
    """

    key: str = ""
    cores: list[Any] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)
    names: dict[int, tuple[Mapping[str, Any], set[str]]] = field(default_factory=dict)
    attributes: set[str] = field(default_factory=set)
    methods: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    passes_self: bool = False

    def join(self, core: Code) -> Code:
        """Return this code, with what its core reaches added."""
        spaces = {key: (space, {*names}) for key, (space, names) in self.names.items()}
        for key, (space, names) in core.names.items():
            spaces.setdefault(key, (space, set()))[1].update(names)
        return dataclasses.replace(self, names=spaces, functions=[*self.functions, *core.functions])

    def watch(self, owner: type | None, cores: Iterable[Any] = ()) -> Callable[[Any], bool]:
        """Return a function that takes a class and says whether all that the code reaches is unchanged: the methods of the
        class, the code of functions, the objects in namespaces, and the methods of cores.

        A name that stands for None now may get a compiled module later. That does not count as a change.
        """
        watched = [*self.names.values()]
        for core in cores:
            if isinstance(core, type) and issubclass(core, torch.nn.Module):
                # Leave out torch.nn.Module: torch.export and torch.fx replace its `__call__` while they trace.
                watched += [(vars(base), {"__call__"}) for base in core.__mro__ if base not in torch.nn.Module.__mro__]
        plain = [core for core in cores if not is_autograd(core)]
        functions = [*self.functions, *(unwrap(core.forward if isinstance(core, type) else core) for core in plain)]
        objects, absences = [], []
        for space, names in watched:
            if absent := [name for name in names if name not in space]:  # mostly builtins
                absences.append((space, absent))
            if present := [name for name in names if space.get(name) is not None]:
                get = operator.itemgetter(*present, present[0])  # With one name, an itemgetter would not return a tuple.
                objects.append((get, space, get(space)))
        objects += [(_get_code, function, _get_code(function)) for function in functions]
        mutable = [value for *_, values in objects for value in values if _is_mutable(value) and _is_constant(value)]
        contents = [(value, repr(value)) for value in mutable]  # Other contents, such as tensors, take long to write.
        kinds = [(_get_apply if is_autograd(core) else _get_forward, core) for core in cores if isinstance(core, type)]
        kinds += [(operator.attrgetter(*sorted(self.methods)), owner)] if owner and self.methods else []
        methods = [(get, kind, get(kind)) for get, kind in kinds]

        def is_unchanged(kind: Any) -> bool:
            try:
                for get, holder, known in objects:
                    if not all(map(operator.is_, get(holder), known)):
                        return False
            except KeyError:  # A name is gone.
                return False
            for space, absent in absences:
                if not space.keys().isdisjoint(absent):
                    return False
            for container, text in contents:
                if repr(container) != text:
                    return False
            for get, core, known in methods:  # noqa: SIM110  (a generator takes longer)
                if get(kind if core is owner else core) != known:
                    return False
            return True

        _torch_private.mark_as_constant(is_unchanged)
        return is_unchanged


@dataclass
class Reader:
    """Reads the code of functions. A call of a core is a part of the caller's key, but the core's own code is not.

    A reader keeps the syntax trees of files for one call of `patch`, during which files do not change.
    """

    is_core: Callable[[Any], bool]
    files: dict[str, _File] = field(default_factory=dict)

    def read(self, original: Any) -> Code:
        """Return the code of a function, of a module class's forward, or of an autograd function's forward and backward."""
        code = Code()
        if not isinstance(original, type):
            parts = [self._read_function(original, None, code)]
        elif not isinstance(inspect.getattr_static(original, "forward", None), (types.FunctionType, staticmethod)):
            raise NoKey("its forward is not a function")
        elif is_autograd(original):
            # `patch` replaces methods together with their wrappers, so the key has the wrappers.
            parts = []
            for method in (inspect.getattr_static(original, name) for name in ("forward", "backward")):
                part = self._read_function(method, None, code, decorated=True)
                wrappers = self._read_wrappers(method, self._find(find_source(method)), code)
                parts.append([part, wrappers] if wrappers else part)
        else:
            parts = [self._read_function(vars(original)["forward"], original, code)]
        if not is_autograd(original):
            del code.functions[0]
        code.key = hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
        return code

    def read_bytecode(self, function: types.FunctionType, kind: type | None) -> Code:
        """Return what the bytecode of a function without a key shows. Any name in it may be an attribute of the layer."""
        code, waiting = Code(), [function]
        for reached in waiting:
            names = {name for own in list_code(reached) for name in own.co_names}
            self._note(code, reached.__globals__, names & reached.__globals__.keys())
            if reached is function and kind:
                methods = {n for n in names if isinstance(inspect.getattr_static(kind, n, None), types.FunctionType)}
                code.methods = {name for name in methods if not is_of_known_library(getattr(kind, name))}
                code.attributes = names - methods
            for value in map(reached.__globals__.get, names):
                below = unwrap(value) if isinstance(value, types.FunctionType) else value
                if self.is_core(below):
                    code.cores.append(below)
                elif isinstance(below, types.FunctionType) and not is_of_known_library(below) and below not in waiting:
                    waiting.append(below)
        code.functions = waiting[1:]
        return code

    def _find(self, function: Any) -> ast.FunctionDef:
        name = function.__code__.co_filename
        if name not in self.files:
            self.files[name] = _File(name)
        return self.files[name].find(function.__code__)

    def _read_function(self, function: Any, kind: type | None, code: Code, wraps: Any = None, decorated: bool = False) -> Any:
        """Read a function below its wrappers. If `wraps` is given, read a wrapper, which holds `wraps` in its closure."""
        source, is_static = find_source(function) if wraps is None else function, isinstance(function, staticmethod)
        if source in code.functions:
            return "again"
        if not isinstance(source, types.FunctionType):
            raise NoKey(f"{type(source).__name__} is not a function")
        tree = self._find(source)
        code.functions.append(source)
        own = source.__code__.co_varnames[0] if kind and source.__code__.co_argcount and not is_static else ""
        text = _Text(own)
        body = [text.dump(tree.args), text.dump(_drop_checks(tree.body, tree))]
        parts: list[Any] = [body, [_Text().dump(d) for d in tree.decorator_list] if decorated else []]
        if "super" in text.names:
            raise NoKey(f"{source.__qualname__} calls super()")
        for name, cell in zip(source.__code__.co_freevars, source.__closure__ or (), strict=True):
            if name == "__class__":
                continue
            content = cell.cell_contents
            if wraps is None:
                raise NoKey(f"{source.__qualname__} has a closure")
            if content is wraps:
                parts.append([name, "wrapped"])
            elif isinstance(content, types.FunctionType):
                parts.append([name, self._read_wrapped(content, None, code)])
            elif isinstance(content, _CONSTANTS):
                parts.append([name, repr(content)])
            elif isinstance(content, type):
                parts.append([name, f"{content.__module__}.{content.__qualname__}"])
            else:
                raise NoKey(f"the wrapper {source.__code__.co_name} holds a {type(content).__name__}")
        defaults = [d for d in (*tree.args.defaults, *tree.args.kw_defaults) if d]
        if any(not isinstance(default, ast.Constant) for default in defaults):
            parts.append(repr((source.__defaults__, source.__kwdefaults__)))
        elif [d.value for d in defaults] != [*(source.__defaults__ or ()), *(source.__kwdefaults__ or {}).values()]:  # type: ignore[attr-defined]
            raise NoKey(f"the defaults of {source.__qualname__} are not those of its file")
        code.passes_self |= text.passes_self
        code.writes |= text.writes
        loads = (name for own in list_code(source) for name in list_loads(own, "LOAD_GLOBAL", "LOAD_NAME"))
        names = text.names.intersection(loads)
        self._note(code, source.__globals__, names)
        for name in sorted(names):
            parts.append([name, self._describe_global(source, name, text, code)])
        parts += self._read_members(source, text, code)
        for name in sorted(text.attributes):
            method = inspect.getattr_static(kind, name, None)
            method = method.fget if isinstance(method, property) else method
            below = unwrap(getattr(method, "__func__", method))
            if isinstance(method, staticmethod) and self.is_core(below):
                parts.append([name, self._note_core(method.__func__, code)])
            elif isinstance(below, types.FunctionType) and not is_of_known_library(below):
                code.methods.add(name)
                parts.append([name, self._read_wrapped(method, kind, code)])
            elif callable(method) and not isinstance(method, type) and not is_of_known_library(method):
                raise NoKey(f"{name} is a {type(method).__name__}, not a function")
            else:
                code.attributes.add(name)
        return parts

    def _note(self, code: Code, space: Mapping[str, Any], names: set[str]) -> None:
        code.names.setdefault(id(space), (space, set()))[1].update(names)

    def _read_wrapped(self, function: Any, kind: type | None, code: Code) -> Any:
        """Read a function, and the wrappers around it."""
        part = self._read_function(function, kind, code)
        tree = self._find(find_source(function))
        decorators = [_Text().dump(d) for d in tree.decorator_list if getattr(d, "id", "") not in _KINDS]
        wrappers = self._read_wrappers(function, tree, code)
        return [part, decorators, wrappers] if decorators or wrappers else part

    def _read_wrappers(self, function: Any, tree: ast.FunctionDef, code: Code) -> list[Any]:
        """Return the code of a function's wrappers. A wrapper of a known library, such as no_grad, must be a decorator."""
        parts, wrapper, source, of_torch = [], getattr(function, "__func__", function), find_source(function), 0
        while wrapper is not source and hasattr(wrapper, "__wrapped__") and unwrap(wrapper) is not wrapper:
            if isinstance(wrapper, functools._lru_cache_wrapper) and tree.decorator_list:  # A cache computes the same.
                wrapper = wrapper.__wrapped__
                continue
            if not isinstance(wrapper, types.FunctionType):
                raise NoKey(f"{source.__qualname__} is wrapped by a {type(wrapper).__name__}")
            if str(wrapper.__globals__.get("__name__")).partition(".")[0] in _KNOWN_PACKAGES:
                of_torch += 1
                if of_torch > sum(getattr(d, "id", "") not in _KINDS for d in tree.decorator_list):
                    raise NoKey(f"{source.__qualname__} is wrapped by {wrapper.__code__.co_name}")
            else:
                parts.append(self._read_function(wrapper, None, code, wraps=wrapper.__wrapped__))
            wrapper = getattr(wrapper.__wrapped__, "__func__", wrapper.__wrapped__)
        return parts

    def _note_core(self, core: Any, code: Code) -> str:
        """Note a core. Code that calls a wrapped core has no key, because `patch` replaces the core below its wrapper."""
        below = unwrap(core)
        if wrapper := find_wrapper(core):
            raise NoKey(f"its core {below.__qualname__} is wrapped by {wrapper}")
        code.cores.append(below)
        return "core"

    def _describe_global(self, function: Any, name: str, text: _Text, code: Code) -> Any:
        value = function.__globals__.get(name, getattr(builtins, name, _ABSENT))
        if self.is_core(value):
            return self._note_core(value, code)
        if is_of_known_library(value):
            return getattr(value, "__qualname__", None) or value.__name__
        if isinstance(unwrap(value) if callable(value) else value, types.FunctionType):
            return self._read_wrapped(value, None, code)
        if callable(value):
            kind = "class" if isinstance(value, type) else type(value).__name__
            raise NoKey(f"{name} is a {kind}, not a function")
        file = self.files[function.__code__.co_filename]
        bindings, bound = file.find_bindings(name), []
        if _is_constant(value):
            literals = []
            for binding in bindings:
                with contextlib.suppress(ValueError):  # no literal
                    if isinstance(binding, ast.Assign) and isinstance(binding.targets[0], ast.Name):
                        literals.append(ast.literal_eval(binding.value))
            if bindings and len(literals) == len(bindings):
                if value not in literals:
                    raise NoKey(f"the global {name} is {value!r}, which its file does not assign")
            elif not bindings or not isinstance(value, (bool, str, type(None))):  # Flags and versions depend on the machine.
                bound = [repr(value)]
        elif (name,) in text.bare and value is not _ABSENT:
            raise NoKey(f"the global {name} is a {type(value).__name__}, whose content may change")
        return bound + [_Text().dump(b) if isinstance(b, ast.Assign) else [b[0], b[1].name] for b in bindings]

    def _read_members(self, function: Any, text: _Text, code: Code) -> list[Any]:
        """Read functions that code reaches through a module, as `utils.helper`. Check that nothing of torch is replaced."""
        parts = []
        for root, *names in sorted(text.chains):
            if root in _SWITCHES:
                continue
            space, value, path = function.__globals__, function.__globals__.get(root), root
            for place, name in enumerate(names, 1):
                if isinstance(value, types.FunctionType) and not is_of_known_library(value):
                    raise NoKey(f"{path} is a function, whose attribute {name} may change")
                if not isinstance(value, types.ModuleType):
                    if value is None or value is _ABSENT or isinstance(value, (type, *_CONSTANTS)) or callable(value):
                        break
                    members = getattr(value, "__dict__", {})  # such as a namespace of options
                    content = members.get(name, _ABSENT)
                    is_read = place == len(names) and (root, *names) in text.bare
                    if not _is_constant(content) and (is_read or callable(content) or not hasattr(content, "__dict__")):
                        raise NoKey(f"the content of {path} may change, which is a {type(value).__name__}")
                    self._note(code, members, {name})
                    if _is_constant(content):
                        parts.append([f"{path}.{name}", repr(content)])
                        break
                    value, path = content, f"{path}.{name}"
                    continue
                space, path = value, f"{path}.{name}"
                value = vars(space).get(name, _ABSENT)
                if isinstance(value, types.ModuleType):
                    self._note(code, vars(space), {name})
            # A compiled function may be absent or None where its file was not built.
            if (
                isinstance(value, types.ModuleType)
                or not isinstance(space, types.ModuleType)
                or value is None
                or value is _ABSENT
            ):
                continue
            originals = _torch_private.ORIGINALS.get(space, {})
            self._note(code, vars(space), {path.rpartition(".")[2]})
            if originals.get(path.rpartition(".")[2], value) is not value:
                raise NoKey(f"{path} is replaced")
            if self.is_core(value):
                parts.append([path, self._note_core(value, code)])
            elif str(getattr(value, "__module__", "")).startswith("mx_driving") or (
                is_of_known_library(space) and (is_of_known_library(value) or not isinstance(value, types.FunctionType))
            ):
                continue  # compat's functions stand for those of a compiled module
            elif isinstance(value, types.FunctionType):
                parts.append([path, self._read_wrapped(value, None, code)])
            elif _is_constant(value):
                parts.append([path, repr(value)])
            elif not isinstance(value, types.BuiltinFunctionType):
                raise NoKey(f"{path} is a {'class' if isinstance(value, type) else type(value).__name__}, not a function")
        if asked := sorted((text.names | text.members) & _ASKING):
            raise NoKey(f"it uses {asked[0]}")
        originals = _torch_private.ORIGINALS[torch.Tensor]
        for name in sorted(text.members):
            if name[:2] != "__" and getattr(torch.Tensor, name, None) is not originals.get(name):
                raise NoKey(f"torch.Tensor.{name} is replaced")
        return parts


class _File:
    """A Python file's syntax trees. To save time, a definition at the top level is parsed only if it is asked for."""

    def __init__(self, name: str) -> None:
        self._name, self._lines = name, linecache.getlines(name)
        if not self._lines and os.path.exists(name):  # Python accepts comments that are not UTF-8, linecache does not.
            with open(name, encoding="utf-8-sig", errors="replace") as file:
                self._lines = file.readlines()
        lines = [k for k, line in enumerate(self._lines) if _STATEMENT.match(line)]
        starts = [k for n, k in enumerate(lines) if n == 0 or not self._lines[lines[n - 1]].startswith("@")]
        self._blocks = list(itertools.pairwise([*starts, len(self._lines)]))
        self._parsed: dict[int, tuple[ast.Module, list[types.CodeType]]] = {}

    def find(self, code: types.CodeType) -> ast.FunctionDef:
        """Return the definition that compiles to `code`. Compile to check: the file may have changed since its import."""
        tree, compiled = self._parse(code.co_firstlineno - 1)
        for node in ast.walk(tree) if code in compiled else ():
            if not isinstance(node, ast.FunctionDef) or node.name != code.co_name:
                continue
            if min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) == code.co_firstlineno:
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
            tree = ast.Module([], [])
            for lines in (kept, self._lines):
                with contextlib.suppress(SyntaxError, ValueError):
                    tree = ast.parse("".join(lines))
                    break
            self._parsed[start] = tree, list(list_code(compile(tree, self._name, "exec", dont_inherit=True)))
        return self._parsed[start]

    def find_bindings(self, name: str) -> list[Any]:
        """Return the assignments of a global name in the file, and (module, alias) of its imports, also of failed imports."""
        bindings: list[Any] = []
        waiting: list[ast.AST] = [self._parse(0)[0]]
        while waiting:  # `try` and `if` have statements, too.
            statement, *waiting = waiting
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                aliases = [alias for alias in statement.names if (alias.asname or alias.name) == name]
                bindings += [(getattr(statement, "module", ""), alias) for alias in aliases]
            elif isinstance(statement, ast.Assign):
                names = [t.id for target in statement.targets for t in ast.walk(target) if isinstance(t, ast.Name)]
                bindings += [statement] * (name in names)
            parts = [c for c in ast.iter_child_nodes(statement) if isinstance(c, (ast.stmt, ast.excepthandler))]
            waiting = [part for part in parts if not isinstance(part, _DEFINITIONS)] + waiting
        return bindings


def is_of_known_library(value: Any) -> bool:
    """Return whether a module, class or function is of Python or of `_KNOWN_PACKAGES`. Its name then stands for its code.

    functools.wraps copies `__module__`, so take the module of a function from its globals.
    """
    if isinstance(value, types.ModuleType):
        module = value.__name__
    elif isinstance(value, types.FunctionType):
        module = value.__globals__.get("__name__")
    else:
        module = value.__module__ if callable(value) and hasattr(value, "__name__") else ""
    return str(module).partition(".")[0] in {*_KNOWN_PACKAGES, "_operator", "None"} or str(module).startswith(KERNELS)


@dataclass
class _Text:
    """Writes a syntax tree as nested lists.

    Drops docstrings, annotations, statements that only check or print, empty fields, and fields of the tree that only some
    Python versions have.

    Attributes:
        own: the name of the layer itself (self), or "".
        names: all names of variables.
        chains: a name, and the attributes that are read from it one after the other: ("torch", "nn", "functional", "softmax").
        bare: the names and chains of which no further attribute is read.
        members: the names of all attributes.
        attributes, writes: the names of the layer's attributes that are loaded and set.
        passes_self: whether the layer itself is used, not only its attributes.
    """

    own: str = ""
    names: set[str] = field(default_factory=set)
    chains: set[tuple[str, ...]] = field(default_factory=set)
    bare: set[tuple[str, ...]] = field(default_factory=set)
    members: set[str] = field(default_factory=set)
    attributes: set[str] = field(default_factory=set)
    writes: set[str] = field(default_factory=set)
    passes_self: bool = False
    _bases: set[ast.expr] = field(default_factory=set)  # of attributes, and what is compared with None

    def dump(self, node: Any) -> Any:
        if isinstance(node, list):
            return [self.dump(part) for part in node]
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Name):
            self.names.add(node.id)
            if node not in self._bases:
                self.bare.add((node.id,))
            self.passes_self |= node.id == self.own
        if isinstance(node, ast.Compare) and all(isinstance(c, ast.Constant) and c.value is None for c in node.comparators):
            self._bases.add(node.left)  # `_C is not None` reads nothing of a compiled module.
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            if any(module.partition(".")[0] not in _KNOWN_PACKAGES and module != _LATE_CORE for module in modules):
                raise NoKey(f"it imports {modules[0]}")
        if isinstance(node, ast.Attribute):
            self.members.add(node.attr)
            self._bases.add(node.value)
            if isinstance(node.value, ast.Name) and node.value.id == self.own != "":
                (self.attributes if isinstance(node.ctx, ast.Load) else self.writes).add(node.attr)
                return ["Attribute", self.own, node.attr, isinstance(node.ctx, ast.Load)]
            names, base = [node.attr], node.value
            while isinstance(base, ast.Attribute):
                names, base = [base.attr, *names], base.value
            if isinstance(base, ast.Name):
                self.chains.add((base.id, *names))
                if node not in self._bases:
                    self.bare.add((base.id, *names))
        fields = []
        for name in node._fields:
            value = getattr(node, name, None)
            if name in ("body", "orelse", "finalbody") and isinstance(value, list):
                value = _drop_checks(value, node)
            if name not in _DROPPED and value != [] and (value is not None or name == "value"):
                fields.append([name, self.dump(value)])
        return [type(node).__name__, *fields]


def _drop_checks(statements: list[ast.stmt], owner: ast.AST) -> list[ast.stmt]:
    """Return the statements of a definition or a block without docstrings, and without statements that only check or print."""
    kept = []
    for place, statement in enumerate(statements):
        value = getattr(statement, "value", None)
        dropped = False
        if isinstance(statement, ast.Expr) and isinstance(value, ast.Constant):
            dropped = place == 0 and isinstance(owner, _DEFINITIONS)
        elif isinstance(statement, ast.Expr) and isinstance(value, ast.Call):
            dropped = _get_called(value) in _WORDS and _is_harmless(value, _HARMLESS | _WORDS)
        elif isinstance(statement, ast.If) and not statement.orelse and _only_raises(statement.body):
            dropped = _is_harmless(statement.test, _HARMLESS)
        elif isinstance(statement, ast.Assert):
            dropped = _is_harmless(statement.test, _HARMLESS | _ASSERTED)
        if not dropped:
            kept.append(statement)
    return [] if isinstance(owner, ast.If) and statements is owner.orelse and _only_raises(statements) else kept


def _only_raises(statements: list[ast.stmt]) -> bool:
    return all(isinstance(statement, ast.Raise) for statement in statements)


def _is_harmless(node: ast.AST, allowed: set[str]) -> bool:
    """Return whether an expression calls only `allowed` functions and methods, and assigns nothing."""
    calls = {_get_called(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
    return calls <= allowed and not any(isinstance(part, ast.NamedExpr) for part in ast.walk(node))


def _get_called(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))
