"""Find and rewrite nodes that compute one of our operators: our nodes for onnxruntime, the vendor's and TensorRT's attention
nodes, and the plugins of other libraries for attention and pools."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir

from .._operator.description import AGGREGATION, MULTI_SCALE
from ._forms import NODES, OURS, TENSORRT, Call, Writer, write_attention
from ._graph import HALVES, SAID_DOMAIN, Unfit, are_fixed, describe_node, dims, read_constant, walk_nodes

# Nodes of mmdeploy for mmcv, and of NVIDIA's DL4AGX and Autoware. Their output is [bs, queries, heads * channels].
_JOINED = {"MMCVMultiScaleDeformableAttention", "MultiScaleDeformableAttentionPlugin"}
# Plugins of BEVFormer_tensorrt and Autoware. Their inputs are value, spatial shapes, reference points, offsets and logits.
_WITH_LOGITS = {"MultiScaleDeformableAttnTRT", "MultiScaleDeformableAttnTRT2"}
# Nodes of deformable_aggregation: NVIDIA TAO's Sparse4D, SparseEnd2End, and deployments of SparseDrive.
_AGGREGATES = {"MSDA", "DeformableAttentionAggrPlugin", "DeformableAggregation", "DeformableAggregationPlugin"}
# Name of a plugin -> the index of an input whose first two axes are batch and queries.
_SHAPED_PLUGINS = {**dict.fromkeys((NODES[TENSORRT], *_JOINED, *_AGGREGATES), 3), **dict.fromkeys(_WITH_LOGITS, 2)}
# Pools: bev_pool_v2 of BEVDet's plugins, and Autoware's QuickCumsumCuda.
_INTERVALS, _CUMSUM = {"bev_pool_v2", "BEVPoolV2TRT", "BEVPoolV2TRT2"}, "QuickCumsumCuda"
POOLS = {*_INTERVALS, _CUMSUM}
_POOL_SIZES = {
    **dict.fromkeys(_INTERVALS, ("out_height", "out_width")),
    _CUMSUM: ("batch_size", "dimension", "height", "width"),
}
_STANDARD = {"", "ai.onnx", "ai.onnx.ml", OURS}
_LIKE_OURS = re.compile("(?!.*conv).*(deform|msda|bev_?pool|voxel_?pool|cumsum)", re.IGNORECASE)
_AXES, _AGGREGATION_AXES = (4, 2, 1, 6, 5), (3, 3, 2, 5, 6)  # the number of axes of each of the five inputs
_IGNORED = {"im2col_step", "plugin_version", "plugin_namespace"}  # attributes without influence on the result
_FAR, _END = -10.0, 2**31 - 1


# Which nodes


def name_operator(node: ir.Node) -> str:
    """Return the name of our operator that the node computes, "" if it computes none. A plugin may have any domain, because
    the exporter chooses it."""
    if node.op_type in _WITH_LOGITS:
        return f"{MULTI_SCALE}_with_logits" if has_logits(node) else MULTI_SCALE
    if node.op_type in _AGGREGATES:
        return AGGREGATION
    if node.op_type in {NODES[TENSORRT], *_JOINED} or node.op_type == NODES.get(node.domain):
        return MULTI_SCALE
    return node.op_type if node.domain == OURS else ""


def has_logits(node: ir.Node) -> bool:
    """Return whether the node is a plugin with offsets and logits. In forks of BEVFormer_tensorrt, a node of the same type has
    locations instead."""
    inputs = [v for v in node.inputs if v is not None]
    return node.op_type in _WITH_LOGITS and not (len(inputs) == 5 and len(dims(inputs[3])) == 6)


def find_nodes(graph: ir.Graph) -> list[ir.Node]:
    """Return our nodes, and nodes whose name is, or looks like, that of another library's node for our operators."""
    others = {node for node in graph if node.domain not in _STANDARD and _LIKE_OURS.match(node.op_type)}
    return [node for node in graph if name_operator(node) or node.op_type in POOLS or node in others]


def name_unknown(graph: ir.Graph) -> str:
    """Return in words the nodes that belong to no known library; "" if there are none."""
    known = {*find_nodes(graph)}
    kinds = dict.fromkeys(
        describe_node(node) for node in graph if node.domain not in {*_STANDARD, "com.microsoft"} and node not in known
    )
    return f"; not known: its nodes {', '.join(kinds)}" if kinds else ""


# The domain of plugins, and the shape of their output


def name_plugins(model: ir.Model) -> bool:
    """Move TensorRT's plugins from onnx's domain, in which exporters write them, to the domain of onnxruntime's provider."""
    plugins = [node for node in walk_nodes(model) if node.domain in ("", "ai.onnx") and not onnx.defs.has(node.op_type)]
    for node in plugins:
        node.metadata_props[SAID_DOMAIN] = node.domain
        node.domain = TENSORRT
    if plugins:
        for graph in (model.graph, *model.functions.values()):
            graph.opset_imports.setdefault(TENSORRT, 1)
    return bool(plugins)


