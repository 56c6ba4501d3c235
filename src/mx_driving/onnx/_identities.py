"""Bypass nodes that return one of their inputs, such as Identity, x * 1 and x + 0, during the search of a graph.

Exporters write such nodes anywhere: paddle2onnx writes 2 * x - 1 as ((x * 2) + 0) * 1 - 1. After the search, connect the
readers as before: `fuse` must keep the nodes that it does not replace, and -0.0 + 0 is 0.0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ._graph import are_fixed, constant, dims, is_node, read_attribute

_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}  # kind -> the neutral number
_COMMUTATIVE = {"Add", "Mul"}
_OF_ONE = {"Concat", "Max", "Mean", "Min", "Sum"}  # with a single input, they return it
_RESHAPE = {"Flatten", "Reshape", "Squeeze"}  # they keep the number of elements and their order
_REPEAT = {"Expand", "Tile"}
_BYPASSED = "bypassed"  # key of a value's metadata: the bypassed nodes that read it


class _Bypass(NamedTuple):
    node: ir.Node
    index: int  # index of the returned input
    uses: tuple[Any, ...]  # (reader of the output, index of the reader's input)


@contextlib.contextmanager
def bypass(model: ir.Model) -> Iterator[None]:
    """In the block, connect the readers of nodes that change nothing to the inputs of these nodes."""
    bypasses = _bypass_all(model)
    try:
        yield
    finally:
        for one in reversed(bypasses):
            _restore(*one)


def take_out(model: ir.Model) -> None:
    """Remove nodes that change nothing, and nodes that are not read."""
    _bypass_all(model)
    RemoveUnusedNodesPass()(model)


def _bypass_all(model: ir.Model) -> list[_Bypass]:
    bypasses, opset = [], model.graph.opset_imports.get("", 0)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (index := find_returned(node, opset)) is not None and node.outputs[0].uses():
            bypasses.append(_connect(node, index))
    return bypasses


def _connect(node: ir.Node, index: int) -> _Bypass:
    output, value = node.outputs[0], node.inputs[index]
    assert value is not None
    uses = tuple(output.uses())
    for user, position in uses:
        user.replace_input_with(position, value)
    value.meta.setdefault(_BYPASSED, []).append(node)
    if not output.is_graph_output():
        node.replace_input_with(index, None)  # the bypassed node is no reader
    return _Bypass(node, index, uses)


def _restore(node: ir.Node, index: int, uses: tuple[Any, ...]) -> None:
    """Connect the readers to the node again, and the node to the readers' present input, which may be a new tensor."""
    (user, position), *_ = uses
    value = user.inputs[position]
    node.replace_input_with(index, value)
    for user, position in uses:
        user.replace_input_with(position, node.outputs[0])
    if value is not None:
        value.meta.pop(_BYPASSED, None)


def name_nodes(nodes: Iterable[ir.Node]) -> tuple[str, ...]:
    """Return the names of the nodes, and of bypassed nodes between them or before them."""
    nodes = list(nodes)
    values = [v for node in nodes for v in node.inputs if v is not None]
    return tuple(dict.fromkeys(str(node.name) for node in (*nodes, *(n for v in values for n in v.meta.get(_BYPASSED, ())))))


def find_returned(node: ir.Node, opset: int) -> int | None:
    """Return the index of the input that the node returns unchanged; None if the node may change something."""
    kind = node.op_type
    if not is_node(node, kind) or not node.inputs:
        return None
    if kind in _NEUTRAL:
        indices = (0, 1) if kind in _COMMUTATIVE else (0,)
        return next((i for i in indices if _is_neutral(node.inputs[i], node.inputs[1 - i], _NEUTRAL[kind])), None)
    returns = node.inputs[0] is not None and _returns_first(node, node.inputs[0], opset)
    return 0 if returns else None


def _is_neutral(value: ir.Value | None, other: ir.Value | None, number: int) -> bool:
    """Return whether `other` has this number everywhere, and does not broadcast `value` to a larger shape."""
    array = constant(other)
    if value is None or array is None or not array.size or array.flat[0] != number or (array != number).any():
        return False
    sizes = dims(value)[::-1]
    broadcasts = len(array.shape) > len(sizes) or any(
        a not in (1, size) for a, size in zip(array.shape[::-1], sizes, strict=False)
    )
    return array.ndim == 0 or not broadcasts


def _returns_first(node: ir.Node, value: ir.Value, opset: int) -> bool:
    kind = node.op_type
    if kind == "Identity" or kind in _OF_ONE:
        return len(node.inputs) == 1
    if kind == "Split":
        return len(node.outputs) == 1
    if kind in ("Cast", "CastLike"):
        return value.dtype is not None and value.dtype == _read_target(node)
    if kind == "Dropout":
        return _is_inference(node, opset)
    if kind == "Transpose":
        order = read_attribute(node, "perm")
        return order is not None and list(order) == sorted(order)
    if kind == "Pad":
        return not np.any(_read_table(node, 1, "pads", 1))
    return _keeps_shape(node, value)


def _read_target(node: ir.Node) -> ir.DataType | None:
    """Return the dtype to which a Cast or CastLike casts."""
    if node.op_type == "Cast":
        return ir.DataType(read_attribute(node, "to", 0))
    return None if node.inputs[1] is None else node.inputs[1].dtype


def _is_inference(node: ir.Node, opset: int) -> bool:
    if opset < 7:
        return read_attribute(node, "is_test", 0) == 1
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is None or np.array_equal(constant(mode), False)


def _read_table(node: ir.Node, index: int, name: str, default: int) -> np.ndarray | int:
    """Return the table of an input, or of an attribute in older opsets; the default if the input is not a constant."""
    if name in node.attributes:
        return np.array(node.attributes[name].value)
    array = constant(node.inputs[index]) if index < len(node.inputs) else None
    return default if array is None else array


def _keeps_shape(node: ir.Node, value: ir.Value) -> bool:
    """Return whether a node that reshapes, repeats or slices has an output of the input's shape."""
    before, after = dims(value), dims(node.outputs[0])
    if value.shape is None or node.outputs[0].shape is None or len(before) != len(after):
        return False
    free = [pair for pair in zip(before, after, strict=True) if not are_fixed(pair) or pair[0] != pair[1]]
    if node.op_type in _RESHAPE:  # the size of one free axis follows from the others
        return not free or (len(free) == 1 and not are_fixed(free[0]) and 0 not in before)
    if node.op_type == "Slice":
        return not free and (len(node.inputs) < 5 or bool(np.all(_read_table(node, 4, "steps", 0) == 1)))
    return node.op_type in _REPEAT and not free
