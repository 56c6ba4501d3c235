"""Rewrite existing nodes of one form in another form."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from .._operator.description import AGGREGATION
from ._aggregation import write_as_attention
from ._forms import DOMAIN, NODES, OURS, TENSORRT, WITH_LOGITS, WRITE, Call, has_logits, is_aggregation, is_attention
from ._graph import Unfit, are_fixed, describe_node, dims, read_constant
from ._pools import POOLS, write_pool
from ._writer import Writer

_STANDARD = {"", "ai.onnx", "ai.onnx.ml", OURS}
_LIKE_OURS = re.compile("deform|msda|bev_?pool|voxel_?pool|cumsum", re.IGNORECASE)
_AXES, _AGGREGATION_AXES = (4, 2, 1, 6, 5), (3, 3, 2, 5, 6)  # the number of axes of each of the five inputs
_IGNORED = {"im2col_step", "plugin_version", "plugin_namespace"}  # attributes without influence on the result


def find_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return our nodes, nodes of other forms, and nodes of other libraries that compute our operators."""
    return [node for node in graph if node.domain == OURS or is_other(node)]


def is_other(node: ir.Node) -> bool:
    """Return whether the node's name is, or looks like, that of another library's node for our operators."""
    is_unknown = node.domain not in _STANDARD and "conv" not in node.op_type.lower() and _LIKE_OURS.search(node.op_type)
    return is_attention(node) or is_aggregation(node) or node.op_type in WITH_LOGITS | POOLS or bool(is_unknown)


def name_unknown(graph: ir.Graph) -> str:
    """Return in words the nodes that belong to no known library; "" if there are none."""
    nodes = [node for node in graph if node.domain not in {*_STANDARD, "com.microsoft"} and not is_other(node)]
    kinds = list(dict.fromkeys(map(describe_node, nodes)))
    return f"; not known: its nodes {', '.join(kinds)}" if kinds else ""


def is_of_form(node: ir.Node, form: str) -> bool:
    """Return whether the node is a node of this form."""
    if form == "onnxruntime":
        return node.domain == OURS
    return node.domain == DOMAIN.get(form) and node.op_type == NODES.get(node.domain)


def rewrite(model: ir.Model, node: ir.Node, form: str, **options: str | None) -> str:
    """Replace the node by nodes of another form. Return the old node in words."""
    with Writer(model, node.outputs[0]) as write:
        write.put_in_place(_write_in_form(write, node, form, **options))
    return f"a {'pool' if node.op_type in POOLS else 'node'} {describe_node(node)}"


def _write_in_form(write: Writer, node: ir.Node, form: str, **options: str | None) -> ir.Value:
    """Write nodes of a form that compute the same output as the node. Return the new output."""
    if node.op_type in POOLS:
        return write_pool(write, node, form)
    if has_logits(node):
        inputs = LogitInputs(node)
        new = inputs.write_ours(write) if form == "onnxruntime" else WRITE[form](write, inputs.write_call(write), **options)
        return write.op("Reshape", new, write.table("shape", [0, 0, inputs.heads, inputs.channels]))
    if node.domain == OURS and not is_attention(node) and not is_aggregation(node):
        raise Unfit(f"it is a node {describe_node(node)}, which no other form has")
    tensors = read_inputs(node)
    if not is_aggregation(node):
        value, shapes, starts, locations, weights = tensors
        new = WRITE[form](write, Call(value, shapes, starts, locations, weights), **options)
        return _split_heads(write, new, value) if _has_heads_apart(node) else new
    if form == "onnxruntime":
        return write.op(AGGREGATION, *tensors, domain=OURS)
    return WRITE[form](write, write_as_attention(write, tensors), **options)


def read_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the five inputs of the operator. Raise for a node or an attribute whose meaning is not known."""
    if not is_attention(node) and not is_aggregation(node):
        raise Unfit(f"its node {describe_node(node)} is not known")
    if others := {*node.attributes} - _IGNORED:
        raise Unfit(f"its node {describe_node(node)} has the attribute {min(others)}, whose meaning is not known")
    inputs, numbers = _list_inputs(node), _AGGREGATION_AXES if is_aggregation(node) else _AXES
    fit = all(v.shape is None or len(v.shape) == axes for v, axes in zip(inputs, numbers, strict=True))
    if not fit or len(node.outputs) > 1:
        raise Unfit(f"its node {describe_node(node)} must have one output, and inputs of {', '.join(map(str, numbers))} axes")
    return inputs


def _has_heads_apart(node: ir.Node) -> bool:
    """Return whether the node's output has separate axes for heads and channels."""
    if node.outputs[0].shape is not None:
        return len(node.outputs[0].shape) == 4
    if node.op_type in WITH_LOGITS:
        raise Unfit(f"the file does not say how many axes the output of its node {describe_node(node)} has")
    return node.op_type == NODES[TENSORRT]