def restore_plugins(model: ir.Model) -> bool:
    """Restore the plugins' domain as in the file. Return whether there are plugins."""
    plugins = [node for node in walk_nodes(model) if SAID_DOMAIN in node.metadata_props]
    for node in plugins:
        node.domain = node.metadata_props.pop(SAID_DOMAIN)
    for graph in (model.graph, *model.functions.values()):
        if not any(node.domain == TENSORRT for node in ir.traversal.RecursiveGraphIterator(graph)):
            graph.opset_imports.pop(TENSORRT, None)
    return bool(plugins)


def give_shape(node: ir.Node) -> bool:
    """Set shape and type of a plugin's or pool's output, which onnx cannot infer. Return whether they were set."""
    inputs = [v for v in node.inputs if v is not None]
    if not node.outputs or (output := node.outputs[0]).shape is not None:
        return False
    if node.op_type in POOLS:
        try:
            inputs, sizes = _read_pool(node)
        except Unfit:
            return False
        rows, batch = (inputs[0], ()) if node.op_type == _CUMSUM else (inputs[1], (1,))
        if rows.shape is None:
            return False
        output.shape, output.type = ir.Shape([*batch, *sizes, dims(rows)[-1]]), rows.type
        return True
    if len(inputs) != 5 or node.op_type not in _SHAPED_PLUGINS or (node.op_type in _WITH_LOGITS and not has_logits(node)):
        return False
    value, (batch, queries, *_) = dims(inputs[0]), (*dims(inputs[_SHAPED_PLUGINS[node.op_type]]), None, None)
    if len(value) != (3 if node.op_type in _AGGREGATES else 4) or queries is None:
        return False
    blocks = value[2:]
    if node.op_type in _JOINED:
        blocks = (math.prod(blocks) if are_fixed(blocks) else None,)
    output.shape = ir.Shape([value[0] if isinstance(value[0], int) else batch, queries, *blocks])
    output.type = inputs[0].type
    return True


# Rewriting


