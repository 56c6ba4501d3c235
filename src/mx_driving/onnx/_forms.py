"""multi_scale_deformable_attn in an ONNX graph that is there already, in one of several forms.

`translations` has the forms for graphs that torch exports. Here sizes are known when a node is written, so that gathers
need no arithmetic of shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ._graph import Unfit
from ._writer import Writer

OURS, NPU, TENSORRT = "mx_driving", "npu", "trt.plugins"
NODES = {
    OURS: "multi_scale_deformable_attn",
    NPU: "MultiScaleDeformableAttn",
    TENSORRT: "MultiscaleDeformableAttnPlugin_TRT",
}
# BEVFormer_tensorrt's, which Autoware has, too: value, spatial shapes, reference points, offsets, logits.
WITH_LOGITS = {"MultiScaleDeformableAttnTRT", "MultiScaleDeformableAttnTRT2"}
_FLOAT, _HALF, _DOUBLE = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE


@dataclass(frozen=True)
class Sizes:
    """Sizes that a file fixes. A free batch is None."""

    batch: int | None
    keys: int
    heads: int
    channels: int
    maps: tuple[tuple[int, int], ...]
    starts: tuple[int, ...]
    points: int  # of each level


@dataclass(frozen=True)
class Call:
    """The five inputs of the operator in a graph, and their sizes or why they are not known."""

    value: ir.Value
    shapes: ir.Value
    starts: ir.Value
    locations: ir.Value
    weights: ir.Value
    sizes: Sizes | str

    @property
    def floating(self) -> tuple[ir.Value, ...]:
        return self.value, self.locations, self.weights

    def dtype(self) -> ir.DataType:
        """Return the dtype of the output."""
        if any(v.dtype is None for v in self.floating):
            raise Unfit("the file does not say the dtypes of its tensors")
        assert self.value.dtype is not None
        return self.value.dtype


def _ours(write: Writer, call: Call, **options: Any) -> ir.Value:
    call.dtype()
    inputs = call.value, call.shapes, call.starts, call.locations, call.weights
    return write.op(NODES[OURS], *inputs, domain=OURS)


def _int32(write: Writer, call: Call) -> tuple[ir.Value, ir.Value]:
    return write.cast(call.shapes, ir.DataType.INT32), write.cast(call.starts, ir.DataType.INT32)


def _of_others(write: Writer, call: Call, domain: str, halves: bool = False, **attributes: str) -> ir.Value:
    """Write NVIDIA's node or the vendor's: in float16 if all tensors are float16 and the node takes it, else in float32."""
    dtypes = {call.dtype(), *(v.dtype for v in call.floating)}
    if _DOUBLE in dtypes:
        raise Unfit(f"its tensors are float64; {domain}::{NODES[domain]} has float32, which would lose digits")
    dtype = _HALF if halves and dtypes == {_HALF} else _FLOAT
    value, locations, weights = (write.cast(v, dtype) for v in call.floating)
    output = write.op(NODES[domain], value, *_int32(write, call), locations, weights, domain=domain, **attributes)
    output.dtype = dtype
    return output


def _npu(write: Writer, call: Call, **options: Any) -> ir.Value:
    return write.cast(_of_others(write, call, NPU), call.dtype())


def _tensorrt(write: Writer, call: Call, plugin_version: str | None = None) -> ir.Value:
    """Write NVIDIA's plugin, whose output has an axis for heads and one for channels."""
    version = {"plugin_version": plugin_version} if plugin_version else {}
    blocks = _of_others(write, call, TENSORRT, halves=True, **version)
    return write.cast(write.like(blocks, "Reshape", write.table("shape", [0, 0, -1])), call.dtype())


def _gather(write: Writer, call: Call, **options: Any) -> ir.Value:
    return _Gathers(write, call).output()


