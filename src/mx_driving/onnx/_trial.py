"""Prove that a subgraph of an ONNX graph computes multi_scale_deformable_attn: run both on random inputs.

The subgraph is multilinear in value and weights, so agreement on random inputs means equality with probability 1. Only
locations may branch, by floors and clips. They are drawn on the maps, across every border and far away, to hit every branch.

A subgraph in 16 bits runs in float32, which is more exact and has all kernels in onnxruntime. A subgraph in float64 runs in
float32 only if onnxruntime lacks a float64 kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from .. import ops
from .._agreement import ULPS, entry_differences, largest_magnitude, rounding_limit
from .._operator.rules import first_line
from . import _sizes
from ._file import LoadedFile
from ._forms import make_tables
from ._graph import HALVES, INTEGER, MOVES, PAIRS, Unfit, dims, is_node, read_attribute, read_constant
from ._search import Sampling
from ._session import is_missing_kernel, open_session

_COMPUTE = {"GridSample", "Mul", "Add", "Sub", "Sum", "Neg", "ReduceSum", "Concat", "Constant", "ConstantOfShape"}
_SIZES = {"Shape", "Div", "Mod", "ReduceProd", "ConstantOfShape", "Range", "Size"}
# Node that is not linear in every input -> indices of the inputs that may depend on value and weights.
_BRANCHES = {
    **dict.fromkeys(("Expand", "Pad", "Div", "GatherElements", "GatherND"), (0,)),
    **dict.fromkeys(("Abs", "And", "Clip", "Equal", "Floor", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), ()),
    **dict.fromkeys(("Max", "Min", "Not", "Or"), ()),
    "Where": (1, 2),
}
_QUANTISED = "quantise Conv, MatMul and Gemm alone, or exclude the nodes that `mx-driving fuse --json` names in the float file"
_SAMPLES = 500  # at least so many samples per level are tried, for each kind of locations


def _collect_part(sampling: Sampling, defaults: Collection[str]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the nodes between the operator's inputs and output in order, and the outputs of Shape nodes that they read.

    Raise Unfit if the nodes read another tensor, or if a node is not allowed. `defaults`: the names of inputs with a default.
    """
    ends, names = {*sampling.ends}, _sizes.name_sizes(sampling, _sizes.make_shapes(sampling, *_sizes.FEW))
    nodes: dict[ir.Node, None] = {}
    sizes: dict[ir.Value, None] = {}
    todo = [(sampling.output, "it also reads {}")]
    while todo:
        value, reason = todo.pop()
        node = value.producer()
        if value in ends or value.is_initializer() or node in nodes:
            continue
        if node is None:
            raise Unfit(reason.format(value.name) + ", an input with a default" * (value.name in defaults))
        if is_node(node, "Shape"):
            if _read_size(value, names) is not None:
                sizes[value] = None
                continue
            (measured,) = (v.name for v in node.inputs if v is not None)
            reason = f"the file does not fix the size of {measured}, which it reads"
        nodes[node] = None
        todo.extend((v, reason) for v in node.inputs if v is not None)
    graph = next(iter(nodes)).graph
    assert graph is not None
    part = [node for node in graph if node in nodes]
    _check_nodes(sampling, part)
    return part, list(sizes)


def _check_nodes(sampling: Sampling, nodes: list[ir.Node]) -> None:
    """Raise Unfit unless the nodes are linear in value and weights, and their dtypes can be tried."""
    if pairs := [str(node.name) for node in nodes if is_node(node, "DequantizeLinear")]:
        between = f"{len(pairs)} pairs of QuantizeLinear and DequantizeLinear stand between its nodes, such as {pairs[0]}"
        raise Unfit(f"{between}; {_QUANTISED}")
    # The tensors computed from elements of value and weights, and of constant maps, which are not computed from `value`.
    linear = {sampling.value, sampling.weights}
    linear |= {v for node in nodes if is_node(node, "GridSample") and (v := node.inputs[0]) is not None}
    for node in nodes:
        if not is_node(node, "Shape", "Size") and any(v in linear for v in node.inputs):
            linear.update(node.outputs)
    for node in reversed(nodes):
        if is_node(node, *MOVES) and not is_node(node, *PAIRS):
            is_allowed = not any(v in linear for v in node.inputs[1:])
        elif is_node(node, *_COMPUTE):
            is_allowed = True
        elif is_node(node, "Cast", "CastLike"):
            is_allowed = node.outputs[0].dtype not in INTEGER or node.inputs[0] not in linear
        elif is_node(node, *_BRANCHES):
            is_allowed = not any(v in linear for index, v in enumerate(node.inputs) if index not in _BRANCHES[node.op_type])
        else:
            is_allowed = is_node(node, *_SIZES) and node.outputs[0].dtype in INTEGER
        if not is_allowed:
            raise Unfit(f"{node.op_type} ({node.name}) takes part")
    for end in sampling.ends:
        if end.dtype is None:
            raise Unfit(f"the file does not say the dtype of {end.name}")
        if end.dtype not in {ir.DataType.FLOAT, ir.DataType.DOUBLE, *HALVES}:
            raise Unfit(f"its values are {end.dtype}; a trial needs float32, float64, float16 or bfloat16")


