"""Choose the batch and the number of queries for a trial, if a file leaves them free.

A graph specialised to at most 100 queries would pass a trial with 7. So also try a size above every number with which a
node cuts, picks, pads or compares a free size. If such a size is too large for a trial, do not replace the attention.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir

from ._graph import MOVES, Unfit, are_fixed, dims, is_node, read_attribute, read_constant, walk_sources
from ._search import Sampling

Size = int | str | None
Shapes = tuple[tuple[int, ...], ...]  # the shapes of value, locations and weights

FEW = 2, 7  # batch and queries of a trial, if the file leaves them free
# (tensor, axis). Tensor 0 is value, 1 locations, 2 weights. Axis 0 is the batch, 1 the queries, which value lacks.
_AXES = (0, 0), (1, 0), (1, 1), (2, 0), (2, 1)
# At most so many elements of value or of samples in the first trial (0.25 GB in float32); a quarter of this in later trials.
_ELEMENTS = 2**26
_ENDLESS = 2**31 - 1  # exporters write this number or more for "to the end"
_COMPARES = "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Div"
_SHAPED = MOVES | {"Expand", "Pad"}  # The first input of these nodes has the data. The others decide only the output's shape.


def find_fixed(sampling: Sampling, axis: int) -> tuple[int | None, list[Size]]:
    """Return the size of the axis batch (0) or queries (1), None if it is free, and the sizes that the tensors have there.

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
    whole = _make_whole(sampling, bs, queries)
    return tuple(tuple(1 if (i, axis) in ones else size for axis, size in enumerate(shape)) for i, shape in enumerate(whole))


def broadcast(sampling: Sampling, shapes: Shapes) -> Shapes:
    """Return the shapes after broadcasting."""
    return _make_whole(sampling, max(shape[0] for shape in shapes), max(shape[1] for shape in shapes[1:]))


def _make_whole(sampling: Sampling, bs: int, queries: int) -> Shapes:
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
    """Return pairs (batch, queries). Most runs of the trial use the first pair."""
    most = max(_list_numbers(list(nodes)), default=0)
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


def _list_numbers(nodes: list[ir.Node]) -> Iterator[int]:
    """Yield the numbers with which nodes cut or compare a free size, except for "to the end".

    The nodes must be in topological order.
    """
    free: set[ir.Value] = set()  # the values that are computed from free sizes
    for node in nodes:
        data = node.inputs[0] if node.inputs else None
        numbers = []
        if data is not None:
            sizes = dims(data)
            for axis, number in _list_cuts(node):
                if axis is None:  # all axes
                    is_fixed = data.shape is not None and are_fixed(sizes)
                else:
                    is_fixed = -len(sizes) <= axis < len(sizes) and isinstance(sizes[axis], int)
                numbers += [] if is_fixed else [number]
        if is_node(node, *_COMPARES) and any(v in free for v in node.inputs):
            numbers += [n for v in node.inputs for n in _read_table(v)]
        yield from (abs(int(n)) for n in numbers if abs(n) < _ENDLESS)
        inputs = node.inputs[:1] if is_node(node, *_SHAPED) else node.inputs
        if is_node(node, "Shape", "Size"):
            axes = slice(read_attribute(node, "start"), read_attribute(node, "end"))
            is_free = any(v is None or v.shape is None or not are_fixed(dims(v)[axes]) for v in inputs)
        else:
            is_free = any(v in free for v in inputs) and not is_node(node, "ConstantOfShape", "GridSample")
        free.update(node.outputs if is_free else ())


def _read_table(value: ir.Value | None) -> list[Any]:
    """Return the numbers of a constant, or of a view of a constant."""
    array = next((a for v in walk_sources(value, *MOVES) if (a := read_constant(v)) is not None), None)
    return [] if array is None else array.reshape(-1).tolist()


def _list_cuts(node: ir.Node) -> list[tuple[int | None, Any]]:
    """Return (axis, number) for the numbers with which the node cuts, picks or extends axes. None is an unknown axis."""

    def read(index: int, name: str) -> list[Any]:
        """Return the numbers of an input, or of an attribute in older opsets."""
        return list(read_attribute(node, name, ())) or (_read_table(node.inputs[index]) if index < len(node.inputs) else [])

    axis = read_attribute(node, "axis", 0)
    if is_node(node, "Slice"):
        tables = [read(index, name) for index, name in ((1, "starts"), (2, "ends"), (4, "steps"))]
        axes = read(3, "axes") or [*range(max(map(len, tables)))] * (len(node.inputs) < 4)
        return [pair for numbers in tables for pair in itertools.zip_longest(axes[: len(numbers)], numbers)]
    if is_node(node, "Split"):
        return [(axis, n) for n in (*read(1, "split"), len(node.outputs))]
    if is_node(node, "Gather"):
        indices = read(1, "indices")
        return [(axis, n) for n in (*indices, len(indices))]
    if is_node(node, "Expand"):
        return [(-index, n) for index, n in enumerate(reversed(read(1, "shape")), 1)]
    return [(None, n) for n in read(1, "pads")] if is_node(node, "Pad", "GatherElements", "GatherND") else []
