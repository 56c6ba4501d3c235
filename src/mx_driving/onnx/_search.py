"""Where an ONNX graph samples deformably: GridSample per level, weighted and summed up.

Writings differ in how they move values about (Reshape, Transpose, Split, Gather ...), so nothing here asks for one order of
nodes. It walks from a sum back to the tensors that the operator would take. `_trial.py` then computes both.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

MOVES = {"Reshape", "Transpose", "Slice", "Split", "Gather", "Squeeze", "Unsqueeze", "Identity", "Flatten"}
_GRID_SAMPLE = {"mode": ("linear", "bilinear"), "padding_mode": ("zeros",), "align_corners": (0,)}
_DEFAULTS = {"mode": "linear", "padding_mode": "zeros", "align_corners": 0}


class Unfit(Exception):
    """Why samples stay as they are: a clause that a report shows."""


@dataclass(frozen=True)
class Sampling:
    """The operator's inputs and output in a graph, and its sizes."""

    value: ir.Value  # [bs, num_keys, num_heads, channels], or the last two in one axis
    locations: ir.Value  # [bs, num_queries, num_heads, num_levels, num_points, 2], or levels and points in one axis
    weights: ir.Value  # the same without the last axis
    output: ir.Value  # [bs, num_queries, num_heads * channels]
    maps: tuple[tuple[int, int], ...]
    points: tuple[int, ...]  # of each level
    num_heads: int
    channels: int

    def sizes(self, tensor: ir.Value) -> tuple[int, ...]:
        """The sizes of locations or weights behind batch and queries, as this file has them."""
        last = (2,) if tensor is self.locations else ()
        split = len(dims(tensor)) - len(last) == 5
        return (self.num_heads, *((len(self.points), self.points[0]) if split else (sum(self.points),)), *last)

    @property
    def num_keys(self) -> int:
        return sum(height * width for height, width in self.maps)


def dims(value: ir.Value) -> tuple[int | str | None, ...]:
    """Sizes: numbers, names, or None where the file says nothing."""
    if value.shape is None:
        return ()
    return tuple(d if isinstance(d, int) else d.value for d in value.shape)


def is_node(node: ir.Node | None, *kinds: str) -> bool:
    return node is not None and node.domain in ("", "ai.onnx") and node.op_type in kinds


def _sources(value: ir.Value) -> Iterator[ir.Value]:
    """The value, and what it is a part or another view of, up to the first node that computes."""
    yield value
    while is_node(node := value.producer(), *MOVES):
        assert node is not None
        if node.inputs[0] is None:
            return
        value = node.inputs[0]
        yield value


def _source(value: ir.Value) -> ir.Value:
    *_, last = _sources(value)
    return last


def _common(values: Iterable[ir.Value]) -> list[ir.Value]:
    """What all are parts or views of, the nearest first."""
    first, *others = (list(_sources(v)) for v in values)
    return [v for v in first if all(v in chain for chain in others)]


def _grid_samples(value: ir.Value) -> list[ir.Node]:
    """The GridSample nodes whose outputs lie side by side in value, in their order."""
    node = _source(value).producer()
    if node is not None and is_node(node, "GridSample"):
        return [node]
    if node is None or not is_node(node, "Concat"):
        return []
    parts = [_grid_samples(part) for part in node.inputs if part is not None]
    return list(itertools.chain(*parts)) if all(parts) else []


def _weighted(node: ir.Node) -> tuple[list[ir.Node], ir.Value] | None:
    """The GridSample nodes of a ReduceSum of a product, and the other factor."""
    product = node.inputs[0].producer() if node.inputs and node.inputs[0] is not None else None
    if product is None or not is_node(product, "Mul"):
        return None
    left, right = product.inputs
    for samples, weights in ((left, right), (right, left)):
        if samples is not None and weights is not None and (nodes := _grid_samples(samples)):
            return nodes, weights
    return None


def sums(graph: ir.Graph) -> dict[ir.Node, tuple[list[ir.Node], ir.Value]]:
    """Each ReduceSum over weighted samples, with its GridSample nodes in the order of levels and its weights."""
    found = {node: _weighted(node) for node in graph if is_node(node, "ReduceSum")}
    return {node: parts for node, parts in found.items() if parts is not None}


def _number(value: ir.Value | None) -> float | None:
    tensor = None if value is None else ir.convenience.get_const_tensor(value)
    array = None if tensor is None else np.asarray(tensor.numpy())
    return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None


def _beside(node: ir.Node, number: float, places: tuple[int, ...]) -> ir.Value | None:
    """The other input of a node one of whose two inputs is this number."""
    return next((node.inputs[1 - p] for p in places if _number(node.inputs[p]) == number), None)