def rewrite(model: ir.Model, node: ir.Node, form: str, plugin_version: str | None = None) -> str:
    """Replace the node by nodes of another form. Return the old node in words."""
    with Writer(model, node.outputs[0]) as write:
        if node.op_type in POOLS:
            new = _write_pool(write, node, form)
        elif has_logits(node):
            inputs = LogitInputs(node)
            if form == "onnxruntime":
                references = write.reshape(inputs.references, inputs.references_of_points, 2)
                offsets = write.reshape(inputs.offsets, inputs.heads, len(inputs.maps), inputs.points, 2)
                logits = write.reshape(inputs.logits, inputs.heads, len(inputs.maps) * inputs.points)
                tensors = inputs.value, *write.tables(inputs.maps), references, offsets, logits
                new = write.op(f"{NODES[OURS]}_with_logits", *tensors, domain=OURS, reference_axis="point")
            else:  # locations = references + offsets / (width, height), weights = softmax(logits)
                if inputs.offsets.dtype is None:
                    raise Unfit("the file does not say the dtypes of its tensors")
                heads, levels, points, references = inputs.heads, len(inputs.maps), inputs.points, inputs.references_of_points
                sides = np.array(inputs.maps)[:, ::-1].reshape(1, 1, 1, levels, 1, 1, 2)
                offsets = write.reshape(inputs.offsets, heads, levels, points // references, references, 2)
                moved = write.like(offsets, "Div", write.table("sides", sides, inputs.offsets.dtype.numpy()))
                located = write.like(moved, "Add", write.reshape(inputs.references, 1, 1, 1, references, 2))
                locations = write.reshape(located, heads, levels, points, 2)
                weights = write.like(write.reshape(inputs.logits, heads, levels * points), "Softmax", axis=3)
                tables, weights = write.tables(inputs.maps), write.reshape(weights, heads, levels, points)
                new = write_attention(write, Call(inputs.value, *tables, locations, weights), form, plugin_version)
            new = write.op("Reshape", new, write.table("shape", [0, 0, inputs.heads, inputs.channels]))
        elif name_operator(node) == AGGREGATION:
            tensors = read_inputs(node)
            if form == "onnxruntime":
                new = write.op(AGGREGATION, *tensors, domain=OURS)
            else:
                new = write_attention(write, _write_as_attention(write, tensors), form, plugin_version)
        elif node.domain == OURS and name_operator(node) != MULTI_SCALE:
            raise Unfit(f"it is a node {describe_node(node)}, which no other form has")
        else:
            value, shapes, starts, locations, weights = read_inputs(node)
            new = write_attention(write, Call(value, shapes, starts, locations, weights), form, plugin_version)
            shape, blocks = node.outputs[0].shape, dims(value)[2:]
            if shape is None and node.op_type in _WITH_LOGITS:
                raise Unfit(f"the file does not say how many axes the output of its node {describe_node(node)} has")
            if node.op_type == NODES[TENSORRT] if shape is None else len(shape) == 4:  # separate axes for heads and channels
                if len(blocks) == 2 and are_fixed(blocks):
                    sizes = write.table("shape", [0, 0, *blocks])
                else:
                    last = write.op("Gather", write.op("Shape", value), write.table("axes", [2, 3]), axis=0)
                    sizes = write.op("Concat", write.table("shape", [0, 0]), last, axis=0)
                new = write.op("Reshape", new, sizes)
        write.put_in_place(new)
    return f"a {'pool' if node.op_type in POOLS else 'node'} {describe_node(node)}"


def use_our_nodes(model: ir.Model, others: list[ir.Node]) -> None:
    """Replace nodes of other forms by our nodes, so that onnxruntime runs the model."""
    for node in others:
        rewrite(model, node, "onnxruntime")
        assert node.graph is not None
        node.graph.remove(node)
        model.graph.opset_imports[OURS] = 1


def read_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the five inputs of the operator. Raise Unfit for a node or an attribute whose meaning is not known."""
    if (operator := name_operator(node)) not in (MULTI_SCALE, AGGREGATION):
        raise Unfit(f"its node {describe_node(node)} is not known")
    if others := {*node.attributes} - _IGNORED:
        raise Unfit(f"its node {describe_node(node)} has the attribute {min(others)}, whose meaning is not known")
    inputs, numbers = _list_inputs(node), _AGGREGATION_AXES if operator == AGGREGATION else _AXES
    fit = all(v.shape is None or len(v.shape) == axes for v, axes in zip(inputs, numbers, strict=True))
    if not fit or len(node.outputs) > 1:
        raise Unfit(f"its node {describe_node(node)} must have one output, and inputs of {', '.join(map(str, numbers))} axes")
    return inputs


def _list_inputs(node: ir.Node) -> list[ir.Value]:
    inputs = [value for value in node.inputs if value is not None]
    if len(inputs) != 5:
        raise Unfit(f"its node {describe_node(node)} has {len(inputs)} inputs; the operator has 5")
    return inputs


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


def _read_fixed_sizes(value: ir.Value, first: int) -> Sequence[int]:
    sizes = dims(value)[first:]
    if not sizes or not are_fixed(sizes):
        raise Unfit(f"the file does not fix the sizes of {value.name}")
    return sizes


def _write_as_attention(write: Writer, inputs: list[ir.Value]) -> Call:
    """Return the inputs with which attention has the same result as aggregation has with `inputs`.

    A map of a camera becomes a level, a group of channels becomes a head. Aggregation drops a sample if its centre is off the
    image. Attention drops a sample only if all four pixels around it are off the map. So move the locations that aggregation
    drops far off the map.
    """
    op, table = write.op, write.table
    features, shapes, starts, locations, weights = inputs
    sizes = (*dims(weights)[2:], *dims(features)[2:])
    if len(sizes) != 5 or not are_fixed(sizes) or locations.dtype is None:
        raise Unfit("the file does not fix the sizes and dtypes of its tensors, which other forms need")
    points, cams, scales, groups, channels = sizes
    tables = []  # with one axis for the maps of all cameras
    for name, old, shape in (("spatial_shapes", shapes, (-1, 2)), ("level_start_index", starts, (-1,))):
        numbers = read_constant(old)
        if numbers is None:
            tables.append(write.like(old, "Reshape", table("shape", shape)))
        else:
            tables.append(table(name, numbers.reshape(shape), numbers.dtype))
    # [bs, anchor, pts, cam, 2] -> [bs, anchor, group, cam, scale, pts, 2]
    zero, one, far = (table("number", x, locations.dtype.numpy()) for x in (0.0, 1.0, _FAR))
    inside = op("And", op("Greater", locations, zero), op("Less", locations, one))
    x, y = (op("Gather", inside, table("axis", [axis]), axis=-1) for axis in (0, 1))
    moved = op("Transpose", op("Where", op("And", x, y), locations, far), perm=[0, 1, 3, 2, 4])
    moved = op("Reshape", moved, table("shape", [0, 0, 1, cams, 1, points, 2]))
    axes = groups, cams, scales, points, 2
    moved = op("Expand", moved, table("shape", [1, 1, *axes]))
    moved.type, moved.shape = locations.type, ir.Shape([*dims(locations)[:2], *axes])
    return Call(
        write.reshape(features, groups, channels // groups),
        tables[0],
        tables[1],
        write.reshape(moved, groups, cams * scales, points, 2),
        write.reshape(write.like(weights, "Transpose", perm=[0, 1, 5, 3, 4, 2]), groups, cams * scales, points),
    )


# Pools


def _read_pool(node: ir.Node) -> tuple[list[ir.Value], list[int]]:
    """Return the inputs and the sizes of a pool."""
    inputs, names = [v for v in node.inputs if v is not None], _POOL_SIZES[node.op_type]
    if len(inputs) != (count := 4 if node.op_type == _CUMSUM else 7) or len(node.outputs) != 1:
        raise Unfit(f"its node {describe_node(node)} has {len(inputs)} inputs; the pool has {count}")
    if (got := {*node.attributes} - {"plugin_version", "plugin_namespace"}) != {*names}:
        fact = f"its node {describe_node(node)} has the attributes {', '.join(sorted(got))}"
        raise Unfit(f"{fact}; the pool has {', '.join(names)}")
    if inputs[0].dtype not in {None, ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES}:
        raise Unfit(f"its values are {inputs[0].dtype}; our node has floats")
    rank, shape = (5 if node.op_type == _CUMSUM else 4), node.outputs[0].shape
    if shape is not None and len(shape) != rank:
        raise Unfit(f"its output has {len(shape)} axes; that of the pool has {rank}")
    return inputs, [int(node.attributes[name].value) for name in names]


def _write_pool(write: Writer, node: ir.Node, form: str) -> ir.Value:
    """Write our bev_pool_v3 in place of the pool. Return the new output.

    The pools' sums follow intervals: the kernel adds all points of an interval to the cell of its first point. Our node adds a
    point to the point's own cell. So write standard operators that list the points of all intervals, and for each point the
    first point of its interval.
    """
    if form != "onnxruntime":
        raise Unfit(f"it is a pool, {describe_node(node)}, which only the form onnxruntime has")
    inputs, sizes = _read_pool(node)
    if write.model.graph.opset_imports.get("", 0) < 11:
        raise Unfit("pools need opset 11 or later")
    op, table, is_cumsum = write.op, write.table, node.op_type == _CUMSUM
    starts, lengths = reversed(inputs[2:]) if is_cumsum else inputs[5:]
    zero, lengths = table("zero", 0), op("Cast", lengths, to=ir.DataType.INT64.value)
    is_filled = op("Greater", lengths, zero)  # an empty interval begins where the next begins
    starts = op("Compress", op("Cast", starts, to=ir.DataType.INT64.value), is_filled, axis=0)
    lengths = op("Compress", lengths, is_filled, axis=0)
    count = op("ReduceSum", lengths, keepdims=0)
    before = op("Sub", op("CumSum", lengths, zero), lengths)
    later = op("Slice", before, table("first", [1]), table("last", [_END]), table("axes", [0]))
    zeros = op("ConstantOfShape", op("Reshape", count, table("shape", [1])), value=ir.tensor(np.zeros(1, np.int64)))
    ones = op("ConstantOfShape", op("Shape", later), value=ir.tensor(np.ones(1, np.int64)))
    intervals = op("CumSum", op("ScatterElements", zeros, later, ones, axis=0), zero)
    firsts = op("Gather", starts, intervals, axis=0)
    within = op("Sub", op("Range", zero, count, table("step", 1)), op("Gather", before, intervals, axis=0))
    points = op("Add", firsts, within)
    if is_cumsum:  # A cell is given as row, column, layer and scene.
        rows, cells, (_, layers, height, width) = *inputs[:2], sizes
        strides = table("strides", [width, 1, height * width, layers * height * width])
        cells = op("Gather", op("Cast", cells, to=ir.DataType.INT64.value), firsts, axis=0)
        one = op("Cast", table("one", [1.0], np.float32), to=(rows.dtype or ir.DataType.FLOAT).value)
        tensors = rows, one, points, op("Sub", points, points), op("MatMul", cells, strides)
    else:
        depth, feat, ranks_depth, ranks_feat, ranks_bev = inputs[:5]
        ranks = op("Gather", ranks_feat, points, axis=0), op("Gather", ranks_depth, points, axis=0)
        rows, elements = op("Flatten", feat, axis=-1), op("Reshape", depth, table("flat", [-1]))
        tensors = rows, elements, *ranks, op("Gather", ranks_bev, firsts, axis=0)
    cells = sizes if is_cumsum else [1, 1, *sizes]
    pool = op("bev_pool_v3", *tensors, domain=OURS, **dict(zip(("bs", "d", "h", "w"), cells, strict=True)))
    pool = op("Transpose", pool, perm=[0, 2, 3, 4, 1])
    return pool if is_cumsum else op("Reshape", pool, table("shape", [1, *sizes, -1]))
