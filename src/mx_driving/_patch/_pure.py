"""Decide whether an unknown core can be tried: it must be a pure function, and a trial must be able to take its branches.

A pure function of tensors has no state. If it gives our numbers on small examples that take every branch, it gives our numbers
on all inputs. The examples of a trial take both sides of a branch on an optional argument, on the number of axes, or on whether
a size is 1. They do not take both sides of a branch on a dtype, a device or another size.
"""

from __future__ import annotations

import ast
import dis
import inspect
import types

from ._code import Code
from ._parameters import Parameters, list_code

_BUILTINS = {"len", "range", "zip", "enumerate", "int", "float", "list", "tuple", "sum", "isinstance", "map", "reversed"}
_BUILTINS |= {"dict", "slice", "str"}
_SETTING = {"STORE_GLOBAL": "sets the global", "DELETE_GLOBAL": "deletes the global", "STORE_ATTR": "sets the attribute"}
# Code that names one of these is not tried: no trial changes a setting, and no example has NaN or infinity.
_STATES = {"is_grad_enabled", "is_autocast_enabled", "is_inference_mode_enabled", "get_default_dtype", "globals", "environ"}
_STATES |= {"isnan", "isinf", "isfinite", "nan_to_num", "get"}
_EXPORTING = {"is_exporting", "is_compiling", "is_tracing", "is_scripting", "is_in_onnx_export", "isinstance"}


def explain_impurity(code: Code) -> str:
    """Return why code cannot be tried, or nothing."""
    for function, (path, _) in code.functions.items():
        if reason := _explain_bytecode(function):
            return f"{path}{reason}"
    for name, path in code.builtins.items():
        if name not in _BUILTINS and not name.endswith(("Error", "Warning")):
            return f"{path}reads the global {name}"
    for name, path in code.values.items():
        return f"{path}reads the global {name}"
    for function, (path, tree) in code.functions.items():
        if reason := _explain_branches(tree, Parameters(function)):
            return f"{path}{reason}"
    return ""


def _explain_bytecode(function: types.FunctionType) -> str:
    if inspect.isgeneratorfunction(function):
        return "is not a plain function"
    for code in list_code(function):
        for step in dis.get_instructions(code):
            if step.opname in _SETTING:
                return f"{_SETTING[step.opname]} {step.argval}"
            if step.opname == "IMPORT_NAME" and str(step.argval).partition(".")[0] not in ("torch", "math"):
                return f"imports {step.argval}"
        if states := _STATES & set(code.co_names):
            return f"asks for {min(states)}"
    return ""


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
    """Return the comparisons of tensors, as in `(x > 0) & (x < w)`, `(x > 0).float()` and `x[1:] != x[:-1]`.

    They choose no branch.
    """
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
