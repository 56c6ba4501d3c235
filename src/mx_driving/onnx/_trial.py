"""Whether a part of an ONNX graph computes multi_scale_deformable_attn: it is run beside the operator on random inputs.

Only nodes that move values about, multiply, add and sample may take part. Such a graph has no case that random inputs, on
and beyond the maps, would miss.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from .. import ops
from ._search import MOVES, Sampling, Unfit, dims, is_node

_COMPUTE = {"GridSample", "Mul", "Add", "Sub", "ReduceSum", "Concat", "Constant"}
_SIZES = {"Shape", "Cast", "Div", "Mod", "ReduceProd", "ConstantOfShape", "Where", "Equal", "Range", "Expand", "Size"}
_FREE = 2, 7  # batch and queries where the file leaves them free
_INTEGER = {ir.DataType.INT64, ir.DataType.INT32, ir.DataType.BOOL}


def _allowed(node: ir.Node) -> bool:
    if is_node(node, *MOVES, *_COMPUTE):
        return True
    return is_node(node, *_SIZES) and node.outputs[0].dtype in _INTEGER


def _follows(ends: set[ir.Value]) -> set[ir.Value]:
    """What is computed from these, near or far."""
    found, todo = set(ends), list(ends)
    while todo:
        for use in todo.pop().uses():
            new = [v for v in use.node.outputs if v not in found]
            found.update(new)
            todo.extend(new)
    return found


def _part(sampling: Sampling) -> tuple[list[ir.Node], list[ir.Value]]:
    """The nodes between the operator's inputs and its output, and the sizes of other tensors that they ask for."""
    ends = {sampling.value, sampling.locations, sampling.weights}
    inside = _follows(ends)
    nodes: dict[ir.Node, None] = {}
    sizes: dict[ir.Value, None] = {}
    todo = [sampling.output]
    while todo:
        value = todo.pop()
        node = value.producer()
        if value in ends or value.is_initializer() or node in nodes:
            continue
        if node is None:
            raise Unfit(f"it also reads {value.name}")
        if is_node(node, "Shape") and node.inputs[0] not in inside:
            sizes[value] = None
            continue
        if not _allowed(node):
            raise Unfit(f"{node.op_type} ({node.name}) takes part")
        nodes[node] = None
        todo.extend(v for v in node.inputs if v is not None)
    return list(nodes), list(sizes)


def _numbers(sampling: Sampling) -> tuple[int, int, dict[str, int]]:
    """batch, queries, and what the names of sizes stand for"""
    names: dict[str, int] = {}
    chosen = []
    tensors = (sampling.locations, sampling.weights), (sampling.value,)
    for axis, free in enumerate(_FREE):
        seen = [dims(t)[axis] for t in itertools.chain(tensors[0], tensors[1] if axis == 0 else ())]
        fixed = {d for d in seen if isinstance(d, int)}
        if len(fixed) > 1:
            raise Unfit(f"its tensors differ in {'queries' if axis else 'batch'}: {sorted(fixed)}")
        chosen.append(fixed.pop() if fixed else free)
        names.update({d: chosen[-1] for d in seen if isinstance(d, str)})
    return chosen[0], chosen[1], names


def _size(shape_of: ir.Value, names: dict[str, int]) -> np.ndarray[Any, Any]:
    node = shape_of.producer()
    assert node is not None
    assert node.inputs[0] is not None
    start, end = (node.attributes[key].value if key in node.attributes else None for key in ("start", "end"))
    sizes = dims(node.inputs[0])[start:end]
    known = [names.get(d) if isinstance(d, str) else d for d in sizes]
    if None in known or not known:
        raise Unfit(f"the file does not say the sizes of {node.inputs[0].name}")
    return np.array(known, np.int64)


