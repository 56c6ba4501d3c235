"""Satisfy rules of onnx's checker that onnxruntime lacks: sorted nodes, shapes of inputs and outputs, a name of the graph."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import TopologicalSortPass


def walk_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of the graph, of its subgraphs and of functions."""
    for graph in (model.graph, *model.functions.values()):
        yield from ir.traversal.RecursiveGraphIterator(graph)


def sort_nodes(model: ir.Model) -> bool:
    """Sort the nodes of all graphs topologically. Return whether a node has moved.

    Raises:
        ValueError: a node reads a tensor that nothing computes, or nodes read each other in a cycle.
    """
    nodes = list(walk_nodes(model))
    for node in nodes:
        _check_inputs(node)
    try:
        TopologicalSortPass()(model)
    except ValueError:
        raise ValueError(f"its nodes have a cycle, {', '.join(_find_cycle(nodes))}") from None
    return nodes != list(walk_nodes(model))


def _check_inputs(node: ir.Node) -> None:
    for value in node.inputs:
        if value is not None and value.producer() is None and not value.is_graph_input() and not value.is_initializer():
            name = node.name or node.outputs[0].name
            raise ValueError(f"no node or input gives {value.name}, which {node.op_type} ({name}) reads")


def _find_cycle(nodes: list[ir.Node]) -> list[str]:
    """Return the names of the outputs of nodes that read each other."""
    try:
        graphlib.TopologicalSorter({node: node.predecessors() for node in nodes}).prepare()
    except graphlib.CycleError as error:
        return [str(node.outputs[0].name) for node in error.args[1][1:]]
    return []


def check_file(path: Path, proto: onnx.ModelProto, has_changed: bool = False) -> None:
    """Check the file with onnx. If proto differs from the file, or lacks what the checker needs, check a completed copy."""
    _check_types(proto.graph)
    unsaid = [v for v in (*proto.graph.input, *proto.graph.output) if _lacks_shape(v)]
    onnx.checker.check_model(_complete(proto) if has_changed or unsaid or not proto.graph.name else path)


def _check_types(graph: onnx.GraphProto) -> None:
    for value in (*graph.input, *graph.output):
        if value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.elem_type:
            raise ValueError(f"{value.name} has no dtype")
    if untyped := [value.name for value in graph.input if value.type.WhichOneof("value") is None]:
        raise ValueError(f"the input {untyped[0]} has no type")


def _lacks_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not value.type.tensor_type.HasField("shape"))


def _complete(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Return a copy with a name and shapes, and with inputs instead of external tensors, whose files the checker would open."""
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    graph.name = graph.name or "graph"
    for value in filter(_lacks_shape, (*graph.input, *graph.output)):
        dtype = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, dtype, []))
    names = {value.name for value in graph.input}
    outside = {t.name: t for t in graph.initializer if t.data_location == onnx.TensorProto.EXTERNAL}
    inputs = [onnx.helper.make_tensor_value_info(n, t.data_type, t.dims) for n, t in outside.items() if n not in names]
    inside = [t for t in graph.initializer if t.name not in outside]
    del graph.initializer[:]
    graph.initializer.extend(inside)
    graph.input.extend(inputs)
    return copy