def _read_size(shape_of: ir.Value, names: dict[str, int]) -> np.ndarray[Any, Any] | None:
    """Return the output of a Shape node, with free sizes taken from `names`; None if a size is missing."""
    node = shape_of.producer()
    assert node is not None
    assert node.inputs[0] is not None
    axes = slice(read_attribute(node, "start"), read_attribute(node, "end"))
    sizes = [names.get(d) if isinstance(d, str) else d for d in dims(node.inputs[0])[axes]]
    return np.array(sizes, np.int64) if sizes and None not in sizes else None


def draw_inputs(sampling: Sampling, seed: int, shapes: _sizes.Shapes) -> tuple[Tensor, ...]:
    """Return value, locations and weights in the file's layout: constants of the file, or random numbers.

    Locations are of three kinds by seed: on and around the maps, across their borders, and far away.
    """
    value, located, weights = _sizes.broadcast(sampling, shapes)
    random = torch.Generator().manual_seed(seed)
    sizes = *located[:2], sampling.num_heads, sum(sampling.points), 2
    if seed % 3 != 1:
        uniform = torch.rand(*sizes, generator=random)
        locations = (uniform - 0.5) * 1000 if seed % 3 else uniform * 1.6 - 0.3
    else:  # Near the outermost pixels of the maps, in x, in y or in both.
        sides = torch.tensor([(width, height) for height, width in sampling.maps])
        sides = sides.repeat_interleave(torch.tensor(sampling.points), 0)
        across = torch.randint(2, sizes, generator=random) * (sides - 1) + torch.rand(*sizes, generator=random) * 3 - 1.5
        inside = torch.rand(*sizes, generator=random) * sides
        locations = (torch.where(torch.rand(*sizes, generator=random) < 0.7, across, inside) + 0.5) / sides
    random.manual_seed(seed)
    tensors = torch.rand(value, generator=random) * 2 - 1, locations.reshape(located), torch.randn(weights, generator=random)
    random_ends = [t[tuple(map(slice, shape))] for t, shape in zip(tensors, shapes, strict=True)]
    free = [*sampling.inputs.values()]
    return tuple(
        t if end in free else torch.from_numpy(read_constant(end).astype(np.float64))
        for end, t in zip(sampling.ends, random_ends, strict=True)
    )


def pad_points(points: tuple[int, ...]) -> tuple[list[int], list[float]]:
    """Pad all levels to the same number of points: return the indices of samples, and a mask with 0 for padding."""
    most, starts = max(points), [0, *itertools.accumulate(points)]
    indices = [
        (start + min(p, count - 1), float(p < count)) for start, count in zip(starts, points, strict=False) for p in range(most)
    ]
    return [index for index, _ in indices], [mask for _, mask in indices]


