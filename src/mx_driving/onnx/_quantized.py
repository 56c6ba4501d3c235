"""Deformable attention whose nodes are quantised to int8: QuantizeLinear and DequantizeLinear stand between them.

Such attention is not replaced, because its numbers are not the operator's. The search finds it in a copy without these nodes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from ._graph import constant, is_node

_ADVICE = "quantise Conv, MatMul and Gemm alone, or exclude the nodes that `mx-driving fuse --json` names in the float file"


def has_quantizers(model: ir.Model) -> bool:
    return any(is_node(node, "DequantizeLinear") for node in model.graph)


def remove_quantizers(model: ir.Model) -> tuple[ir.Model, dict[ir.Value, str]]:
    """Return a copy that computes in floats, and the node that stood behind each value."""
    copy = model.clone()
    removed: dict[ir.Value, str] = {}
    for node in list(copy.graph):
        if is_node(node, "DequantizeLinear") and (value := _float_behind(copy, node)) is not None:
            output = node.outputs[0]
            value.shape = value.shape or output.shape
            removed[value] = str(node.name)
            ir.convenience.replace_all_uses_with(output, value, replace_graph_outputs=True)
    RemoveUnusedNodesPass()(copy)
    return copy, removed


def _float_behind(model: ir.Model, node: ir.Node) -> ir.Value | None:
    """Return what was quantised before the node, or a new constant of the numbers that it gives."""
    quantised = node.inputs[0]
    assert quantised is not None
    before = quantised.producer()
    if before is not None:
        return before.inputs[0] if is_node(before, "QuantizeLinear") else None
    numbers, scale = constant(quantised), constant(node.inputs[1])
    zero: Any = constant(node.inputs[2]) if len(node.inputs) > 2 else 0
    if numbers is None or scale is None or scale.size != 1 or zero is None:
        return None
    array = ((numbers.astype(np.float64) - np.float64(zero)) * scale).astype(scale.dtype)
    value = ir.Value(name=f"{node.outputs[0].name}/float", const_value=ir.tensor(array))
    value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
    model.graph.register_initializer(value)
    return value


def explain_pairs(nodes: list[ir.Node], ends: set[ir.Value], removed: dict[ir.Value, str]) -> str | None:
    """Say which nodes stood between those of a match; None if none did."""
    names = [name for v, name in removed.items() if v not in ends and any(use.node in nodes for use in v.uses())]
    if not names:
        return None
    return f"{len(names)} pairs of QuantizeLinear and DequantizeLinear stand between its nodes, such as {names[0]}; {_ADVICE}"
