"""Nodes for the operator that a file holds already, of one form, as the call that another form writes."""

from __future__ import annotations

import onnx_ir as ir

from ._forms import NODES, OURS, TENSORRT, WRITE, Call, Sizes
from ._graph import Unfit, constant, dims
from ._marks import mark
from ._writer import Writer, written


def nodes(graph: ir.Graph) -> list[ir.Node]:
    """All in the domains of the forms."""
    return [node for node in graph if node.domain in NODES]


def rewrite(model: ir.Model, node: ir.Node, form: str, **options: str | None) -> str:
    """Another form in the node's place. Returns in words what it was."""
    if node.op_type != NODES[node.domain]:
        raise Unfit(f"it is a node {node.domain}::{node.op_type}, which no other form has")
    call = _call(node)
    with written(model, node.outputs[0]) as write:
        new = WRITE[form](write, call, **options)
        if form == "gather":
            mark(new, call)
        write.put_in_place(_with_heads(write, new, call) if node.domain == TENSORRT else new)
    return f"a node {node.domain}::{node.op_type}"


def as_ours(node: ir.Node) -> None:
    """Our node in place of one of another form, so that onnxruntime runs it."""
    tape, old, value, graph = ir.tape.Tape(), node.outputs[0], node.inputs[0], node.graph
    assert value is not None
    assert graph is not None
    new = tape.op(NODES[OURS], node.inputs, domain=OURS)
    if node.op_type == NODES[TENSORRT]:  # its output has an axis for heads and one for channels
        zeros, blocks = (tape.op("Constant", (), {"value": ir.tensor(numbers)}) for numbers in ([0, 0], [2, 3]))
        sizes = tape.op("Gather", (tape.op("Shape", (value,)), blocks))
        new = tape.op("Reshape", (new, tape.op("Concat", (zeros, sizes), {"axis": 0})))
    graph.insert_after(node, tape.nodes)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.shape, new.type, name = old.shape, value.type, old.name
    graph.remove(node)
    new.name = name


def _call(node: ir.Node) -> Call:
    value, shapes, starts, locations, weights = _inputs(node)
    return Call(value, shapes, starts, locations, weights, _sizes(value, shapes, starts, locations))


def _inputs(node: ir.Node) -> list[ir.Value]:
    given = [value for value in node.inputs if value is not None]
    if len(given) != 5:
        raise Unfit(f"its node {node.op_type} has {len(given)} inputs; the operator has 5")
    return given


def _sizes(value: ir.Value, shapes: ir.Value, starts: ir.Value, locations: ir.Value) -> Sizes | str:
    maps, first = constant(shapes), constant(starts)
    if maps is None or first is None:
        return "the file does not fix the sizes of its maps"
    batch, *others = (*dims(value), *dims(locations)[4:5]) or (None,)
    numbers = [size for size in others if isinstance(size, int)]
    if len(numbers) != 4 or len(others) != 4:
        return "the file does not fix the sizes of its tensors"
    keys, heads, channels, points = numbers
    both = tuple((int(height), int(width)) for height, width in maps)
    return Sizes(batch if isinstance(batch, int) else None, keys, heads, channels, both, tuple(map(int, first)), points)


def _with_heads(write: Writer, new: ir.Value, call: Call) -> ir.Value:
    """The plugin's output has an axis for heads and one for channels."""
    blocks = [size for size in dims(call.value)[2:] if isinstance(size, int)]
    if len(blocks) != 2:
        raise Unfit("the file does not fix the number of heads and of their channels")
    return write.op("Reshape", new, write.table("shape", [0, 0, *blocks]))
