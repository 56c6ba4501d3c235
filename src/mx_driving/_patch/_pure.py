"""Whether an unknown core can be tried: a pure function whose branches a trial can take.

A pure function of tensors has no state. If it gives our numbers on small examples that take every branch, it gives our numbers
on all inputs. The examples of a trial take branches on optional arguments, on the number of axes, and on whether a size is 1.
They do not take branches on a dtype, a device or another size.
"""

from __future__ import annotations

import ast
import dis
import inspect
import types
from collections.abc import Callable
from typing import Any

from ._code import NoKey, Reader, is_of_known_library, list_globals
from ._parameters import Parameters, find_source, list_code, unwrap

_BUILTINS = {"len", "range", "zip", "enumerate", "int", "float", "list", "tuple", "sum", "isinstance", "map", "reversed"}
_BUILTINS |= {"dict", "slice", "str"}
_SETTING = {"STORE_GLOBAL": "sets the global", "DELETE_GLOBAL": "deletes the global", "STORE_ATTR": "sets the attribute"}
_STATES = {"is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled", "get_default_dtype", "globals", "environ"}
_STATES |= {"isnan", "isinf", "isfinite", "nan_to_num", "get"}  # No example has such numbers or settings.
_EXPORTING = {"is_exporting", "is_compiling", "is_tracing", "is_scripting", "is_in_onnx_export", "isinstance"}


def explain_impurity(function: Any, reader: Reader, trusts: Callable[[Any], bool], seen: tuple[Any, ...] = ()) -> str:
    """Return why a function cannot be tried, or nothing. `trusts` is true for replaced cores, which are not read."""
    source = find_source(function)
    if not isinstance(source, types.FunctionType) or source.__closure__ or inspect.isgeneratorfunction(source):
        return "is not a plain function"
    for code in list_code(source):
        for step in dis.get_instructions(code):
            if step.opname in _SETTING:
                return f"{_SETTING[step.opname]} {step.argval}"
            if step.opname == "IMPORT_NAME" and str(step.argval).partition(".")[0] not in ("torch", "math"):
                return f"imports {step.argval}"
        if states := _STATES & set(code.co_names):
            return f"asks for {min(states)}"
    for name in sorted(set(list_globals(source))):
        if reason := _explain_global(source, name, reader, trusts, (*seen, source)):
            return reason
    try:
        return _explain_branches(reader.find(source), Parameters(source))
    except NoKey as error:
        return str(error)


def _explain_global(function: Any, name: str, reader: Reader, trusts: Callable[[Any], bool], seen: tuple[Any, ...]) -> str:
    if name not in function.__globals__:
        is_error = name.endswith(("Error", "Warning"))
        return "" if name in _BUILTINS or is_error else f"reads the global {name}"
    value = function.__globals__[name]
    below = unwrap(value) if callable(value) and not isinstance(value, type) else value
    if is_of_known_library(value) or below in seen or trusts(below):
        return ""
    if isinstance(below, types.FunctionType):
        reason = explain_impurity(below, reader, trusts, seen)
        return f"calls {name}, which {reason}" if reason else ""
    return f"reads the global {name}"


def _explain_branches(node: ast.FunctionDef, parameters: Parameters) -> str:
    of_tensors = {id(compared) for part in ast.walk(node) for compared in _list_compared_tensors(part)}
    for part in ast.walk(node):
        tests = [part.test] if isinstance(part, (ast.If, ast.IfExp, ast.While)) else []
        tests += part.ifs if isinstance(part, ast.comprehension) else []
        tests += [part] if isinstance(part, ast.Compare) and id(part) not in of_tensors else []
        for test in tests:
            if not _is_allowed(test, node, parameters):
                return f"has a branch on {ast.unparse(test)}"
    return ""


def _list_compared_tensors(node: ast.AST) -> list[ast.expr]:
    """Return the comparisons of tensors. `(x > 0) & (x < w)`, `(x > 0).float()` and `x[1:] != x[:-1]` are not branches."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        return [node.left, node.right]
    if isinstance(node, ast.Compare) and isinstance(node.left, ast.Subscript):
        return [node] if isinstance(node.left.slice, ast.Slice) else []
    return [node.value] if isinstance(node, ast.Attribute) else []


def _is_allowed(test: ast.expr, node: ast.FunctionDef, parameters: Parameters) -> bool:
    """Return whether the examples of a trial take both branches of a test, or both branches compute the same."""
    if isinstance(test, ast.BoolOp):
        return all(_is_allowed(value, node, parameters) for value in test.values)
    if isinstance(test, ast.UnaryOp):
        return _is_allowed(test.operand, node, parameters)
    if isinstance(test, ast.Name):
        values = [
            s.value for s in ast.walk(node) if isinstance(s, ast.Assign) and ast.dump(s.targets[0]) == _dump_store(test.id)
        ]
        if test.id in parameters.all:
            return not values and parameters.defaults.get(test.id, _is_allowed) in (None, False, True)
        return bool(values) and all(_is_allowed(value, node, parameters) for value in values)
    if isinstance(test, ast.Call):
        return getattr(test.func, "attr", getattr(test.func, "id", "")) in _EXPORTING
    if not isinstance(test, ast.Compare) or len(test.ops) != 1:
        return False
    try:
        right = ast.literal_eval(test.comparators[0])
    except ValueError:
        return False
    if right is None or isinstance(right, str) or (isinstance(right, tuple) and all(isinstance(r, str) for r in right)):
        return isinstance(test.left, ast.Name) and test.left.id in parameters.all
    axes = getattr(test.left, "attr", "") == "ndim" or getattr(getattr(test.left, "func", None), "attr", "") == "dim"
    return isinstance(test.ops[0], (ast.Eq, ast.NotEq)) and (axes or (isinstance(right, int) and right == 1))


def _dump_store(name: str) -> str:
    return ast.dump(ast.Name(name, ast.Store()))