def _inputs(sampling: Sampling, bs: int, queries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random value, locations on and beyond the maps, and weights, as the file's axes have them."""
    random = torch.Generator().manual_seed(0)
    blocks = (
        (sampling.num_heads, sampling.channels) if len(dims(sampling.value)) == 4 else (sampling.num_heads * sampling.channels,)
    )
    value = torch.rand(bs, sampling.num_keys, *blocks, generator=random) * 2 - 1
    locations = torch.rand(bs, queries, *sampling.sizes(sampling.locations), generator=random) * 1.6 - 0.3
    weights = torch.randn(bs, queries, *sampling.sizes(sampling.weights), generator=random)
    return value, locations, weights


def tables(sampling: Sampling) -> tuple[list[list[int]], list[int]]:
    """spatial_shapes and level_start_index"""
    areas = [height * width for height, width in sampling.maps]
    return [list(m) for m in sampling.maps], [0, *itertools.accumulate(areas)][:-1]


def padding(points: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Which sample of a query stands at each place when every level has as many points as the largest, and 1 or 0 for it."""
    most, starts = max(points), [0, *itertools.accumulate(points)]
    places = [
        (start + min(p, count - 1), float(p < count)) for start, count in zip(starts, points, strict=False) for p in range(most)
    ]
    return [place for place, _ in places], [mask for _, mask in places]


def _ours(sampling: Sampling, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, float]:
    """The operator in float64, and the largest sum of absolute terms, to which rounding is proportional."""
    value, locations, weights = (t.double() for t in inputs)
    bs, queries = locations.shape[:2]
    places, mask = padding(sampling.points)
    levels, most = len(sampling.points), max(sampling.points)
    value = value.reshape(bs, sampling.num_keys, sampling.num_heads, sampling.channels)
    locations = locations.reshape(bs, queries, sampling.num_heads, -1, 2)[:, :, :, places].unflatten(3, (levels, most))
    weights = weights.reshape(bs, queries, sampling.num_heads, -1)[..., places] * torch.tensor(mask, dtype=torch.float64)
    shapes, starts = (torch.tensor(table) for table in tables(sampling))
    output = ops.multi_scale_deformable_attn(value, shapes, starts, locations, weights.unflatten(3, (levels, most)))
    return output, float(weights.abs().sum(-1).max())


def _theirs(model: ir.Model, sampling: Sampling, sizes: list[ir.Value], feeds: dict[str, Any]) -> np.ndarray[Any, Any]:
    import onnxruntime

    graph = ir.convenience.extract(
        model.graph, [sampling.value, sampling.locations, sampling.weights, *sizes], [sampling.output]
    )
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    part = ir.serde.serialize_model(ir.Model(graph, ir_version=model.ir_version)).SerializeToString()
    try:
        session = onnxruntime.InferenceSession(part, options, providers=["CPUExecutionProvider"])
        names = {i.name for i in session.get_inputs()}
        return np.asarray(session.run(None, {name: array for name, array in feeds.items() if name in names})[0])
    except Exception as error:  # onnxruntime has a dozen kinds of its own
        raise Unfit(f"a trial in onnxruntime failed: {str(error).splitlines()[0]}") from None


def _precision(dtype: ir.DataType | None) -> tuple[Any, float]:
    if dtype is None or dtype not in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16):
        raise Unfit(f"its values are {dtype}; a trial needs float32, float64 or float16")
    return dtype.numpy(), float(np.finfo(dtype.numpy()).eps)


def prove(model: ir.Model, sampling: Sampling) -> None:
    """Raise Unfit unless the part of the graph gives what the operator gives, but for rounding."""
    _, sizes = _part(sampling)
    bs, queries, names = _numbers(sampling)
    dtype, eps = _precision(sampling.value.dtype)
    ends = sampling.value, sampling.locations, sampling.weights
    arrays = [t.numpy().astype(dtype) for t in _inputs(sampling, bs, queries)]
    feeds = {str(end.name): array for end, array in zip(ends, arrays, strict=True)}
    feeds.update({str(s.name): _size(s, names) for s in sizes})
    result = torch.from_numpy(_theirs(model, sampling, sizes, feeds)).double()
    expected, scale = _ours(sampling, tuple(torch.from_numpy(a) for a in arrays))  # type: ignore[arg-type]
    if result.shape != expected.shape:
        raise Unfit(f"it gives {tuple(result.shape)}; the operator gives {tuple(expected.shape)}")
    allowed = eps * (16 + 2 * (4 * sum(sampling.points)) ** 0.5 + 2 * max(map(max, sampling.maps))) * scale
    difference = float((result - expected).abs().max())
    if not difference <= allowed:
        raise Unfit(f"it computes something else: {difference:.1e} from the operator in a trial, {allowed:.1e} is rounding")
