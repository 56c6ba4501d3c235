"""Meet demands that onnx's checker has and onnxruntime has not: sorted nodes, shapes of inputs and outputs, a graph's name."""

from __future__ import annotations

import graphlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

Graph = onnx.GraphProto | onnx.FunctionProto


def walk_graphs(graph: Graph) -> Iterator[Graph]:
    """Yield the graph and its subgraphs."""
    yield graph
    for node in graph.node:
        for subgraph in _subgraphs(node):
            yield from walk_graphs(subgraph)


def _subgraphs(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    return [subgraph for attribute in node.attribute for subgraph in (attribute.g, *attribute.graphs)]


def sort_nodes(proto: onnx.ModelProto) -> bool:
    """Sort the nodes of all graphs topologically. Return whether a node moved. Raise for a tensor that nothing computes."""
    roots = (proto.graph, *proto.functions)
    graphs = [graph for root in roots for graph in walk_graphs(root)]
    has_moved = [_sort(graph) for graph in reversed(graphs)]  # subgraphs first: a moved node is copied with its subgraphs
    for root in roots:
        _check_names(root, set())
    return any(has_moved)


def _sort(graph: Graph) -> bool:
    makers = {name: index for index, node in enumerate(graph.node) for name in node.output if name}
    reads = {index: {makers[n] for n in _list_reads(node) if n in makers} for index, node in enumerate(graph.node)}
    if all(max(read, default=-1) < index for index, read in reads.items()):
        return False
    try:
        nodes = [graph.node[index] for index in graphlib.TopologicalSorter(reads).static_order()]
    except graphlib.CycleError as error:
        names = ", ".join(graph.node[index].output[0] for index in error.args[1][1:])
        raise ValueError(f"its nodes have a cycle, {names}") from None
    del graph.node[:]
    graph.node.extend(nodes)
    return True


def _list_reads(node: onnx.NodeProto) -> Iterator[str]:
    """Yield the tensors that the node reads, also in its subgraphs."""
    yield from node.input
    for subgraph in _subgraphs(node):
        inside = _list_names(subgraph)
        yield from (name for inner in subgraph.node for name in _list_reads(inner) if name not in inside)
        yield from (output.name for output in subgraph.output if output.name not in inside)


def _list_names(graph: Graph) -> set[str]:
    """Return the names of inputs, initializers and outputs of nodes."""
    inputs: Any = graph.input  # in a function only names
    names = {getattr(value, "name", value) for value in inputs} | {name for node in graph.node for name in node.output}
    if isinstance(graph, onnx.GraphProto):
        names |= {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return names


def _check_names(graph: Graph, around: set[str]) -> None:
    names = around | _list_names(graph)
    for node in graph.node:
        if missing := [name for name in node.input if name and name not in names]:
            raise ValueError(f"no node or input gives {missing[0]}, which {node.op_type} ({node.name or node.output[0]}) reads")
        for subgraph in _subgraphs(node):
            _check_names(subgraph, names)


def check(path: Path, proto: onnx.ModelProto, has_changed: bool = False) -> None:
    """Check the file by onnx; a copy of proto if that is not the file's, or lacks what onnxruntime does not ask for."""
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
    """Return a copy with a name and shapes, and inputs for tensors outside, which the checker would look for."""
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
