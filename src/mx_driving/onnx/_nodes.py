"""Nodes for the operator that a file holds already, of one form, as the call that another form writes."""

from __future__ import annotations

import itertools
import math

import numpy as np
import onnx_ir as ir

from ._forms import NODES, NPU, OURS, TENSORRT, WITH_LOGITS, WRITE, Call, Sizes
from ._graph import Unfit, constant, dims
from ._writer import Writer, open_writer

_OF_OTHERS = {NPU: {NODES[NPU]}, TENSORRT: {NODES[TENSORRT], *WITH_LOGITS}}


def nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return our nodes, and others' for attention."""
    return [node for node in graph if node.domain == OURS or node.op_type in _OF_OTHERS.get(node.domain, ())]


def rewrite(model: ir.Model, node: ir.Node, form: str, **options: str | None) -> str:
    """Another form in the node's place. Returns in words what it was."""
    if node.op_type in WITH_LOGITS:
        return _rewrite_with_logits(model, node, form, **options)
    if node.op_type != NODES[node.domain]:
        raise Unfit(f"it is a node {node.domain}::{node.op_type}, which no other form has")
    call = _call(node)
    with open_writer(model, node.outputs[0]) as write:
        new = WRITE[form](write, call, **options)
        write.put_in_place(_with_heads(write, new, call) if node.domain == TENSORRT else new)
    return f"a node {node.domain}::{node.op_type}"


def _rewrite_with_logits(model: ir.Model, node: ir.Node, form: str, **options: str | None) -> str:
    """Our node with logits, or in other forms the locations and weights that their nodes need."""
    inputs = LogitInputs(node)
    with open_writer(model, node.outputs[0]) as write:
        new = inputs.write_ours(write) if form == "onnxruntime" else WRITE[form](write, inputs.call(write), **options)
        write.put_in_place(write.op("Reshape", new, write.table("shape", [0, 0, inputs.heads, inputs.channels])))
    return f"a node {node.op_type}"


class LogitInputs:
    """Inputs of a node with reference points [bs, queries, .., points * 2], offsets and logits, and their sizes."""

    def __init__(self, node: ir.Node) -> None:
        if len(node.inputs) != 5:
            rule = "one that is read has value, spatial shapes, reference points, offsets and logits"
            raise Unfit(f"its node {node.op_type} has {len(node.inputs)} inputs; {rule}")
        self.value, self.shapes, self.references, self.offsets, self.logits = _inputs(node)
        maps = constant(self.shapes)
        if maps is None:
            raise Unfit("the file does not fix the sizes of its maps")
        self.maps = tuple((int(height), int(width)) for height, width in maps)
        self.keys, self.heads, self.channels = _fixed(self.value, 1)
        references, offsets, logits = (math.prod(_fixed(v, 2)) for v in (self.references, self.offsets, self.logits))
        self.points, self.references_of_points = logits // (self.heads * len(maps)), references // 2
        samples = self.heads * len(maps) * self.points
        if (logits, offsets) != (samples, 2 * samples) or references % 2 or self.points % max(self.references_of_points, 1):
            raise Unfit("its reference points, offsets and logits do not fit each other")

    def tables(self, write: Writer) -> tuple[ir.Value, ir.Value, list[int]]:
        starts = [0, *itertools.accumulate(height * width for height, width in self.maps)][:-1]
        return write.table("spatial_shapes", self.maps), write.table("level_start_index", starts), starts

    def shaped(self, write: Writer, value: ir.Value, *sizes: int) -> ir.Value:
        return write.like(value, "Reshape", write.table("shape", [0, 0, *sizes]))

    def write_ours(self, write: Writer) -> ir.Value:
        shapes, starts, _ = self.tables(write)
        references = self.shaped(write, self.references, self.references_of_points, 2)
        offsets = self.shaped(write, self.offsets, self.heads, len(self.maps), self.points, 2)
        logits = self.shaped(write, self.logits, self.heads, len(self.maps) * self.points)
        inputs = self.value, shapes, starts, references, offsets, logits
        return write.op(f"{NODES[OURS]}_with_logits", *inputs, domain=OURS, reference_axis="point")

    def call(self, write: Writer) -> Call:
        """Locations are references + offsets / (width, height), weights the softmax of logits."""
        shapes, starts, numbers = self.tables(write)
        levels, references = len(self.maps), self.references_of_points
        groups = (self.heads, levels, self.points // references, references, 2)
        if self.offsets.dtype is None:
            raise Unfit("the file does not say the dtypes of its tensors")
        sides = np.array([(width, height) for height, width in self.maps]).reshape(1, 1, 1, levels, 1, 1, 2)
        moved = write.like(
            self.shaped(write, self.offsets, *groups), "Div", write.table("sides", sides, self.offsets.dtype.numpy())
        )
        located = write.like(moved, "Add", self.shaped(write, self.references, 1, 1, 1, references, 2))
        locations = self.shaped(write, located, self.heads, levels, self.points, 2)
        weights = write.like(self.shaped(write, self.logits, self.heads, levels * self.points), "Softmax", axis=3)
        weights = self.shaped(write, weights, self.heads, levels, self.points)
        batch = dims(self.value)[0]
        fixed = batch if isinstance(batch, int) else None
        sizes = Sizes(fixed, self.keys, self.heads, self.channels, self.maps, tuple(numbers), self.points)
        return Call(self.value, shapes, starts, locations, weights, sizes)


def _fixed(value: ir.Value, first: int) -> list[int]:
    sizes = dims(value)[first:]
    if len(sizes) == 0 or not all(isinstance(size, int) for size in sizes):
        raise Unfit(f"the file does not fix the sizes of {value.name}")
    return [size for size in sizes if isinstance(size, int)]


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
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) != 5:
        raise Unfit(f"its node {node.op_type} has {len(inputs)} inputs; the operator has 5")
    return inputs


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
