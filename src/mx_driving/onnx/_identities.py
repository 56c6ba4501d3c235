"""Bypass nodes that return one of their inputs, such as Identity, x * 1 and x + 0.

Exporters write such nodes anywhere: paddle2onnx writes 2 * x - 1 as ((x * 2) + 0) * 1 - 1. onnx_ir's pass takes Identity alone.
Of the 18 nodes `SAME` of tests/onnx/test_onnx_identities.py, onnxscript 0.7.2's optimiser leaves 11, such as x ** 1; it also
drops the names of nodes, which reports have. Only copies of a file's model are changed, for two reasons: `fuse` must keep the
nodes that it does not replace, and x + 0 turns -0.0 into 0.0.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ._graph import are_fixed, dims, is_node, read_attribute, read_constant

_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}  # type of a node -> its neutral number
_COMMUTATIVE = {"Add", "Mul"}
_OF_ONE = {"Concat", "Max", "Mean", "Min", "Sum"}  # nodes that return their input unchanged if they have only one
_RESHAPE = {"Flatten", "Reshape", "Squeeze"}  # they keep the number of elements and their order
_REPEAT = {"Expand", "Tile"}


def bypass_identities(model: ir.Model) -> dict[str, list[str]]:
    """Connect the readers of nodes that change nothing to the inputs of these nodes.

    Return name of an input -> names of the bypassed nodes that return it.
    """
    bypassed: dict[str, list[str]] = {}
    opset = model.graph.opset_imports.get("", 0)
    for node in ir.traversal.RecursiveGraphIterator(model.graph):
        if (index := find_returned(node, opset)) is not None and (value := node.inputs[index]) is not None:
            bypassed.setdefault(str(value.name), []).append(str(node.name))
            for user, position in tuple(node.outputs[0].uses()):
                user.replace_input_with(position, value)
            if not node.outputs[0].is_graph_output():
                node.replace_input_with(index, None)  # The bypassed node is no longer a reader of the input.
    return bypassed


def find_returned(node: ir.Node, opset: int) -> int | None:
    """Return the index of the input that the node returns unchanged; None if the node may change something."""
    op_type = node.op_type
    if not is_node(node, op_type) or not node.inputs:
        return None
    if op_type in _NEUTRAL:
        indices = (0, 1) if op_type in _COMMUTATIVE else (0,)
        return next((i for i in indices if _is_neutral(node.inputs[i], node.inputs[1 - i], _NEUTRAL[op_type])), None)
    value = node.inputs[0]
    if value is None:
        return None
    if op_type == "Identity" or op_type in _OF_ONE:
        returns = len(node.inputs) == 1
    elif op_type == "Split":
        returns = len(node.outputs) == 1
    elif op_type in ("Cast", "CastLike"):
        other = node.inputs[1] if op_type == "CastLike" else None
        target = read_attribute(node, "to", 0) if op_type == "Cast" else other and other.dtype
        returns = value.dtype is not None and value.dtype == target  # a number that names no dtype equals none
    elif op_type == "Dropout":
        mode = node.inputs[2] if len(node.inputs) > 2 else None
        returns = (
            read_attribute(node, "is_test", 0) == 1 if opset < 7 else mode is None or np.array_equal(read_constant(mode), False)
        )
    elif op_type == "Transpose":
        order = read_attribute(node, "perm")
        returns = order is not None and list(order) == sorted(order)
    elif op_type == "Pad":
        returns = not np.any(_read_table(node, 1, "pads", 1))
    else:  # nodes that reshape, repeat or slice return an input of the output's shape
        before, after = dims(value), dims(node.outputs[0])
        if value.shape is None or node.outputs[0].shape is None or len(before) != len(after):
            return None
        free = [pair for pair in zip(before, after, strict=True) if not are_fixed(pair) or pair[0] != pair[1]]
        if op_type in _RESHAPE:  # the size of one free axis follows from the others
            returns = not free or (len(free) == 1 and not are_fixed(free[0]) and 0 not in before)
        elif op_type == "Slice":
            returns = not free and (len(node.inputs) < 5 or bool(np.all(_read_table(node, 4, "steps", 0) == 1)))
        else:
            returns = op_type in _REPEAT and not free
    return 0 if returns else None


def _is_neutral(value: ir.Value | None, other: ir.Value | None, number: int) -> bool:
    """Return whether `other` has this number everywhere, and does not broadcast `value` to a larger shape."""
    array = read_constant(other)
    if value is None or array is None or not array.size or array.flat[0] != number or (array != number).any():
        return False
    sizes = dims(value)[::-1]
    broadcasts = len(array.shape) > len(sizes) or any(
        a not in (1, size) for a, size in zip(array.shape[::-1], sizes, strict=False)
    )
    return array.ndim == 0 or not broadcasts


def _read_table(node: ir.Node, index: int, name: str, default: int) -> np.ndarray | int:
    """Return the table of an input, or of an attribute in older opsets; the default if the input is not a constant."""
    if name in node.attributes:
        return np.array(node.attributes[name].value)
    array = read_constant(node.inputs[index]) if index < len(node.inputs) else None
    return default if array is None else array
