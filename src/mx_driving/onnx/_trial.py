"""Prove that a subgraph of an ONNX graph computes multi_scale_deformable_attn: run both on random inputs.

The subgraph is multilinear in value and weights, so agreement on random inputs means equality with probability 1. Only
locations may branch, by floors and clips. They are drawn on the maps, across every border and far away, to hit every branch.

A subgraph in 16 bits runs in float32, which is more exact and has all kernels in onnxruntime. A subgraph in float64 runs in
float32 only if onnxruntime lacks a float64 kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from .. import ops
from .._agreement import ULPS, entry_differences, largest_magnitude, rounding_limit
from .._operator.rules import first_line
from ._file import LoadedFile
from ._graph import HALVES, INTEGER, MOVES, PAIRS, Unfit, are_fixed, dims, is_node, read_attribute, read_constant, read_numbers
from ._runtimes import is_missing_kernel, open_session
from ._samples import Sampling, make_bare_inputs

_COMPUTE = {"GridSample", "Mul", "Add", "Sub", "Sum", "Neg", "ReduceSum", "Concat", "Constant", "ConstantOfShape"}
_SIZES = {"Shape", "Div", "Mod", "ReduceProd", "ConstantOfShape", "Range", "Size"}
# Node that is not linear in every input -> indices of the inputs that may depend on value and weights.
_BRANCHES = {
    **dict.fromkeys(("Expand", "Pad", "Div", "GatherElements", "GatherND"), (0,)),
    **dict.fromkeys(("Abs", "And", "Clip", "Equal", "Floor", "Greater", "GreaterOrEqual", "Less", "LessOrEqual"), ()),
    **dict.fromkeys(("Max", "Min", "Not", "Or"), ()),
    "Where": (1, 2),
}
Size = int | str | None
Shapes = tuple[tuple[int, ...], ...]  # the shapes of value, locations and weights

FEW = 2, 7  # batch and queries of a trial, if the file leaves them free
# (tensor, axis). Tensor 0 is value, 1 locations, 2 weights. Axis 0 is the batch, 1 the queries, which value lacks.
_AXES = (0, 0), (1, 0), (1, 1), (2, 0), (2, 1)
# The first trial has at most so many elements of value or of samples (0.25 GB in float32), later trials a quarter of them.
_ELEMENTS = 2**26
_ENDLESS = 2**31 - 1  # exporters write this number or more for "to the end"
_COMPARES = "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Div"
_SHAPED = MOVES | {"Expand", "Pad"}  # The first input of these nodes has the data. The others only pick, place or repeat it.
_QUANTISED = "quantise Conv, MatMul and Gemm alone, or exclude the nodes that `mx-driving fuse --json` names in the float file"
_FAILED = "a trial in onnxruntime failed: "
_SAMPLES = 500  # at least so many samples per level are tried, for each kind of locations


def _collect_part(sampling: Sampling, defaults: Collection[str]) -> tuple[list[ir.Node], list[ir.Value]]:
    """Return the nodes between the operator's inputs and output in order, and the outputs of Shape nodes that they read.

    Raise Unfit if the nodes read another tensor, are not linear in value and weights, or have dtypes that cannot be tried.
    `defaults`: the names of inputs with a default.
    """
    ends, names = {*sampling.ends}, name_sizes(sampling, make_shapes(sampling, *FEW))
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
    if pairs := [str(node.name) for node in part if is_node(node, "DequantizeLinear")]:
        between = f"{len(pairs)} pairs of QuantizeLinear and DequantizeLinear stand between its nodes, such as {pairs[0]}"
        raise Unfit(f"{between}; {_QUANTISED}")
    # The tensors that depend on elements of value, of weights or of maps. Constant maps do not depend on `value`.
    linear = {sampling.value, sampling.weights}
    linear |= {v for node in part if is_node(node, "GridSample") and (v := node.inputs[0]) is not None}
    for node in part:
        if not is_node(node, "Shape", "Size") and any(v in linear for v in node.inputs):
            linear.update(node.outputs)
    for node in reversed(part):
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
    return part, list(sizes)


def _read_size(shape_of: ir.Value, names: dict[str, int]) -> np.ndarray[Any, Any] | None:
    """Return the output of a Shape node, with free sizes taken from `names`; None if a size is missing."""
    node = shape_of.producer()
    assert node is not None
    assert node.inputs[0] is not None
    axes = slice(read_attribute(node, "start"), read_attribute(node, "end"))
    sizes = [names.get(d) if isinstance(d, str) else d for d in dims(node.inputs[0])[axes]]
    return np.array(sizes, np.int64) if sizes and None not in sizes else None


def draw_inputs(sampling: Sampling, seed: int, shapes: Shapes) -> tuple[Tensor, ...]:
    """Return value, locations and weights in the file's layout: constants of the file, or random numbers.

    The seed chooses one of three kinds of locations: on and around the maps, across their borders, or far away.
    """
    value, located, weights = broadcast(sampling, shapes)
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


class _DoesNotRun(Unfit):
    """Raised if onnxruntime refuses a trial."""


def _open_session(model: ir.Model, sampling: Sampling) -> tuple[Any, set[ir.DataType]]:
    """Return a session of the subgraph, and the dtypes that the session replaces by float32."""
    for dtypes in (HALVES, {*HALVES, ir.DataType.DOUBLE}):
        part = sampling.extract(model)
        graph = part.graph
        for value in graph.inputs:
            graph.initializers.pop(str(value.name), None)
            value.const_value = None
            value.type = value.type or ir.TensorType(ir.DataType.INT64)  # sizes have no dtype in some files
        for value in (*graph.inputs, *graph.initializers.values(), *(v for node in graph for v in node.outputs)):
            if value.dtype in dtypes:
                value.type = ir.TensorType(ir.DataType.FLOAT)  # a new object, because the whole file shares the old type
                if value.const_value is not None:
                    value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
        for node in graph:
            for name, attribute in list(node.attributes.items()):
                if attribute.type == ir.AttributeType.TENSOR and attribute.value.dtype in dtypes:
                    node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy().astype(np.float32)))
                elif is_node(node, "Cast") and name == "to" and attribute.value in dtypes:
                    node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)
        try:
            return open_session(part), dtypes
        except Exception as error:  # onnxruntime raises a dozen classes
            if dtypes is not HALVES or not is_missing_kernel(error):
                raise _DoesNotRun(_FAILED + first_line(error)) from None
    raise AssertionError


def prove(file: LoadedFile, sampling: Sampling) -> Sampling:
    """Return the sampling with its `shapes` if the subgraph equals the operator within rounding; else raise Unfit."""
    nodes, shapes = _collect_part(sampling, file.defaults)
    sampling = replace(sampling, shapes=tuple(shapes))
    pairs = choose_trials(sampling, [*(node for v in shapes if (node := v.producer()) is not None), *nodes])
    session = _open_session(file.model, sampling)
    for index, (bs, queries) in enumerate(pairs):
        samples = bs * queries * sampling.num_heads * min(sampling.points)
        for seed in range(3 * -(-_SAMPLES // samples) if index == 0 else 1):
            _compare(session, sampling, seed, make_shapes(sampling, bs, queries))
    broadcasts = any(size in file.merged for tensor in sampling.ends for size in dims(tensor)[:2])
    # The operator does not broadcast sizes of 1. Most subgraphs fail at such sizes; the others must give the same result as
    # the operator gives for expanded inputs.
    for ones in () if broadcasts else vary_ones(sampling):
        try:
            _compare(session, sampling, 0, ones)
        except _DoesNotRun:
            continue
        except Unfit as unfit:
            raise Unfit(f"with value, locations and weights of {', '.join(map(str, ones))} {unfit}") from None
        broadcasts = True
    return replace(sampling, broadcasts=broadcasts)


def _compare(session: tuple[Any, set[ir.DataType]], sampling: Sampling, seed: int, shapes: Shapes) -> None:
    """Raise Unfit unless the subgraph equals the operator on random inputs.

    An entry's error is relative to the sum of its absolute weights, because values are within 1. On large maps, the rounding
    of positions may hide a factor near 1 in single entries: so also check the factor of all entries together.
    """
    running, narrow = session
    tensors = draw_inputs(sampling, seed, shapes)
    doubles = [end.dtype == ir.DataType.DOUBLE and end.dtype not in narrow for end in sampling.ends]
    inputs = tuple(t.double() if double else t.float() for t, double in zip(tensors, doubles, strict=True))
    names = name_sizes(sampling, tuple(tuple(t.shape) for t in tensors))
    feeds = {str(end.name): t.numpy() for end, t in zip(sampling.ends, inputs, strict=True)}
    feeds |= {str(v.name): array for v in sampling.shapes if (array := _read_size(v, names)) is not None}
    required = {i.name for i in running.get_inputs()}
    try:
        (output,) = running.run(None, {name: array for name, array in feeds.items() if name in required})
    except Exception as error:  # onnxruntime raises a dozen classes
        raise _DoesNotRun(_FAILED + first_line(error)) from None
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
    # Errors within the limit and with random signs may cause a factor near 1. Channels of a head share positions and weights:
    # their errors may have one sign.
    squares = float(expected.square().sum())
    factor = float((result * expected).sum()) / squares if squares else 1.0
    sums = (expected.abs() * limit).unflatten(2, (-1, sampling.channels)).sum(3)
    is_chance = abs(factor - 1) * squares <= float(sums.square().sum().sqrt())
    if abs(factor - 1) > ULPS * torch.finfo(dtype).eps and not is_chance:
        raise Unfit(f"it computes something else: {factor:.6g} times the operator in a trial")


# The batch and the number of queries of a trial, if a file leaves them free.
#
# A graph specialised to at most 100 queries would pass a trial with 7. So also try a size above every number with which a node
# cuts, picks, pads or compares a free size. If such a size is too large for a trial, do not replace the attention.


def find_fixed(sampling: Sampling, axis: int) -> tuple[int | None, list[Size]]:
    """Return the size of axis 0 (batch) or 1 (queries), None if it is free, and the size of this axis in each tensor.

    A size of 1 in one tensor may be broadcast to the size in another.
    """
    seen = [dims(tensor)[axis] for tensor in sampling.ends[axis:]]
    numbers = sorted({size for size in seen if isinstance(size, int)})
    if len([size for size in numbers if size != 1]) > 1:
        raise Unfit(f"its tensors differ in {('batch', 'queries')[axis]}: {numbers}")
    return (numbers[-1] if numbers else None), seen


def make_shapes(sampling: Sampling, bs: int, queries: int, ones: Iterable[tuple[int, int]] = ()) -> Shapes:
    """Return shapes of value, locations and weights.

    Axes (tensor, axis) in `ones`, and axes that the file fixes to 1, have size 1.
    """
    ones = {*ones, *((i, axis) for i, axis in _AXES if dims(sampling.ends[i])[axis] == 1)}
    whole = broadcast(sampling, ((bs, queries),) * 3)
    return tuple(tuple(1 if (i, axis) in ones else size for axis, size in enumerate(shape)) for i, shape in enumerate(whole))


def broadcast(sampling: Sampling, shapes: Shapes) -> Shapes:
    """Return the shapes of value, locations and weights after the first two axes of these shapes are broadcast."""
    bs, queries = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes[1:])
    first = (bs, sampling.num_keys), (bs, queries), (bs, queries)
    return tuple((*sizes, *sampling.last_sizes(tensor)) for sizes, tensor in zip(first, sampling.ends, strict=True))


def name_sizes(sampling: Sampling, shapes: Shapes) -> dict[str, int]:
    """Return name -> number for names of batch and queries: the largest of the sizes with this name."""
    numbers: tuple[dict[str, int], dict[str, int]] = {}, {}
    for i, axis in _AXES:
        if isinstance(name := dims(sampling.ends[i])[axis], str):
            numbers[axis][name] = max(numbers[axis].get(name, 0), shapes[i][axis])
    if both := numbers[0].keys() & numbers[1].keys():
        raise Unfit(f"its batch and queries have one name, {min(both)}")
    return numbers[0] | numbers[1]


def vary_ones(sampling: Sampling) -> Iterator[Shapes]:
    """Yield shapes with size 1 on some free axes, except for axes that have one name in all tensors and so are equal."""
    numbers = [find_fixed(sampling, axis)[0] for axis in (0, 1)]
    bs, queries = (few if size in (None, 1) else size for size, few in zip(numbers, FEW, strict=True))
    groups: dict[Any, list[tuple[int, int]]] = {}
    for i, tensor in enumerate(sampling.ends):
        for axis, size in enumerate(dims(tensor)[: 1 if i == 0 else None]):
            others = {dims(other)[axis] for other in sampling.ends[axis:]} if axis < 2 else {None}
            if not isinstance(size, int) and others != {size or ""}:
                groups.setdefault(size or (i, axis), []).append((i, axis))
    for count in {0, min(1, len(groups)), len(groups)}:
        for chosen in itertools.combinations(groups.values(), count):
            sizes = make_shapes(sampling, bs, queries, itertools.chain(*chosen))
            if sizes != broadcast(sampling, sizes):
                yield sizes


def choose_trials(sampling: Sampling, nodes: Iterable[ir.Node]) -> list[tuple[int, int]]:
    """Return pairs (batch, queries). Most runs of the trial use the first pair. The nodes must be in topological order."""
    most = 0  # the largest number with which a node cuts or compares a free size, except for "to the end"
    free: set[ir.Value] = set()  # the values that are computed from free sizes
    for node in nodes:
        # The numbers with which the node cuts, picks or extends axes: (axis, number). None stands for all axes.
        axis, cuts = read_attribute(node, "axis", 0), []
        if is_node(node, "Slice"):
            tables = [read_numbers(node, index, name) for index, name in ((1, "starts"), (2, "ends"), (4, "steps"))]
            axes = read_numbers(node, 3, "axes") or [*range(max(map(len, tables)))] * (len(node.inputs) < 4)
            cuts = [pair for numbers in tables for pair in itertools.zip_longest(axes[: len(numbers)], numbers)]
        elif is_node(node, "Split"):
            cuts = [(axis, n) for n in (*read_numbers(node, 1, "split"), len(node.outputs))]
        elif is_node(node, "Gather"):
            indices = read_numbers(node, 1, "indices")
            cuts = [(axis, n) for n in (*indices, len(indices))]
        elif is_node(node, "Expand"):
            cuts = [(-index, n) for index, n in enumerate(reversed(read_numbers(node, 1, "shape")), 1)]
        elif is_node(node, "Pad", "GatherElements", "GatherND"):
            cuts = [(None, n) for n in read_numbers(node, 1, "pads")]
        numbers = []
        if node.inputs and (data := node.inputs[0]) is not None:
            sizes = dims(data)
            for axis, number in cuts:
                if axis is None:
                    is_fixed = data.shape is not None and are_fixed(sizes)
                else:
                    is_fixed = -len(sizes) <= axis < len(sizes) and isinstance(sizes[axis], int)
                numbers += [] if is_fixed else [number]
        if is_node(node, *_COMPARES) and any(v in free for v in node.inputs):
            numbers += [n for index in range(len(node.inputs)) for n in read_numbers(node, index)]
        most = max([most, *(abs(int(n)) for n in numbers if abs(n) < _ENDLESS)])
        inputs = node.inputs[:1] if is_node(node, *_SHAPED) else node.inputs
        if is_node(node, "Shape", "Size"):
            axes = slice(read_attribute(node, "start"), read_attribute(node, "end"))
            is_free = any(v is None or v.shape is None or not are_fixed(dims(v)[axes]) for v in inputs)
        else:
            is_free = any(v in free for v in inputs) and not is_node(node, "ConstantOfShape", "GridSample")
        free.update(node.outputs if is_free else ())
    choices = []
    for axis, few in enumerate(FEW):
        size, seen = find_fixed(sampling, axis)
        if size is None:
            choices.append((few, max(most, few) + 1 + 3 * axis))
        elif size <= most and not are_fixed(seen):
            raise Unfit(f"the file fixes its {('batch', 'queries')[axis]} in one tensor and not in another")
        else:
            choices.append((size,))
    batches, queries = choices
    sizes = list(dict.fromkeys([(batches[0], queries[0]), (batches[-1], queries[0]), (batches[0], queries[-1])]))
    for index, (bs, count) in enumerate(sizes):
        rows, most = max(sampling.num_keys, count * sum(sampling.points)), _ELEMENTS // 4 if index else _ELEMENTS
        if (elements := bs * rows * sampling.num_heads * sampling.channels) > most:
            raise Unfit(f"a trial of batch {bs} and {count} queries has {elements} elements; at most {most} are tried")
    return sizes