class _Gathers:
    """Rows of value at the four corners of each sample, weighted and summed up: standard operators without GridSample.

    Levels and points are one axis of samples. A corner that is not on its map reads a row of zeros, and has the weight 0.
    """

    def __init__(self, write: Writer, call: Call) -> None:
        if isinstance(call.sizes, str):
            raise Unfit(f"{call.sizes}, which gathers need")
        self.write, self.call, self.sizes, self.output_dtype = write, call, call.sizes, call.dtype()
        self.dtype = _DOUBLE if any(v.dtype == _DOUBLE for v in call.floating) else _FLOAT
        self.heads, self.samples = self.sizes.heads, len(self.sizes.maps) * self.sizes.points

    def number(self, x: Any) -> ir.Value:
        return self.write.table("number", x, self.dtype.numpy())

    def of_samples(self, numbers: Any, dtype: Any = np.int64) -> ir.Value:
        """Return a table with one or two numbers for each level, repeated for its points."""
        return self.write.table("levels", np.repeat(np.array(numbers, dtype), self.sizes.points, 0), dtype)

    def floats(self, value: ir.Value, *sizes: int) -> ir.Value:
        op, dtype = self.write.op, self.dtype
        shaped = op("Reshape", value, self.write.table("shape", sizes))
        return shaped if value.dtype == dtype else op("Cast", shaped, to=dtype.value)

    def rows(self) -> ir.Value:
        """Return value as rows of a head's channels, behind a row of zeros."""
        zeros = self.number(np.zeros((1, self.sizes.channels)))
        return self.write.op("Concat", zeros, self.floats(self.call.value, -1, self.sizes.channels), axis=0)

    def bases(self) -> ir.Value:
        """Return the row of a head's first pixel on a level, [bs, 1, heads, samples]; row 0 is the zeros."""
        op, table = self.write.op, self.write.table
        starts = np.array(self.sizes.starts).repeat(self.sizes.points)
        bases = table("bases", starts * self.heads + np.arange(self.heads)[:, None] + 1)
        if self.sizes.batch == 1:
            return bases
        if self.write.model.graph.opset_imports.get("", 0) < 11:
            raise Unfit("gathers of more than one scene need opset 11 or later")
        count = op("Gather", op("Shape", self.call.value), table("batch", 0))
        batch = op("Range", table("first", 0), count, table("step", 1))
        rows = table("rows", self.sizes.keys * self.heads)
        return op("Add", op("Mul", op("Reshape", batch, table("shape", [-1, 1, 1, 1])), rows), bases)

    def output(self) -> ir.Value:
        op, axes = self.write.op, (0, 0, self.heads, self.samples)
        locations, weights = self.floats(self.call.locations, *axes, 2), self.floats(self.call.weights, *axes)
        sides = self.of_samples([(width, height) for height, width in self.sizes.maps], self.dtype.numpy())
        positions = op("Sub", op("Mul", locations, sides), self.number(0.5))
        pixels, rows, bases, total = op("Floor", positions), self.rows(), self.bases(), None
        for right in (0, 1):
            for down in (0, 1):
                part = self.corner(positions, op("Add", pixels, self.number([right, down])), weights, rows, bases)
                total = part if total is None else op("Add", total, part)
        assert total is not None
        output = op("Reshape", total, self.write.table("shape", [0, 0, -1]))
        return output if self.dtype == self.output_dtype else op("Cast", output, to=self.output_dtype.value)

    def corner(self, positions: ir.Value, pixels: ir.Value, weights: ir.Value, rows: ir.Value, bases: ir.Value) -> ir.Value:
        op = self.write.op
        inside = self.inside(pixels)
        distances = op("Sub", self.number(1.0), op("Abs", op("Sub", positions, pixels)))
        coefficient = op("Mul", op("Mul", self.pick(distances, 0), self.pick(distances, 1)), weights)
        coefficient = op("Where", inside, coefficient, self.number(0.0))
        row = op("Where", inside, op("Add", self.row(inside, pixels), bases), self.write.table("zeros", 0))
        shape = self.write.table("shape", [0, 0, self.heads, self.samples, 1])
        return self.sum(op("Mul", op("Gather", rows, row, axis=0), op("Reshape", coefficient, shape)))

    def pick(self, pairs: ir.Value, index: int) -> ir.Value:
        return self.write.op("Gather", pairs, self.write.table("axis", index), axis=-1)

    def inside(self, pixels: ir.Value) -> ir.Value:
        op = self.write.op
        last = self.of_samples([(width - 0.5, height - 0.5) for height, width in self.sizes.maps], self.dtype.numpy())
        both = op("And", op("Greater", pixels, self.number(-0.5)), op("Less", pixels, last))
        return op("And", self.pick(both, 0), self.pick(both, 1))

    def row(self, inside: ir.Value, pixels: ir.Value) -> ir.Value:
        """Return (y * width + x) * heads. Pixels outside the map may be too large for an integer, and become 0."""
        op, heads = self.write.op, self.heads
        x, y = (op("Where", inside, self.pick(pixels, index), self.number(0.0)) for index in (0, 1))
        x, y = (op("Cast", v, to=ir.DataType.INT64.value) for v in (x, y))
        widths = self.of_samples([width * heads for _, width in self.sizes.maps])
        return op("Add", op("Mul", y, widths), op("Mul", x, self.write.table("heads", heads)))

    def sum(self, parts: ir.Value) -> ir.Value:
        """Sum over samples. Older opsets have the axis as an attribute."""
        op = self.write.op
        if self.write.model.graph.opset_imports.get("", 0) < 13:
            return op("ReduceSum", parts, axes=[3], keepdims=0)
        return op("ReduceSum", parts, self.write.table("axis", [3]), keepdims=0)


WRITE: dict[str, Callable[..., ir.Value]] = {"gather": _gather, "npu": _npu, "onnxruntime": _ours, "tensorrt": _tensorrt}
DOMAIN = {"npu": NPU, "onnxruntime": OURS, "tensorrt": TENSORRT}  # the form's own nodes
