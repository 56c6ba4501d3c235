"""Sizes of batch and queries in a trial, if a file leaves them free.

A graph specialised to at most 100 queries would pass a trial with 7. So also try a size above every number with which a node of
the part cuts, picks, pads or compares a free size. If that is too many for a trial, the attention stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import onnx_ir as ir

from ._graph import MOVES, Unfit, constant, dims, is_node, sources
from ._search import Sampling

Size = int | str | None
Shapes = tuple[tuple[int, ...], ...]  # of value, locations and weights

FEW = 2, 7  # batch and queries
_AXES = (0, 0), (1, 0), (1, 1), (2, 0), (2, 1)  # tensors, and their axes of batch (0) and queries (1)
_ELEMENTS = 2**26  # of value or of samples in a trial: 0.25 GB in float32; a quarter of that where it is only for its sizes
_ENDLESS = 2**31 - 1  # "to the end", in 32 bits or in 64
_COMPARES = "Clip", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Min", "Mod", "Div"
_SHAPED = MOVES | {"Expand", "Pad"}  # their other inputs decide about the shape alone


def fixed(sampling: Sampling, axis: int) -> tuple[int | None, list[Size]]:
    """Return the size of batch (0) or queries (1) if the file fixes it, and the size that it says of each tensor.

    A size of 1 in one tensor may stand for any size in another.
    """
    seen = [dims(tensor)[axis] for tensor in sampling.ends[axis:]]
    numbers = sorted({size for size in seen if isinstance(size, int)})
    if len([size for size in numbers if size != 1]) > 1:
        raise Unfit(f"its tensors differ in {('batch', 'queries')[axis]}: {numbers}")
    return (numbers[-1] if numbers else None), seen


def shapes(sampling: Sampling, bs: int, queries: int, ones: Iterable[tuple[int, int]] = ()) -> Shapes:
    """Return shapes of value, locations and weights.

    Axes (tensor, axis) of `ones` have size 1, as axes that the file fixes to 1.
    """
    ones = {*ones, *((i, axis) for i, axis in _AXES if dims(sampling.ends[i])[axis] == 1)}
    whole = _whole(sampling, bs, queries)
    return tuple(tuple(1 if (i, axis) in ones else size for axis, size in enumerate(shape)) for i, shape in enumerate(whole))


def equal(sampling: Sampling, shapes: Shapes) -> Shapes:
    """Return the shapes after broadcasting."""
    return _whole(sampling, max(shape[0] for shape in shapes), max(shape[1] for shape in shapes[1:]))


def _whole(sampling: Sampling, bs: int, queries: int) -> Shapes:
    first = (bs, sampling.num_keys), (bs, queries), (bs, queries)
    return tuple((*sizes, *sampling.sizes(tensor)) for sizes, tensor in zip(first, sampling.ends, strict=True))


def names(sampling: Sampling, shapes: Shapes) -> dict[str, int]:
    """Return the numbers that names of batch and queries stand for; of sizes with one name, the largest."""
    numbers: tuple[dict[str, int], dict[str, int]] = {}, {}
    for i, axis in _AXES:
        if isinstance(name := dims(sampling.ends[i])[axis], str):
            numbers[axis][name] = max(numbers[axis].get(name, 0), shapes[i][axis])
    if both := numbers[0].keys() & numbers[1].keys():
        raise Unfit(f"its batch and queries have one name, {min(both)}")
    return numbers[0] | numbers[1]


def broadcasts(sampling: Sampling) -> Iterator[Shapes]:
    """Yield shapes with sizes of 1 on some axes, where the file does not say that these axes have equal sizes."""
    numbers = [fixed(sampling, axis)[0] for axis in (0, 1)]
    bs, queries = (few if size in (None, 1) else size for size, few in zip(numbers, FEW, strict=True))
    groups: dict[Any, list[tuple[int, int]]] = {}
    for i, tensor in enumerate(sampling.ends):
        for axis, size in enumerate(dims(tensor)[: 1 if i == 0 else None]):
            others = {dims(other)[axis] for other in sampling.ends[axis:]} if axis < 2 else {None}
            if not isinstance(size, int) and others != {size or ""}:
                groups.setdefault(size or (i, axis), []).append((i, axis))
    for count in {0, min(1, len(groups)), len(groups)}:
        for chosen in itertools.combinations(groups.values(), count):
            sizes = shapes(sampling, bs, queries, itertools.chain(*chosen))
            if sizes != equal(sampling, sizes):
                yield sizes


def trials(sampling: Sampling, nodes: Iterable[ir.Node]) -> list[tuple[int, int]]:
    """Return pairs (batch, queries), the first for most of the trial."""
    most = max(_numbers(list(nodes)), default=0)
    choices = []
    for axis, few in enumerate(FEW):
        size, seen = fixed(sampling, axis)
        if size is None:
            choices.append((few, max(most, few) + 1 + 3 * axis))
        elif size <= most and not all(isinstance(one, int) for one in seen):
            raise Unfit(f"the file fixes its {('batch', 'queries')[axis]} in one tensor and not in another")
        else:
            choices.append((size,))
    batches, queries = choices
    sizes = list(dict.fromkeys([(batches[0], queries[0]), (batches[-1], queries[0]), (batches[0], queries[-1])]))
    for index, (bs, count) in enumerate(sizes):
        _afford(sampling, bs, count, _ELEMENTS // 4 if index else _ELEMENTS)
    return sizes


def _afford(sampling: Sampling, bs: int, queries: int, most: int) -> None:
    rows = max(sampling.num_keys, queries * sum(sampling.points))
    elements = bs * rows * sampling.num_heads * sampling.channels
    if elements > most:
        raise Unfit(f"a trial of batch {bs} and {queries} queries has {elements} elements; at most {most} are tried")


def _numbers(nodes: list[ir.Node]) -> Iterator[int]:
    """Yield the numbers that a free size meets in the nodes, except ends that mean "to the end"."""
    free = _free(nodes)
    for node in nodes:
        numbers = _picked(node)
        if is_node(node, *_COMPARES) and any(v in free for v in node.inputs):
            numbers = itertools.chain(numbers, (n for v in node.inputs for n in _table(v)))
        yield from (abs(int(n)) for n in numbers if abs(n) < _ENDLESS)


def _table(value: ir.Value | None) -> list[Any]:
    """Return the numbers of a constant, or of a view of a constant."""
    array = next((a for v in sources(value) if (a := constant(v)) is not None), None) if value is not None else None
    return [] if array is None else array.reshape(-1).tolist()


def _attribute(node: ir.Node, name: str, default: Any = None) -> Any:
    return node.attributes[name].value if name in node.attributes else default


def _picked(node: ir.Node) -> Iterator[int]:
    """Yield the numbers with which the node cuts or extends axes that the file leaves free."""
    data = node.inputs[0] if node.inputs else None
    kinds = {"Slice": _of_slice, "Split": _of_split, "Gather": _of_gather, "Pad": _of_pad, "Expand": _of_expand}
    if data is not None and is_node(node, *kinds):
        yield from (n for axis, n in kinds[node.op_type](node) if not _is_fixed(data, axis))
    elif data is not None and is_node(node, "GatherElements", "GatherND") and not all(isinstance(d, int) for d in dims(data)):
        yield from _table(node.inputs[1])


def _is_fixed(data: ir.Value, axis: int | None) -> bool:
    sizes = dims(data)
    if axis is None or not -len(sizes) <= axis < len(sizes):
        return False
    return isinstance(sizes[axis], int)


def _input_or_attribute(node: ir.Node, index: int, name: str) -> list[Any]:
    """Return an input, which was an attribute in older opsets."""
    return list(_attribute(node, name, ())) or (_table(node.inputs[index]) if index < len(node.inputs) else [])


def _of_slice(node: ir.Node) -> Iterator[tuple[int | None, int]]:
    parts = [
        _input_or_attribute(node, 1, "starts"),
        _input_or_attribute(node, 2, "ends"),
        _input_or_attribute(node, 4, "steps"),
    ]
    axes = _input_or_attribute(node, 3, "axes")
    if not axes and len(node.inputs) < 4:
        axes = list(range(max(map(len, parts))))
    for numbers in parts:
        yield from itertools.zip_longest(axes[: len(numbers)], numbers)


def _of_split(node: ir.Node) -> Iterator[tuple[int | None, int]]:
    yield from ((_attribute(node, "axis", 0), n) for n in (*_input_or_attribute(node, 1, "split"), len(node.outputs)))


def _of_gather(node: ir.Node) -> Iterator[tuple[int | None, int]]:
    indices = _table(node.inputs[1])
    yield from ((_attribute(node, "axis", 0), n) for n in (*indices, len(indices)))


def _of_pad(node: ir.Node) -> Iterator[tuple[int | None, int]]:
    pads, axes = _input_or_attribute(node, 1, "pads"), _input_or_attribute(node, 3, "axes")
    axes = axes or list(range(len(pads) // 2)) or [None]
    yield from ((axes[index % len(axes)], n) for index, n in enumerate(pads))


def _of_expand(node: ir.Node) -> Iterator[tuple[int | None, int]]:
    yield from ((-index, n) for index, n in enumerate(reversed(_table(node.inputs[1])), 1))


def _free(nodes: list[ir.Node]) -> set[ir.Value]:
    """Return the values that are computed from sizes that the file leaves free. The nodes must be in topological order."""
    free: set[ir.Value] = set()
    for node in nodes:
        if _is_free(node, free):
            free.update(node.outputs)
    return free


def _is_free(node: ir.Node, free: set[ir.Value]) -> bool:
    data = node.inputs[0] if node.inputs else None
    if is_node(node, "Shape", "Size"):
        return data is not None and not all(isinstance(size, int) for size in _measured(node, data))
    if data in free and is_node(node, "Gather") and data is not None and is_node(shape := data.producer(), "Shape"):
        assert shape is not None
        assert shape.inputs[0] is not None
        sizes, indices = _measured(shape, shape.inputs[0]), _table(node.inputs[1])
        return not indices or not all(-len(sizes) <= p < len(sizes) and isinstance(sizes[p], int) for p in indices)
    inputs = node.inputs[:1] if is_node(node, *_SHAPED) else node.inputs
    return any(v in free for v in inputs) and not is_node(node, "ConstantOfShape", "GridSample")


def _measured(node: ir.Node, data: ir.Value) -> tuple[Size, ...]:
    """Return the sizes that a Shape node gives; one unknown size if the rank is unknown."""
    return dims(data)[_attribute(node, "start") : _attribute(node, "end")] if data.shape is not None else (None,)
