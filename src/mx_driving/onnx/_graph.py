"""Values and nodes of an ONNX graph, walks from a value to its sources, and nodes that change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import numpy as np
import onnx_ir as ir

PAIRS = {"QuantizeLinear", "DequantizeLinear"}  # Quantisers insert them. The search walks through them; a trial refuses them.
VIEWS = {"Reshape", "Transpose", "Squeeze", "Unsqueeze", "Identity", "Flatten"} | PAIRS  # they keep all elements of a tensor
MOVES = VIEWS | {"Slice", "Split", "Gather"}
INTEGER = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}
HALVES = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
_NEUTRAL = {"Add": 0, "Sub": 0, "Mul": 1, "Div": 1, "Pow": 1}  # type of a node -> its neutral number
_COMMUTATIVE = {"Add", "Mul"}
_OF_ONE = {"Concat", "Max", "Mean", "Min", "Sum"}  # nodes that return their input unchanged if they have only one
_RESHAPE = {"Flatten", "Reshape", "Squeeze"}  # they keep the number of elements and their order
_REPEAT = {"Expand", "Tile"}
SAID_DOMAIN = "mx_driving.domain"  # key of a node's metadata: its domain in the file


class Unfit(Exception):
    """Raised for samples that cannot be replaced. The message is the reason, a clause of the report."""


def walk_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes of the graph, of its subgraphs and of functions."""
    for graph in (model.graph, *model.functions.values()):
        yield from ir.traversal.RecursiveGraphIterator(graph)


def list_outputs(model: ir.Model) -> Iterator[ir.Value]:
    return (output for node in model.graph for output in node.outputs)


def dims(value: ir.Value) -> tuple[int | str | None, ...]:
    """Return the sizes of a value: numbers, names, or None if the file does not say."""
    if value.shape is None:
        return ()
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def are_fixed(sizes: Sequence[int | str | None]) -> TypeGuard[Sequence[int]]:
    return all(isinstance(size, int) for size in sizes)


def describe_node(node: ir.Node) -> str:
    """Return a node's domain and type as in the file."""
    domain = node.metadata_props.get(SAID_DOMAIN, node.domain)
    return f"{domain}::{node.op_type}" if domain else node.op_type


def is_node(node: ir.Node | None, *op_types: str) -> TypeGuard[ir.Node]:
    """Return whether the node is a standard node of these types. Before opset 16, GridSample is a node of onnxruntime."""
    if node is None or node.op_type not in op_types:
        return False
    return node.domain in ("", "ai.onnx") or (node.domain, node.op_type) == ("com.microsoft", "GridSample")


def read_attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def is_cast(node: ir.Node | None) -> TypeGuard[ir.Node]:
    """Return whether the node casts floats to floats. Exporters write such casts around a sum of float16."""
    if not is_node(node, "Cast", "CastLike") or node.inputs[0] is None:
        return False
    return node.outputs[0].dtype not in INTEGER and node.inputs[0].dtype not in INTEGER


def walk_sources(value: ir.Value | None, *op_types: str) -> Iterator[ir.Value]:
    """Walk upstream along first inputs, through casts and nodes of these types. Yield the value first."""
    while value is not None:
        yield value
        node = value.producer()
        value = node.inputs[0] if is_node(node, *op_types) or is_cast(node) else None


def find_producer(value: ir.Value | None, *op_types: str) -> ir.Node | None:
    """Return the node that computes the value, upstream of casts and nodes of these types."""
    *_, last = None, *walk_sources(value, *op_types)
    return None if last is None else last.producer()


def read_constant(value: ir.Value | None) -> Any:
    """Return the array of a constant, or None. The constant may be cast."""
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    if tensor is None and value is not None and value.dtype is not None and is_cast(node := value.producer()):
        array = read_constant(node and node.inputs[0])
        return None if array is None else array.astype(value.dtype.numpy())
    return None if tensor is None else np.asarray(tensor.numpy())


def extract(model: ir.Model, ends: Sequence[ir.Value], output: ir.Value) -> ir.Model:
    """Return the subgraph between `ends` and `output` as a model that needs no other file."""
    graph = ir.convenience.extract(model.graph, ends, [output])
    return ir.external_data.load_to_model(ir.Model(graph, ir_version=model.ir_version))


def add_outputs(model: ir.Model, values: Iterable[ir.Value]) -> None:
    """Add the values to the outputs of the graph, except for constants."""
    model.graph.outputs.extend(v for v in values if read_constant(v) is None and not v.is_graph_output())


