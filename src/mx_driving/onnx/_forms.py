"""Write multi_scale_deformable_attn into an existing ONNX graph, in one of several forms.

`translations` has the forms for graphs that torch exports. Here sizes are known when a node is written, so gathers need no
nodes that compute shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from .._operator.description import AGGREGATION, MULTI_SCALE
from ._graph import Unfit, are_fixed, dims, read_constant
from ._writer import Writer

OURS, NPU, TENSORRT = "mx_driving", "npu", "trt.plugins"
NODES = {OURS: MULTI_SCALE, NPU: "MultiScaleDeformableAttn", TENSORRT: "MultiscaleDeformableAttnPlugin_TRT"}
# Nodes of mmdeploy for mmcv, and of NVIDIA's DL4AGX and Autoware. Their output is [bs, queries, heads * channels].
JOINED = {"MMCVMultiScaleDeformableAttention", "MultiScaleDeformableAttentionPlugin"}
# Plugins of BEVFormer_tensorrt and Autoware. Their inputs are value, spatial shapes, reference points, offsets and logits.
WITH_LOGITS = {"MultiScaleDeformableAttnTRT", "MultiScaleDeformableAttnTRT2"}
# Nodes of deformable_aggregation: NVIDIA TAO's Sparse4D, SparseEnd2End, and deployments of SparseDrive.
AGGREGATES = {"MSDA", "DeformableAttentionAggrPlugin", "DeformableAggregation", "DeformableAggregationPlugin"}
_FLOAT, _HALF, _DOUBLE = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE


def is_attention(node: ir.Node) -> bool:
    """Return whether the node has the operator's five inputs. A plugin may have any domain: the exporter chooses it."""
    if node.op_type in WITH_LOGITS:
        return not has_logits(node)
    return node.op_type in {NODES[TENSORRT], *JOINED} or node.op_type == NODES.get(node.domain)


def has_logits(node: ir.Node) -> bool:
    """Return whether the node has offsets and logits. A node of the same type in BEVFormer_tensorrt's forks has locations."""
    inputs = [v for v in node.inputs if v is not None]
    return node.op_type in WITH_LOGITS and not (len(inputs) == 5 and len(dims(inputs[3])) == 6)


def is_aggregation(node: ir.Node) -> bool:
    """Return whether the node is deformable_aggregation, ours or another library's with the same five inputs."""
    return (node.domain == OURS and node.op_type == AGGREGATION) or node.op_type in AGGREGATES


def name_operator(node: ir.Node) -> str:
    """Return the name of our operator that the node computes; the node may be another library's."""
    if node.domain == OURS:
        return node.op_type
    return AGGREGATION if is_aggregation(node) else f"{MULTI_SCALE}_with_logits" if has_logits(node) else MULTI_SCALE


class Call(NamedTuple):
    """The five inputs of the operator in a graph."""

    value: ir.Value
    shapes: ir.Value
    starts: ir.Value
    locations: ir.Value
    weights: ir.Value
    sums_in_float32: bool = False  # whether the file sums samples in float32. Its inputs may have 16 bits.

    @property
    def inputs(self) -> tuple[ir.Value, ...]:
        return self[:5]

    @property
    def floating(self) -> tuple[ir.Value, ...]:
        return self.value, self.locations, self.weights

    def read_dtype(self) -> ir.DataType:
        """Return the dtype of the output."""
        if any(v.dtype is None for v in self.floating):
            raise Unfit("the file does not say the dtypes of its tensors")
        assert self.value.dtype is not None
        return self.value.dtype


def _write_ours(write: Writer, call: Call) -> ir.Value:
    output = write.op(NODES[OURS], *call.inputs, domain=OURS)
    output.type = call.value.type
    return output


def _write_theirs(write: Writer, call: Call, domain: str, halves: bool = False, **attributes: str) -> ir.Value:
    """Write NVIDIA's or the vendor's node, in float32. With `halves`, use float16 if all tensors and sums are float16."""
    dtypes = {call.read_dtype(), *(v.dtype for v in call.floating)}
    if _DOUBLE in dtypes:
        raise Unfit(f"its tensors are float64; {domain}::{NODES[domain]} has float32, which would lose digits")
    dtype = _HALF if halves and dtypes == {_HALF} and not call.sums_in_float32 else _FLOAT
    inputs = (write.cast(v, dtype if v in call.floating else ir.DataType.INT32) for v in call.inputs)
    output = write.op(NODES[domain], *inputs, domain=domain, **attributes)
    output.dtype = dtype
    return output


def _write_npu(write: Writer, call: Call) -> ir.Value:
    return write.cast(_write_theirs(write, call, NPU), call.read_dtype())


def _write_tensorrt(write: Writer, call: Call, plugin_version: str | None = None) -> ir.Value:
    """Write NVIDIA's plugin. Its output has separate axes for heads and channels."""
    version = {"plugin_version": plugin_version} if plugin_version else {}
    blocks = _write_theirs(write, call, TENSORRT, halves=True, **version)
    return write.cast(write.like(blocks, "Reshape", write.table("shape", [0, 0, -1])), call.read_dtype())


