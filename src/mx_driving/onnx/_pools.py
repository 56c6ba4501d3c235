"""Rewrite pools of other libraries as our bev_pool_v3: bev_pool_v2 of BEVDet's plugins, and Autoware's QuickCumsumCuda.

Their sums follow intervals: the kernel adds all points of an interval to the cell of its first point. Our node adds a point to
the point's own cell. So write standard operators that list the points of all intervals, and for each point the first point of
its interval.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ._forms import OURS
from ._graph import HALVES, Unfit, describe_node, dims
from ._writer import Writer

_INTERVALS = {"bev_pool_v2", "BEVPoolV2TRT", "BEVPoolV2TRT2"}
_CUMSUM = "QuickCumsumCuda"
POOLS = {*_INTERVALS, _CUMSUM}
_SIZES = {**dict.fromkeys(_INTERVALS, ("out_height", "out_width")), _CUMSUM: ("batch_size", "dimension", "height", "width")}
_IGNORED = {"plugin_version", "plugin_namespace"}
_END = 2**31 - 1


def write_pool(write: Writer, node: ir.Node, form: str) -> ir.Value:
    """Write our node in place of the pool. Return the new output."""
    if form != "onnxruntime":
        raise Unfit(f"it is a pool, {describe_node(node)}, which only the form onnxruntime has")
    inputs, sizes = _read_pool(node)
    if write.model.graph.opset_imports.get("", 0) < 11:
        raise Unfit("pools need opset 11 or later")
    return (_write_cumsum if node.op_type == _CUMSUM else _write_intervals)(write, inputs, sizes)


def give_pool_shape(node: ir.Node) -> bool:
    """Set shape and type of a pool's output if the file does not have them. Return whether they were set."""
    try:
        inputs, sizes = _read_pool(node)
    except Unfit:
        return False
    output, rows = node.outputs[0], inputs[0 if node.op_type == _CUMSUM else 1]
    if output.shape is not None or rows.shape is None:
        return False
    output.shape = ir.Shape([*sizes, dims(rows)[-1]] if node.op_type == _CUMSUM else [1, *sizes, dims(rows)[-1]])
    output.type = rows.type
    return True


def _read_pool(node: ir.Node) -> tuple[list[ir.Value], list[int]]:
    """Return the inputs and the sizes of a pool."""
    inputs, names = [v for v in node.inputs if v is not None], _SIZES[node.op_type]
    if len(inputs) != (count := 4 if node.op_type == _CUMSUM else 7) or len(node.outputs) != 1:
        raise Unfit(f"its node {describe_node(node)} has {len(inputs)} inputs; the pool has {count}")
    if (got := {*node.attributes} - _IGNORED) != {*names}:
        raise Unfit(
            f"its node {describe_node(node)} has the attributes {', '.join(sorted(got))}; the pool has {', '.join(names)}"
        )
    if inputs[0].dtype not in {None, ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES}:
        raise Unfit(f"its values are {inputs[0].dtype}; our node has floats")
    rank, shape = (5 if node.op_type == _CUMSUM else 4), node.outputs[0].shape
    if shape is not None and len(shape) != rank:
        raise Unfit(f"its output has {len(shape)} axes; that of the pool has {rank}")
    return inputs, [int(node.attributes[name].value) for name in names]


def _list_points(write: Writer, starts: ir.Value, lengths: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Return the points of all intervals, and for each point the first point of its interval."""
    op, zero = write.op, write.table("zero", 0)
    lengths = op("Cast", lengths, to=ir.DataType.INT64.value)
    is_filled = op("Greater", lengths, zero)  # an empty interval begins where the next begins
    starts = op("Compress", op("Cast", starts, to=ir.DataType.INT64.value), is_filled, axis=0)
    lengths = op("Compress", lengths, is_filled, axis=0)
    count = op("ReduceSum", lengths, keepdims=0)
    before = op("Sub", op("CumSum", lengths, zero), lengths)
    later = op("Slice", before, write.table("first", [1]), write.table("last", [_END]), write.table("axes", [0]))
    zeros = op("ConstantOfShape", op("Reshape", count, write.table("shape", [1])), value=ir.tensor(np.zeros(1, np.int64)))
    ones = op("ConstantOfShape", op("Shape", later), value=ir.tensor(np.ones(1, np.int64)))
    intervals = op("CumSum", op("ScatterElements", zeros, later, ones, axis=0), zero)
    firsts = op("Gather", starts, intervals, axis=0)
    within = op("Sub", op("Range", zero, count, write.table("step", 1)), op("Gather", before, intervals, axis=0))
    return op("Add", firsts, within), firsts


def _write_intervals(write: Writer, inputs: list[ir.Value], sizes: list[int]) -> ir.Value:
    """Return the output [1, height, width, channels]."""
    depth, feat, ranks_depth, ranks_feat, ranks_bev, starts, lengths = inputs
    op = write.op
    points, firsts = _list_points(write, starts, lengths)
    ranks = op("Gather", ranks_feat, points, axis=0), op("Gather", ranks_depth, points, axis=0)
    rows, elements = op("Flatten", feat, axis=-1), op("Reshape", depth, write.table("flat", [-1]))
    pool = _write_ours(write, [rows, elements, *ranks, op("Gather", ranks_bev, firsts, axis=0)], [1, 1, *sizes])
    return op("Reshape", pool, write.table("shape", [1, *sizes, -1]))


def _write_cumsum(write: Writer, inputs: list[ir.Value], sizes: list[int]) -> ir.Value:
    """Return the output [batch, layers, height, width, channels]. A cell is given as row, column, layer and scene."""
    rows, cells, lengths, starts = inputs
    op, (_, layers, height, width) = write.op, sizes
    points, firsts = _list_points(write, starts, lengths)
    strides = write.table("strides", [width, 1, height * width, layers * height * width])
    cells = op("Gather", op("Cast", cells, to=ir.DataType.INT64.value), firsts, axis=0)
    one = op("Cast", write.table("one", [1.0], np.float32), to=(rows.dtype or ir.DataType.FLOAT).value)
    return _write_ours(write, [rows, one, points, op("Sub", points, points), op("MatMul", cells, strides)], sizes)


def _write_ours(write: Writer, inputs: list[ir.Value], sizes: list[int]) -> ir.Value:
    """Return the output of our node with channels last."""
    pool = write.op("bev_pool_v3", *inputs, domain=OURS, **dict(zip(("bs", "d", "h", "w"), sizes, strict=True)))
    return write.op("Transpose", pool, perm=[0, 2, 3, 4, 1])
