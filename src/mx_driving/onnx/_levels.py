"""How samples of one level are computed: by GridSample, or by gathers and the arithmetic of bilinear interpolation.

Gathers stand in files for runtimes that lack GridSample or have a wrong one: four corners are gathered at floors of the
locations and weighted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ._graph import INTEGER, MOVES, Unfit, before, common, constant, dims, is_node, number, source, sources, sources_of_chosen

_GRID_SAMPLE = {"mode": ("linear", "bilinear"), "padding_mode": ("zeros",), "align_corners": (0,)}
_DEFAULTS = {"mode": "linear", "padding_mode": "zeros", "align_corners": 0}
_GATHERS = {"Gather", "GatherElements", "GatherND"}
_ARITHMETIC = {"Add", "Sub", "Mul", "Sum", "ReduceSum", "Cast", "CastLike", "Where", "Concat", "Expand"}
_INDEXING = {"Floor", "Clip", "Min", "Max", "Div", "Neg"}


@dataclass(frozen=True)
class Level:
    images: list[ir.Value]  # what is sampled, and what that is a view or a part of, the nearest first
    locations: list[ir.Value]  # what may be locations, the nearest first
    sizes: list[tuple[int, int]]  # what may be height and width of the map
    points: int


def parts(value: ir.Value) -> list[ir.Value]:
    """Return the samples of levels that lie side by side in value, in order; none if any part is something else."""
    samples = list(_side_by_side(value))
    return samples if all(is_node(source(v).producer(), "GridSample") or _gathers(v) for v in samples) else []


def are_nearest(value: ir.Value) -> bool:
    """Return whether the samples of all levels are rows at rounded locations."""
    return all(_gathers(part, _is_rounded) for part in _side_by_side(value))


def _side_by_side(value: ir.Value) -> Iterator[ir.Value]:
    node = source(value).producer()
    if node is None or not is_node(node, "Concat"):
        yield value
        return
    for part in node.inputs:
        if part is not None:
            yield from _side_by_side(part)


def read(part: ir.Value) -> Level:
    node = source(part).producer()
    if node is not None and is_node(node, "GridSample"):
        return _of_grid_sample(node)
    return _of_gathers(part, _gathers(part))


def _of_grid_sample(node: ir.Node) -> Level:
    _hold_to_rules(node)
    image, grid = node.inputs[:2]
    assert image is not None
    assert grid is not None
    sizes: Any = (*dims(image)[2:], _points(grid)) if len(dims(image)) == len(dims(grid)) == 4 else ()
    if len(sizes) != 3 or not all(isinstance(s, int) for s in sizes):
        raise Unfit("the file does not fix the size of a level or its points")
    height, width, points = sizes
    return Level(list(sources(image)), list(sources_of_chosen(_before_scaling(grid))), [(height, width)], points)


def _hold_to_rules(node: ir.Node) -> None:
    for name, allowed in _GRID_SAMPLE.items():
        attribute = node.attributes.get(name)
        chosen = _DEFAULTS[name] if attribute is None else attribute.value
        if chosen not in allowed:
            raise Unfit(f"GridSample's {name} is {chosen}; the operator's is {allowed[0]}")


def _points(grid: ir.Value) -> Any:
    """Return the third size of a grid, which a Split may know where the file's shapes do not."""
    node = grid.producer()
    if isinstance(dims(grid)[2], int) or node is None or not is_node(node, "Split") or len(node.inputs) < 2:
        return dims(grid)[2]
    lengths = constant(node.inputs[1])
    along_points = "axis" in node.attributes and node.attributes["axis"].value in (2, -2)
    return int(lengths[node.outputs.index(grid)]) if along_points and lengths is not None else None


def _beside(node: ir.Node, what: float, locations: tuple[int, ...]) -> ir.Value | None:
    """Return the other input of a node of which one input is this number."""
    return next((node.inputs[1 - p] for p in locations if number(node.inputs[p]) == what), None)