def read_number(value: ir.Value | None) -> float | None:
    """Return the number of a constant with one element, quantised or not; else None."""
    array, node = read_constant(value), None if value is None else value.producer()
    if array is None and is_node(node, "DequantizeLinear"):
        numbers, scale, zero = (read_constant(v) for v in (*node.inputs, None)[:3])
        if is_node(quantizer := node.inputs[0] and node.inputs[0].producer(), "QuantizeLinear"):
            array = read_constant(quantizer.inputs[0])
        elif numbers is not None and scale is not None and scale.size == 1:
            array = ((numbers.astype(np.float64) - np.float64(0 if zero is None else zero)) * scale).astype(scale.dtype)
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def read_numbers(node: ir.Node, index: int, name: str = "") -> list[Any]:
    """Return the numbers of an input that is a constant, or a view of one; or of the attribute `name` in older opsets."""
    if name in node.attributes or index >= len(node.inputs):
        return list(read_attribute(node, name, ()))
    array = next((a for v in walk_sources(node.inputs[index], *MOVES) if (a := read_constant(v)) is not None), None)
    return [] if array is None else array.reshape(-1).tolist()


def walk_chosen_sources(value: ir.Value) -> Iterator[ir.Value]:
    """Yield the value and its sources. Walk also through a Where that chooses between a value and a constant."""
    for last in walk_sources(value, *MOVES):
        yield last
    node = last.producer()
    if is_node(node, "Where") and node.inputs[1] is not None and read_number(node.inputs[2]) is not None:
        yield from walk_chosen_sources(node.inputs[1])


def intersect(chains: Iterable[Iterable[ir.Value]]) -> list[ir.Value]:
    """Return the values that are in all chains, in the order of the first chain."""
    first, *others = map(dict.fromkeys, chains)
    return [v for v in first if all(v in chain for chain in others)]


def name_unshaped(value: ir.Value) -> str:
    """Describe the nearest node with inputs of known shape and an output of unknown shape; "" if there is none."""
    unshaped = (v.producer() for v in walk_back(value, lambda node: node.outputs[0].shape is None) if v.shape is None)
    shaped = (node for node in unshaped if node is not None and all(v is None or v.shape is not None for v in node.inputs))
    node = next(shaped, None)
    return "" if node is None else f"; the file does not say the shape of the output of {describe_node(node)} ({node.name})"


def walk_back(value: ir.Value, through: Callable[[ir.Node], bool]) -> Iterator[ir.Value]:
    """Walk upstream along all inputs, through nodes for which `through` is true. Yield the value first, and then its
    sources, the nearest first."""
    seen, todo = {value}, [value]
    while todo:
        yield (value := todo.pop(0))
        node = value.producer()
        new = [v for v in node.inputs if v is not None and v not in seen] if node is not None and through(node) else []
        seen.update(new)
        todo.extend(new)


# Nodes that return one of their inputs, such as Identity, x * 1 and x + 0.
#
# Exporters write such nodes anywhere: paddle2onnx writes 2 * x - 1 as ((x * 2) + 0) * 1 - 1. onnx_ir's pass removes Identity
# alone. Of the 18 nodes `SAME` of tests/onnx/test_onnx_identities.py, onnxscript 0.7.2's optimiser leaves 11, such as x ** 1,
# and it drops the names of nodes, which reports have. Only copies of a file's model are changed, for two reasons: `fuse` must
# keep the nodes that it does not replace, and x + 0 turns -0.0 into 0.0.


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
    if op_type in _NEUTRAL:  # The other input has the neutral number everywhere, and does not enlarge the output.
        for index in (0, 1) if op_type in _COMMUTATIVE else (0,):
            value, array, number = node.inputs[index], read_constant(node.inputs[1 - index]), _NEUTRAL[op_type]
            if value is not None and array is not None and array.size and array.flat[0] == number and (array == number).all():
                pairs = zip(array.shape[::-1], dims(value)[::-1], strict=False)
                if not array.ndim or (array.ndim <= len(dims(value)) and all(a in (1, size) for a, size in pairs)):
                    return index
        return None
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
        returns = value.dtype is not None and value.dtype == target  # a number that names no dtype is unequal
    elif op_type == "Dropout":
        mode = node.inputs[2] if len(node.inputs) > 2 else None
        returns = (
            read_attribute(node, "is_test", 0) == 1 if opset < 7 else mode is None or np.array_equal(read_constant(mode), False)
        )
    elif op_type == "Transpose":
        order = read_attribute(node, "perm")
        returns = order is not None and list(order) == sorted(order)
    elif op_type == "Pad":
        pads = read_numbers(node, 1, "pads")
        returns = bool(pads) and not any(pads)
    else:  # a node that reshapes, repeats or slices returns its input if input and output have the same shape
        before, after = dims(value), dims(node.outputs[0])
        if value.shape is None or node.outputs[0].shape is None or len(before) != len(after):
            return None
        free = [pair for pair in zip(before, after, strict=True) if not are_fixed(pair) or pair[0] != pair[1]]
        if op_type in _RESHAPE:  # the size of one free axis follows from the others
            returns = not free or (len(free) == 1 and not are_fixed(free[0]) and 0 not in before)
        elif op_type == "Slice":
            returns = not free and (len(node.inputs) < 5 or {*read_numbers(node, 4)} == {1})
        else:
            returns = op_type in _REPEAT and not free
    return 0 if returns else None