def _before_scaling(grid: ir.Value) -> ir.Value:
    """x, where grid is 2 * x - 1."""
    node = _source(grid).producer()
    doubled = None
    if node is not None and is_node(node, "Sub"):
        doubled = _beside(node, 1.0, (1,))
    elif node is not None and is_node(node, "Add"):
        doubled = _beside(node, -1.0, (0, 1))
    factor = None if doubled is None else _source(doubled).producer()
    x = _beside(factor, 2.0, (0, 1)) if factor is not None and is_node(factor, "Mul") else None
    if x is None:
        raise Unfit("its grid is not 2 * locations - 1")
    return x


def _hold_to_rules(node: ir.Node) -> None:
    for name, allowed in _GRID_SAMPLE.items():
        attribute = node.attributes.get(name)
        chosen = _DEFAULTS[name] if attribute is None else attribute.value
        if chosen not in allowed:
            raise Unfit(f"GridSample's {name} is {chosen}; the operator's is {allowed[0]}")


def _points(grid: ir.Value | None) -> Any:
    """The third size of a grid, which a Split may know where the file's shapes do not."""
    assert grid is not None
    node = grid.producer()
    if isinstance(dims(grid)[2], int) or node is None or not is_node(node, "Split") or len(node.inputs) < 2:
        return dims(grid)[2]
    parts = None if node.inputs[1] is None else ir.convenience.get_const_tensor(node.inputs[1])
    along_points = "axis" in node.attributes and node.attributes["axis"].value in (2, -2)
    return int(parts.numpy()[node.outputs.index(grid)]) if along_points and parts is not None else None


def _sizes(node: ir.Node) -> tuple[tuple[int, int], int]:
    """(height, width), points"""
    image, grid = (dims(v) if v is not None else () for v in node.inputs[:2])
    sizes: Any = (*image[2:], _points(node.inputs[1])) if len(image) == len(grid) == 4 else ()
    if len(sizes) != 3 or not all(isinstance(s, int) for s in sizes):
        raise Unfit("the file does not fix the size of a level or its points")
    height, width, points = sizes
    return (height, width), points


def _ends(value: ir.Value, *last: tuple[int, ...]) -> bool:
    """Whether the value has two axes and then one of these. A size that the file does not fix may be any."""
    return any(len(dims(value)) == 2 + len(sizes) and all(map(_may_be, dims(value)[2:], sizes)) for sizes in last)


def _may_be(size: int | str | None, number: int) -> bool:
    return size == number or not isinstance(size, int)


def _heads(locations: list[ir.Value], points: tuple[int, ...]) -> set[int]:
    ends = (sum(points), 2), (len(points), points[0], 2)
    return {h for v in locations for h in dims(v)[2:3] if isinstance(h, int) and _ends(v, *((h, *end) for end in ends))}


def _width(value: ir.Value, keys: int, heads: int) -> int:
    """Channels of all heads of a tensor that has value's shape; 0 for another one."""
    sizes = dims(value)
    fits = (len(sizes) == 4 and sizes[2] == heads) or len(sizes) == 3
    if not fits or sizes[1] != keys or not all(isinstance(s, int) for s in sizes[2:]):
        return 0
    width = math.prod(s for s in sizes[2:] if isinstance(s, int))
    return width if width % heads == 0 else 0


def _outputs(node: ir.Node, width: int) -> Iterator[ir.Value]:
    """The sum and its other views with three axes, as long as nothing else reads what lies between."""
    value = node.outputs[0]
    while True:
        if len(shape := dims(value)) == 3 and shape[2] == width:
            yield value
        users = list(value.uses())
        if len(users) != 1 or value.is_graph_output() or users[0].idx or not is_node(users[0].node, *MOVES):
            return
        if len(users[0].node.outputs) != 1:
            return
        value = users[0].node.outputs[0]


def candidates(node: ir.Node, levels: list[ir.Node], weights: ir.Value) -> Iterator[Sampling]:
    """What the sum may be, going by shapes. More than one, where two sizes are equal; none is certain before a trial."""
    for level in levels:
        _hold_to_rules(level)
    maps, points = zip(*(_sizes(level) for level in levels), strict=True)
    values = _common(level.inputs[0] for level in levels if level.inputs[0] is not None)
    locations = _common(_before_scaling(level.inputs[1]) for level in levels if level.inputs[1] is not None)
    for heads in _heads(locations, points):
        yield from _with_heads(node, (values, locations, list(_sources(weights))), heads, maps, points)


def _with_heads(
    node: ir.Node, sources: tuple[list[ir.Value], ...], heads: int, maps: Any, points: tuple[int, ...]
) -> Iterator[Sampling]:
    keys = sum(height * width for height, width in maps)
    samples = [(heads, sum(points))] + [(heads, len(points), points[0])] * (len(set(points)) == 1)
    values = {v: width // heads for v in sources[0] if (width := _width(v, keys, heads))}
    locations = [v for v in sources[1] if _ends(v, *((*s, 2) for s in samples))]
    weights = [v for v in sources[2] if _ends(v, *samples)]
    for (value, channels), place, weight in itertools.product(values.items(), locations, weights):
        for output in _outputs(node, heads * channels):
            yield Sampling(value, place, weight, output, maps, points, heads, channels)