class LogitInputs:
    """The inputs and sizes of a node with reference points [bs, queries, .., points * 2], offsets and logits."""

    def __init__(self, node: ir.Node) -> None:
        if len(node.inputs) != 5:
            rule = "one that is read has value, spatial shapes, reference points, offsets and logits"
            raise Unfit(f"its node {describe_node(node)} has {len(node.inputs)} inputs; {rule}")
        self.value, self.shapes, self.references, self.offsets, self.logits = _list_inputs(node)
        maps = read_constant(self.shapes)
        if maps is None:
            raise Unfit("the file does not fix the sizes of its maps")
        self.maps = tuple((int(height), int(width)) for height, width in maps)
        self.keys, self.heads, self.channels = _read_fixed_sizes(self.value, 1)
        references, offsets, logits = (math.prod(_read_fixed_sizes(v, 2)) for v in (self.references, self.offsets, self.logits))
        self.points, self.references_of_points = logits // (self.heads * len(maps)), references // 2
        samples = self.heads * len(maps) * self.points
        if (logits, offsets) != (samples, 2 * samples) or references % 2 or self.points % max(self.references_of_points, 1):
            raise Unfit("its reference points, offsets and logits do not fit each other")

    def write_ours(self, write: Writer) -> ir.Value:
        references = write.reshape(self.references, self.references_of_points, 2)
        offsets = write.reshape(self.offsets, self.heads, len(self.maps), self.points, 2)
        logits = write.reshape(self.logits, self.heads, len(self.maps) * self.points)
        inputs = self.value, *write.tables(self.maps), references, offsets, logits
        return write.op(f"{NODES[OURS]}_with_logits", *inputs, domain=OURS, reference_axis="point")

    def write_call(self, write: Writer) -> Call:
        """Write locations = references + offsets / (width, height) and weights = softmax(logits)."""
        if self.offsets.dtype is None:
            raise Unfit("the file does not say the dtypes of its tensors")
        levels, references = len(self.maps), self.references_of_points
        sides = np.array(self.maps)[:, ::-1].reshape(1, 1, 1, levels, 1, 1, 2)
        offsets = write.reshape(self.offsets, self.heads, levels, self.points // references, references, 2)
        moved = write.like(offsets, "Div", write.table("sides", sides, self.offsets.dtype.numpy()))
        located = write.like(moved, "Add", write.reshape(self.references, 1, 1, 1, references, 2))
        locations = write.reshape(located, self.heads, levels, self.points, 2)
        weights = write.like(write.reshape(self.logits, self.heads, levels * self.points), "Softmax", axis=3)
        return Call(self.value, *write.tables(self.maps), locations, write.reshape(weights, self.heads, levels, self.points))


def _read_fixed_sizes(value: ir.Value, first: int) -> Sequence[int]:
    sizes = dims(value)[first:]
    if not sizes or not are_fixed(sizes):
        raise Unfit(f"the file does not fix the sizes of {value.name}")
    return sizes


def use_our_nodes(model: ir.Model, others: list[ir.Node]) -> None:
    """Replace nodes of other forms by our nodes, so that onnxruntime runs the model."""
    for node in others:
        rewrite(model, node, "onnxruntime")
        assert node.graph is not None
        node.graph.remove(node)
        model.graph.opset_imports[OURS] = 1


def _list_inputs(node: ir.Node) -> list[ir.Value]:
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) != 5:
        raise Unfit(f"its node {describe_node(node)} has {len(inputs)} inputs; the operator has 5")
    return inputs


def _split_heads(write: Writer, new: ir.Value, value: ir.Value) -> ir.Value:
    """Split the last axis into heads and channels, as in the plugin's output."""
    blocks = dims(value)[2:]
    if len(blocks) == 2 and are_fixed(blocks):
        return write.op("Reshape", new, write.table("shape", [0, 0, *blocks]))
    sizes = write.op("Gather", write.op("Shape", value), write.table("axes", [2, 3]), axis=0)
    return write.op("Reshape", new, write.op("Concat", write.table("shape", [0, 0]), sizes, axis=0))