class _Gathers:
    """Writes the operator with Gather: rows of value at the four corners of each sample are weighted and summed.

    Levels and points are one axis of samples. A corner off its map reads a row of zeros and has weight 0.
    """

    def __init__(self, write: Writer, call: Call) -> None:
        self.write, self.op, self.call = write, write.op, call
        self.opset = write.model.graph.opset_imports.get("", 0)
        self.dtype = _DOUBLE if any(v.dtype == _DOUBLE for v in call.floating) else _FLOAT
        maps, starts = read_constant(call.shapes), read_constant(call.starts)
        if maps is None or starts is None:
            raise Unfit("the file does not fix the sizes of its maps, which gathers need")
        batch, *sizes = (*dims(call.value), *dims(call.locations)[4:5]) or (None,)
        if len(sizes) != 4 or not are_fixed(sizes):
            raise Unfit("the file does not fix the sizes of its tensors, which gathers need")
        if batch != 1 and self.opset < 11:
            raise Unfit("gathers of more than one scene need opset 11 or later")
        self.output_dtype = call.read_dtype()
        self.sides, self.starts, self.batch = np.array(maps)[:, ::-1], np.array(starts), batch  # sides: (width, height)
        self.keys, self.heads, self.channels, self.points = sizes
        self.axes = 0, 0, self.heads, len(self.starts) * self.points

    def write_number(self, x: Any) -> ir.Value:
        return self.write.table("number", x, self.dtype.numpy())

    def write_per_sample(self, numbers: Any, dtype: Any = np.int64) -> ir.Value:
        """Return a table of one or two numbers per level, repeated for the level's points."""
        return self.write.table("levels", numbers.repeat(self.points, 0), dtype)

    def to_floats(self, value: ir.Value, *sizes: int) -> ir.Value:
        shaped = self.op("Reshape", value, self.write.table("shape", sizes))
        return shaped if value.dtype == self.dtype else self.op("Cast", shaped, to=self.dtype.value)

    def write_rows(self) -> ir.Value:
        """Return rows of one head's channels: a row of zeros, then the rows of value."""
        zeros = self.write_number(np.zeros((1, self.channels)))
        return self.op("Concat", zeros, self.to_floats(self.call.value, -1, self.channels), axis=0)

    def write_bases(self) -> ir.Value:
        """Return for each sample the row of its level's first pixel, [bs, 1, heads, samples]. Row 0 is zeros."""
        op, table = self.op, self.write.table
        starts = self.starts.repeat(self.points)
        bases = table("bases", starts * self.heads + np.arange(self.heads)[:, None] + 1)
        if self.batch == 1:
            return bases
        count = op("Gather", op("Shape", self.call.value), table("batch", 0))
        batch = op("Range", table("first", 0), count, table("step", 1))
        rows = table("rows", self.keys * self.heads)
        return op("Add", op("Mul", op("Reshape", batch, table("shape", [-1, 1, 1, 1])), rows), bases)

    def write_output(self) -> ir.Value:
        op = self.op
        locations, weights = self.to_floats(self.call.locations, *self.axes, 2), self.to_floats(self.call.weights, *self.axes)
        sides = self.write_per_sample(self.sides, self.dtype.numpy())
        positions = op("Sub", op("Mul", locations, sides), self.write_number(0.5))
        pixels, rows, bases = op("Floor", positions), self.write_rows(), self.write_bases()
        corners = [op("Add", pixels, self.write_number([right, down])) for right in (0, 1) for down in (0, 1)]
        parts = [self.write_corner(positions, corner, weights, rows, bases) for corner in corners]
        total = functools.reduce(lambda total, part: op("Add", total, part), parts)
        output = op("Reshape", total, self.write_shape(0, 0, -1))
        output.dtype = self.dtype
        return self.write.cast(output, self.output_dtype)

    def write_shape(self, *sizes: int) -> ir.Value:
        return self.write.table("shape", sizes)

    def write_corner(
        self, positions: ir.Value, pixels: ir.Value, weights: ir.Value, rows: ir.Value, bases: ir.Value
    ) -> ir.Value:
        op, zero = self.op, self.write_number(0.0)
        last = self.write_per_sample(self.sides - 0.5, self.dtype.numpy())
        both = op("And", op("Greater", pixels, self.write_number(-0.5)), op("Less", pixels, last))
        inside = op("And", *self.split_pairs(both))
        distances = op("Sub", self.write_number(1.0), op("Abs", op("Sub", positions, pixels)))
        coefficient = op("Where", inside, op("Mul", op("Mul", *self.split_pairs(distances)), weights), zero)
        # Replace pixels off the map by 0, because their numbers may overflow an integer.
        x, y = (op("Cast", op("Where", inside, v, zero), to=ir.DataType.INT64.value) for v in self.split_pairs(pixels))
        widths = self.write_per_sample(self.sides[:, 0] * self.heads)
        row = op("Add", op("Mul", y, widths), op("Mul", x, self.write.table("heads", self.heads)))
        row = op("Where", inside, op("Add", row, bases), self.write.table("zeros", 0))
        parts = op("Mul", op("Gather", rows, row, axis=0), op("Reshape", coefficient, self.write_shape(*self.axes, 1)))
        if self.opset < 13:  # older opsets have the axes as an attribute
            return op("ReduceSum", parts, axes=[3], keepdims=0)
        return op("ReduceSum", parts, self.write.table("axis", [3]), keepdims=0)

    def split_pairs(self, pairs: ir.Value) -> list[ir.Value]:
        """Return x and y."""
        return [self.op("Gather", pairs, self.write.table("axis", index), axis=-1) for index in (0, 1)]


WRITE: dict[str, Callable[..., ir.Value]] = {
    "gather": lambda write, call: _Gathers(write, call).write_output(),
    "npu": _write_npu,
    "onnxruntime": _write_ours,
    "tensorrt": _write_tensorrt,
}
DOMAIN = {"npu": NPU, "onnxruntime": OURS, "tensorrt": TENSORRT}  # domain of the form's nodes