def make_bare_inputs(sampling: Sampling, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Convert value, locations and weights in the graph's layout to the five inputs of the operator."""
    value, locations, weights = inputs
    bs, queries = max(map(len, inputs)), max(locations.shape[1], weights.shape[1])
    value = value.expand(bs, *value.shape[1:])
    locations, weights = (
        t.expand(bs, queries, *sampling.last_sizes(end)) for t, end in zip((locations, weights), sampling.ends[1:], strict=True)
    )
    indices, mask = pad_points(sampling.points)
    levels, most = len(sampling.points), max(sampling.points)
    value = value.reshape(bs, sampling.num_keys, sampling.num_heads, sampling.channels)
    locations = locations.reshape(bs, queries, sampling.num_heads, -1, 2)[:, :, :, indices].unflatten(3, (levels, most))
    weights = weights.reshape(bs, queries, sampling.num_heads, -1)[..., indices] * torch.tensor(mask, dtype=weights.dtype)
    shapes, starts = (torch.tensor(table) for table in make_tables(sampling.maps))
    return value, shapes, starts, locations, weights.unflatten(3, (levels, most))


def make_model(model: ir.Model, part: ir.Graph) -> ir.Model:
    """Return a part of the model's graph as a model that needs no other file."""
    return ir.external_data.load_to_model(ir.Model(part, ir_version=model.ir_version))


def _open_session(model: ir.Model, sampling: Sampling) -> tuple[Any, set[ir.DataType]]:
    """Return a session of the subgraph, and the dtypes that the session replaces by float32."""

    def to_float32(tensor: Any) -> Any:
        return ir.tensor(tensor.numpy().astype(np.float32), name=tensor.name)

    for dtypes in (HALVES, {*HALVES, ir.DataType.DOUBLE}):
        part = make_model(model, sampling.extract())
        graph = part.graph
        for value in graph.inputs:
            graph.initializers.pop(str(value.name), None)
            value.const_value = None
            value.type = value.type or ir.TensorType(ir.DataType.INT64)  # sizes have no dtype in some files
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            if value.dtype in dtypes:
                value.type = ir.TensorType(ir.DataType.FLOAT)  # a new object, because the whole file shares the old type
                value.const_value = None if value.const_value is None else to_float32(value.const_value)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in dtypes:
                    node.attributes[name] = ir.AttrTensor(name, to_float32(attribute.value))
                elif is_node(node, "Cast") and name == "to" and attribute.value in dtypes:
                    node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
        try:
            return open_session(part), dtypes
        except Exception as error:  # onnxruntime raises a dozen classes
            if dtypes is not HALVES or not is_missing_kernel(error):
                raise _DoesNotRun(error) from None
    raise AssertionError


def prove(file: LoadedFile, sampling: Sampling) -> Sampling:
    """Return the sampling with its `shapes` if the subgraph equals the operator within rounding; else raise Unfit."""
    nodes, shapes = _collect_part(sampling, file.defaults)
    sampling = replace(sampling, shapes=tuple(shapes))
    pairs = _sizes.choose_trials(sampling, [*(node for v in shapes if (node := v.producer()) is not None), *nodes])
    session = _open_session(file.model, sampling)
    for index, (bs, queries) in enumerate(pairs):
        samples = bs * queries * sampling.num_heads * min(sampling.points)
        for seed in range(3 * -(-_SAMPLES // samples) if index == 0 else 1):
            _compare(session, sampling, seed, _sizes.make_shapes(sampling, bs, queries))
    broadcasts = any(size in file.merged for tensor in sampling.ends for size in dims(tensor)[:2])
    # The operator does not broadcast sizes of 1. Most subgraphs fail at such sizes; the others must give the expanded result.
    for ones in () if broadcasts else _sizes.vary_ones(sampling):
        try:
            _compare(session, sampling, 0, ones)
        except _DoesNotRun:
            continue
        except Unfit as unfit:
            raise Unfit(f"with value, locations and weights of {', '.join(map(str, ones))} {unfit}") from None
        broadcasts = True
    return replace(sampling, broadcasts=broadcasts)


class _DoesNotRun(Unfit):
    def __init__(self, error: Exception) -> None:
        super().__init__(f"a trial in onnxruntime failed: {first_line(error)}")


def _compare(session: tuple[Any, set[ir.DataType]], sampling: Sampling, seed: int, shapes: _sizes.Shapes) -> None:
    """Raise Unfit unless the subgraph equals the operator on random inputs.

    An entry's error is relative to the sum of its absolute weights, because values are within 1. On large maps, the rounding
    of positions may hide a factor near 1 in each entry, but not in all.
    """
    running, narrow = session
    tensors = draw_inputs(sampling, seed, shapes)
    doubles = [end.dtype == ir.DataType.DOUBLE and end.dtype not in narrow for end in sampling.ends]
    inputs = tuple(t.double() if double else t.float() for t, double in zip(tensors, doubles, strict=True))
    names = _sizes.name_sizes(sampling, tuple(tuple(t.shape) for t in tensors))
    feeds = {str(end.name): t.numpy() for end, t in zip(sampling.ends, inputs, strict=True)}
    feeds |= {str(v.name): array for v in sampling.shapes if (array := _read_size(v, names)) is not None}
    required = {i.name for i in running.get_inputs()}
    try:
        (output,) = running.run(None, {name: array for name, array in feeds.items() if name in required})
    except Exception as error:  # onnxruntime raises a dozen classes
        raise _DoesNotRun(error) from None
    result = torch.from_numpy(output).double()
    dtype = max((t.dtype for t in inputs), key=lambda dtype: torch.finfo(dtype).eps)
    called = make_bare_inputs(sampling, tuple(t.double() for t in inputs))
    expected, scale = ops.multi_scale_deformable_attn(*called), called[-1].abs().sum((-1, -2))
    if result.shape != expected.shape:
        raise Unfit(f"it gives {tuple(result.shape)}; the operator gives {tuple(expected.shape)}")
    scale = scale.repeat_interleave(sampling.channels, 2) * max(1.0, largest_magnitude(called[0]))
    limit = scale * rounding_limit(dtype, dtype, 0.0, 1.0, 4 * sum(sampling.points), max(map(max, sampling.maps)))
    differences = entry_differences(result, expected)
    if not bool((differences <= limit).all()):
        fact = f"{float(differences.max()):.1e} from the operator in a trial, {float(limit.max()):.1e} is rounding"
        raise Unfit(f"it computes something else: {fact}")
    factor = find_factor(result, expected, limit, sampling.channels)
    if abs(factor - 1) > ULPS * torch.finfo(dtype).eps:
        raise Unfit(f"it computes something else: {factor:.6g} times the operator in a trial")


def find_factor(output: Tensor, truth: Tensor, limit: Tensor, channels: int) -> float:
    """Return the factor between output and truth; 1.0 if errors up to `limit` of random signs explain it.

    The channels of a head share positions and weights, so their errors may have one sign.
    """
    squares = float(truth.square().sum())
    factor = float((output * truth).sum()) / squares if squares else 1.0
    sums = (truth.abs() * limit).unflatten(2, (-1, channels)).sum(3)
    return factor if abs(factor - 1) * squares > float(sums.square().sum().sqrt()) else 1.0