def _before_scaling(grid: ir.Value) -> ir.Value:
    """Return x, where grid is 2 * x - 1."""
    node = source(grid).producer()
    doubled = None
    if node is not None and is_node(node, "Sub"):
        doubled = _beside(node, 1.0, (1,))
    elif node is not None and is_node(node, "Add"):
        doubled = _beside(node, -1.0, (0, 1))
    factor = None if doubled is None else source(doubled).producer()
    x = _beside(factor, 2.0, (0, 1)) if factor is not None and is_node(factor, "Mul") else None
    if x is None:
        raise Unfit("its grid is not 2 * locations - 1")
    return x


def _gathers(value: ir.Value, chosen: Callable[[ir.Value], bool] | None = None) -> list[ir.Node]:
    """Return gathers at floored or at chosen indices, whose rows are weighted and summed up in value."""
    sampled = before(value, lambda node: not _index(node) and is_node(node, *MOVES, *_ARITHMETIC))
    nodes = dict.fromkeys(v.producer() for v in sampled if v.dtype not in INTEGER)
    return [node for node in nodes if node is not None and (index := _index(node)) and (chosen or _is_floored)(index)]


def _index(node: ir.Node) -> ir.Value | None:
    """Return the index of a gather, unless the index is a constant."""
    chosen = is_node(node, *_GATHERS) and constant(node.inputs[1]) is None
    return node.inputs[1] if chosen else None


def indices_of_rows(index: ir.Value) -> Iterator[ir.Value]:
    return before(index, lambda node: is_node(node, *MOVES, *_ARITHMETIC, *_INDEXING))


def _is_floored(index: ir.Value) -> bool:
    return any(is_node(v.producer(), "Floor") for v in indices_of_rows(index))


def _is_rounded(index: ir.Value) -> bool:
    """Return whether the index is cast to integers without a Floor."""
    casts = [v.producer() for v in indices_of_rows(index) if is_node(v.producer(), "Cast") and v.dtype in INTEGER]
    inputs = [node.inputs[0] for node in casts if node is not None]
    return any(v is not None and v.dtype not in INTEGER for v in inputs) and not _is_floored(index)


def _maps(images: list[ir.Value], indices: list[ir.Value]) -> list[tuple[int, int]]:
    """Return possible heights and widths: two axes, or one axis of rows, whose width a row's number is multiplied by."""
    axes: Any = [two for v in images if len(dims(v)) == 4 for two in (dims(v)[2:], dims(v)[1:3])]
    areas = {size for v in images if len(dims(v)) == 3 for size in dims(v)[1:] if isinstance(size, int)}
    widths = {int(n) for index in indices for v in indices_of_rows(index) for n in _factors(v) if n > 0}
    axes += [(area // width, width) for area in sorted(areas) for width in sorted(widths) if area % width == 0]
    return list(dict.fromkeys(two for two in axes if all(isinstance(size, int) for size in two)))


def _factors(value: ir.Value) -> list[float]:
    """Return the numbers that an integer is multiplied by."""
    node = value.producer()
    if node is None or not is_node(node, "Mul") or value.dtype not in INTEGER:
        return []
    return [n for v in node.inputs if (n := number(v)) is not None]


def _of_gathers(part: ir.Value, nodes: list[ir.Node]) -> Level:
    images = common(sources(node.inputs[0], "Pad", "Cast") for node in nodes if node.inputs[0] is not None)
    locations = common(indices_of_rows(index) for node in nodes if (index := _index(node)) is not None)
    sizes = _maps(images, [index for node in nodes if (index := _index(node)) is not None])
    grids = [dims(v)[-2] for v in locations if len(dims(v)) >= 4 and dims(v)[-1] == 2]
    points = next((n for n in (*dims(part)[-1:], *grids) if isinstance(n, int)), None)
    if not sizes or not isinstance(points, int):
        raise Unfit("the file does not fix the size of a level or its points")
    return Level(images, locations, sizes, points)
