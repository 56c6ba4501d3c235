"""Write new nodes and tables into an ONNX graph, and multi_scale_deformable_attn in one of several forms.

`_translations.py` writes nodes for graphs that torch exports. Here sizes are known when a node is written, so gathers need no
nodes that compute shapes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from .._operator.description import MULTI_SCALE
from ._graph import Unfit, are_fixed, dims, read_constant

OURS, NPU, TENSORRT = "mx_driving", "npu", "trt.plugins"
NODES = {OURS: MULTI_SCALE, NPU: "MultiScaleDeformableAttn", TENSORRT: "MultiscaleDeformableAttnPlugin_TRT"}
DOMAIN = {"npu": NPU, "onnxruntime": OURS, "tensorrt": TENSORRT}  # domain of the form's nodes
_FLOAT, _HALF, _DOUBLE = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE


def make_tables(maps: Sequence[tuple[int, int]]) -> tuple[list[tuple[int, int]], list[int]]:
    """Return spatial_shapes and level_start_index."""
    return [*maps], [0, *itertools.accumulate(height * width for height, width in maps)][:-1]


class Writer(contextlib.AbstractContextManager["Writer"]):
    """Writes nodes that compute a replacement of the tensor `old`. Their names begin with the name of this tensor.

    As a context manager, it detaches the new nodes after an exception, so that the graph is unchanged.
    """

    def __init__(self, model: ir.Model, old: ir.Value) -> None:
        self.model, self.old, self.tape = model, old, ir.tape.Tape()
        # All names of tensors and nodes, also of subgraphs: names in a subgraph must not hide outer names.
        self.used = {str(node.name) for graph in model.graphs() for node in graph}
        self.used.update(*(ir.convenience.create_value_mapping(graph) for graph in model.graphs()))

    def make_name(self, suffix: str) -> str:
        free = (f"{self.old.name}/{suffix}{number or ''}" for number in itertools.count())
        name = next(name for name in free if name not in self.used)
        self.used.add(name)
        return name

    def table(self, suffix: str, numbers: Any, dtype: Any = np.int64) -> ir.Value:
        name = self.make_name(suffix)
        return self.tape.initializer(ir.tensor(np.array(numbers, dtype), name=name), name=name)

    def tables(self, maps: Sequence[tuple[int, int]]) -> tuple[ir.Value, ir.Value]:
        shapes, starts = make_tables(maps)
        return self.table("spatial_shapes", shapes), self.table("level_start_index", starts)

    def copy(self, value: ir.Value, dtype: ir.DataType | None = None) -> ir.Value:
        """Write a constant from outside the graph as a table, in its dtype or in `dtype`."""
        assert value.const_value is not None
        numbers, dtype = value.const_value.numpy(), dtype or value.const_value.dtype
        return self.table(str(value.name).rpartition("/")[2], numbers, dtype.numpy())

    def op(self, kind: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        name = self.make_name(kind)
        return self.tape.op(kind, inputs, attributes or None, domain=domain, name=name, output=ir.Value(name=name))

    def like(self, value: ir.Value, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Write a node with inputs `value, *inputs`. Its output has the dtype of `value`."""
        new = self.op(kind, value, *inputs, **attributes)
        new.type = value.type
        return new

    def reshape(self, value: ir.Value, *sizes: int) -> ir.Value:
        """Reshape the value: keep the first two axes, then these sizes."""
        if dims(value)[2:] == sizes:
            return value
        new = self.like(value, "Reshape", self.table("shape", [0, 0, *sizes]))
        new.shape = ir.Shape([*(*dims(value), None, None)[:2], *sizes])
        return new

    def cast(self, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        """Cast a value. If it is a table that we wrote, write a table in the dtype instead of a Cast."""
        if value.dtype == dtype:
            return value
        if value in self.tape.initializers:
            return self.copy(value, dtype)
        cast = self.op("Cast", value, to=dtype.value)
        cast.dtype = dtype
        return cast

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for node in self.tape.nodes if kind else ():
            for index in range(len(node.inputs)):
                node.replace_input_with(index, None)

    def put_in_place(self, new: ir.Value) -> None:
        """Replace the old tensor: `new` gets the old tensor's readers, name, sizes and dtype."""
        old, producer = self.old, self.old.producer()
        assert producer is not None
        graph = producer.graph
        assert graph is not None
        new.shape, new.type = old.shape, old.type
        for table in self.tape.initializers:
            if list(table.uses()):
                graph.register_initializer(table)
        graph.insert_after(producer, self.tape.nodes)
        name, old.name = old.name, self.make_name("before")
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        new.name = name


class Call(NamedTuple):
    """The five inputs of the operator in a graph."""

    value: ir.Value
    shapes: ir.Value
    starts: ir.Value
    locations: ir.Value
    weights: ir.Value
    sums_in_float32: bool = False  # whether the file sums samples in float32. Its inputs may have 16 bits.

    @property
    def floating(self) -> tuple[ir.Value, ...]:
        return self.value, self.locations, self.weights

    def read_dtype(self) -> ir.DataType:
        """Return the dtype of the output."""
        if any(v.dtype is None for v in self.floating):
            raise Unfit("the file does not say the dtypes of its tensors")
        assert self.value.dtype is not None
        return self.value.dtype


def write_attention(write: Writer, call: Call, form: str, plugin_version: str | None = None) -> ir.Value:
    """Write the operator in a form. Return its output.

    The vendor's node is written in float32. So is NVIDIA's, unless all tensors and sums are float16: then it is in float16.
    """
    if form == "gather":
        return _write_gathers(write, call)
    domain, inputs = DOMAIN[form], call[:5]
    if domain == OURS:
        output = write.op(NODES[domain], *inputs, domain=domain)
        output.type = call.value.type
        return output
    dtypes = {call.read_dtype(), *(v.dtype for v in call.floating)}
    if _DOUBLE in dtypes:
        raise Unfit(f"its tensors are float64; {domain}::{NODES[domain]} has float32, which would lose digits")
    dtype = _HALF if domain == TENSORRT and dtypes == {_HALF} and not call.sums_in_float32 else _FLOAT
    cast = (write.cast(v, dtype if v in call.floating else ir.DataType.INT32) for v in inputs)
    attributes = {"plugin_version": plugin_version} if plugin_version else {}
    output = write.op(NODES[domain], *cast, domain=domain, **attributes)
    output.dtype = dtype
    if domain == TENSORRT:  # The plugin's output has separate axes for heads and channels.
        output = write.like(output, "Reshape", write.table("shape", [0, 0, -1]))
    return write.cast(output, call.read_dtype())


def _write_gathers(write: Writer, call: Call) -> ir.Value:
    """Write the operator with Gather: rows of value at the four corners of each sample are weighted and summed.

    Levels and points are one axis of samples. A corner off its map reads a row of zeros and has weight 0.
    """
    op, table, opset = write.op, write.table, write.model.graph.opset_imports.get("", 0)
    dtype = _DOUBLE if any(v.dtype == _DOUBLE for v in call.floating) else _FLOAT
    maps, starts = read_constant(call.shapes), read_constant(call.starts)
    if maps is None or starts is None:
        raise Unfit("the file does not fix the sizes of its maps, which gathers need")
    batch, *sizes = (*dims(call.value), *dims(call.locations)[4:5]) or (None,)
    if len(sizes) != 4 or not are_fixed(sizes):
        raise Unfit("the file does not fix the sizes of its tensors, which gathers need")
    if batch != 1 and opset < 11:
        raise Unfit("gathers of more than one scene need opset 11 or later")
    output_dtype = call.read_dtype()
    keys, heads, channels, points = sizes
    axes = 0, 0, heads, len(starts) * points
    write_number = functools.partial(table, "number", dtype=dtype.numpy())

    def to_floats(value: ir.Value, *sizes: int) -> ir.Value:
        shaped = op("Reshape", value, table("shape", sizes))
        return shaped if value.dtype == dtype else op("Cast", shaped, to=dtype.value)

    def split_pairs(pairs: ir.Value) -> list[ir.Value]:
        """Return x and y."""
        return [op("Gather", pairs, table("axis", index), axis=-1) for index in (0, 1)]

    # Rows of one head's channels: a row of zeros, then the rows of value.
    rows = op("Concat", write_number(np.zeros((1, channels))), to_floats(call.value, -1, channels), axis=0)
    # For each sample, the row of its level's first pixel, [bs, 1, heads, samples].
    bases = table("bases", np.array(starts).repeat(points) * heads + np.arange(heads)[:, None] + 1)
    if batch != 1:
        count = op("Gather", op("Shape", call.value), table("batch", 0))
        scenes = op("Reshape", op("Range", table("first", 0), count, table("step", 1)), table("shape", [-1, 1, 1, 1]))
        bases = op("Add", op("Mul", scenes, table("rows", keys * heads)), bases)
    locations, weights = to_floats(call.locations, *axes, 2), to_floats(call.weights, *axes)
    sides = np.array(maps)[:, ::-1].repeat(points, 0)  # (width, height) of each sample's map
    positions = op("Sub", op("Mul", locations, table("levels", sides, dtype.numpy())), write_number(0.5))
    pixels, zero, low = op("Floor", positions), write_number(0.0), write_number(-0.5)
    last, widths = table("levels", sides - 0.5, dtype.numpy()), table("levels", sides[:, 0] * heads)
    total = None
    for offset in itertools.product((0, 1), repeat=2):
        corner = op("Add", pixels, write_number(offset))
        inside = op("And", *split_pairs(op("And", op("Greater", corner, low), op("Less", corner, last))))
        distances = op("Sub", write_number(1.0), op("Abs", op("Sub", positions, corner)))
        coefficient = op("Where", inside, op("Mul", op("Mul", *split_pairs(distances)), weights), zero)
        # Replace pixels off the map by 0, because their numbers may overflow an integer.
        x, y = (op("Cast", op("Where", inside, v, zero), to=ir.DataType.INT64.value) for v in split_pairs(corner))
        row = op("Add", op("Mul", y, widths), op("Mul", x, table("heads", heads)))
        row = op("Where", inside, op("Add", row, bases), table("zeros", 0))
        part = op("Mul", op("Gather", rows, row, axis=0), op("Reshape", coefficient, table("shape", [*axes, 1])))
        if opset < 13:  # older opsets have the axes as an attribute
            part = op("ReduceSum", part, axes=[3], keepdims=0)
        else:
            part = op("ReduceSum", part, table("axis", [3]), keepdims=0)
        total = part if total is None else op("Add", total, part)
    assert total is not None
    output = op("Reshape", total, table("shape", [0, 0, -1]))
    output.dtype = dtype
    return write.cast(output, output_dtype)
