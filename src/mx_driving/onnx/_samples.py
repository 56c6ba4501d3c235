"""Read how a file computes samples: with GridSample, or with gathers and the arithmetic of bilinear interpolation.

Files for runtimes without a correct GridSample gather the four pixels around a location, its corners, and weight them. They
gather from the map of each level, or from one table with the maps of all levels. torch's default export and `fuse` write a
table, and four sums over all samples: a sum for each corner. The index of a row is computed from
floor(location * size - 0.5), where the sizes of the maps are a constant.

`_find.py` makes a `Sampling` of such samples and their weights: the operator's inputs, output and sizes in a graph.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from ._forms import make_tables
from ._graph import (
    INTEGER,
    MOVES,
    PAIRS,
    VIEWS,
    Unfit,
    are_fixed,
    dims,
    extract,
    find_producer,
    intersect,
    is_node,
    read_attribute,
    read_constant,
    read_number,
    walk_back,
    walk_chosen_sources,
    walk_sources,
)

# Attribute of GridSample -> allowed values, the default first.
_GRID_SAMPLE = {"mode": ("linear", "bilinear"), "padding_mode": ("zeros",), "align_corners": (0,)}
_GATHERS = {"Gather", "GatherElements", "GatherND"}
_ARITHMETIC = {"Add", "Sub", "Mul", "Sum", "ReduceSum", "Cast", "CastLike", "Where", "Concat", "Expand"}
_INDEXING = {"Floor", "Clip", "Min", "Max", "Div", "Neg"}
_UNKNOWN = "the file does not fix the size of a level or its points"
Maps = tuple[tuple[int, int], ...]
Pairs = list[tuple[ir.Value, ir.Value]]  # samples and their weights


@dataclass(frozen=True)
class Sampling:
    """The operator's inputs, output and sizes in a graph. An input outside the graph is a constant."""

    value: ir.Value  # [bs, num_keys, num_heads, channels], or the last two in one axis
    locations: ir.Value  # [bs, num_queries, num_heads, num_levels, num_points, 2], or levels and points in one axis
    weights: ir.Value  # the axes of locations except the last
    output: ir.Value  # [bs, num_queries, num_heads * channels]
    maps: Maps
    points: tuple[int, ...]  # points of each level
    num_heads: int
    channels: int
    dtype: ir.DataType | None  # the dtype of the sum
    broadcasts: bool = False  # a size of 1 in an input may be broadcast to the size in another
    # Set after the trial:
    shapes: tuple[ir.Value, ...] = ()  # outputs of Shape nodes that the nodes between inputs and output read
    nodes: tuple[str, ...] = ()  # names of the nodes between inputs and output
    part: ir.Model | None = None  # a copy of these nodes, except for those that change nothing

    @property
    def ends(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        return self.value, self.locations, self.weights

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """Return role -> value of the graph, without the roles that a constant outside the graph has."""
        ends = zip(("value", "locations", "weights"), self.ends, strict=True)
        return {role: end for role, end in ends if end.graph is not None or end.const_value is None}

    def extract(self, model: ir.Model) -> ir.Model:
        """Return a copy of the nodes between inputs and output."""
        return extract(model, [*self.inputs.values(), *self.shapes], self.output)

    def last_sizes(self, tensor: ir.Value) -> tuple[int, ...]:
        """Return the sizes of the axes after keys (value) or after queries (locations, weights), as in this file."""
        if tensor is self.value:
            split = len(dims(tensor)) == 4
            return (self.num_heads, self.channels) if split else (self.num_heads * self.channels,)
        last = (2,) if tensor is self.locations else ()
        split = len(dims(tensor)) - len(last) == 5
        return (self.num_heads, *((len(self.points), self.points[0]) if split else (sum(self.points),)), *last)

    @property
    def words(self) -> str:
        maps = ", ".join(f"{height} x {width}" for height, width in self.maps)
        points = " + ".join(map(str, self.points)) if len(set(self.points)) > 1 else str(self.points[0])
        return f"{self.num_heads} heads of {self.channels} channels, {points} points on maps of {maps}"

    @property
    def num_keys(self) -> int:
        return sum(height * width for height, width in self.maps)


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


@dataclass(frozen=True)
class Candidates:
    """Candidates for the operator's inputs. They are read from the samples of one level, or of all levels in one table."""

    images: list[ir.Value]  # candidates for value: the sampled tensor and its sources, the nearest first
    locations: list[ir.Value]  # candidates for locations, the nearest first
    maps: list[Maps]  # candidates for the (height, width) of the level, or of all levels in the table
    points: int  # number of points per map


def split_levels(value: ir.Value) -> list[ir.Value]:
    """Return the inputs of the Concat that joins the samples of levels to `value`; empty if an input has no samples."""
    parts, todo = [], [value]
    while todo:
        part = todo.pop(0)
        node = find_producer(part, *MOVES)
        if is_node(node, "Concat"):
            todo[:0] = [v for v in node.inputs if v is not None]
        elif is_node(node, "GridSample") or _find_gathers(part):
            parts.append(part)
        else:
            return []
    return parts


def read_level(part: ir.Value, constants: Mapping[str, ir.Value]) -> Candidates:
    """Read the samples of one level. `constants`: role -> constant tensor of all levels."""
    node = find_producer(part, *MOVES)
    if not is_node(node, "GridSample"):
        gathers = _find_gathers(part)
        images = intersect(walk_sources(node.inputs[0], *MOVES, "Pad") for node in gathers)
        chains = [[*_walk_index(index)] for node in gathers if (index := _read_index(node)) is not None]
        if not all(any(is_node(v.producer(), "Floor") for v in chain) for chain in chains):
            raise Unfit('its samples are nearest rows ("discrete"); the operator interpolates')
        locations = intersect(chains)
        # In an image of 4 axes, two axes are the map's (height, width). In an image of 3 axes, one axis has height * width
        # pixels, and the width is a constant by which an index is multiplied.
        axes: Any = [two for v in images if len(dims(v)) == 4 for two in (dims(v)[2:], dims(v)[1:3])]
        areas = {size for v in images if len(dims(v)) == 3 for size in dims(v)[1:] if isinstance(size, int)}
        products = [v.producer() for chain in chains for v in chain if v.dtype in INTEGER]
        factors = [read_number(v) for node in products if is_node(node, "Mul") for v in node.inputs]
        widths = {int(n) for n in factors if n is not None and n > 0}
        axes += [(area // width, width) for area in sorted(areas) for width in sorted(widths) if area % width == 0]
        sizes = list(dict.fromkeys(two for two in axes if all(isinstance(size, int) for size in two)))
        grids = [dims(v)[-2] for v in locations if len(dims(v)) >= 4 and dims(v)[-1] == 2]
        points = next((n for n in (*dims(part)[-1:], *grids) if isinstance(n, int)), None)
        if not sizes or points is None:
            raise Unfit(_UNKNOWN)
        return Candidates(images, locations, [(two,) for two in sizes], points)
    for name, allowed in _GRID_SAMPLE.items():
        chosen = read_attribute(node, name, allowed[0])
        if chosen not in allowed:
            raise Unfit(f"GridSample's {name} is {chosen}; the operator's is {allowed[0]}")
    image, grid = node.inputs[:2]
    assert image is not None
    assert grid is not None
    sizes: Any = (*dims(image)[2:], dims(grid)[2]) if len(dims(image)) == len(dims(grid)) == 4 else ()
    split = grid.producer()
    if len(sizes) == 3 and not isinstance(sizes[2], int) and is_node(split, "Split") and len(split.inputs) > 1:
        # The number of points is not in the shape of the grid [n, queries, points, 2], but in the Split that computes it.
        lengths = read_constant(split.inputs[1])
        if read_attribute(split, "axis") in (2, -2) and lengths is not None:
            sizes = *sizes[:2], int(lengths[split.outputs.index(grid)])
    if len(sizes) != 3 or not are_fixed(sizes):
        raise Unfit(_UNKNOWN)
    if "locations" in constants:
        locations = [constants["locations"]]
    else:  # The grid is computed as 2 * locations - 1.
        scaling = find_producer(grid, *MOVES)
        doubled = _find_operand(scaling, "Sub", 1.0, (1,)) or _find_operand(scaling, "Add", -1.0)
        if (x := _find_operand(find_producer(doubled, *MOVES), "Mul", 2.0)) is None:
            raise Unfit("its grid is not 2 * locations - 1")
        locations = list(walk_chosen_sources(x))
    images = [constants["value"]] if "value" in constants else list(walk_sources(image, *MOVES))
    return Candidates(images, locations, [((sizes[0], sizes[1]),)], sizes[2])


def _find_operand(node: ir.Node | None, kind: str, factor: float, indices: tuple[int, ...] = (0, 1)) -> ir.Value | None:
    """Return x if the node is of this kind with inputs x and the constant `factor`; else None."""
    if not is_node(node, kind):
        return None
    return next((node.inputs[1 - i] for i in indices if read_number(node.inputs[i]) == factor), None)


def _find_gathers(value: ir.Value) -> list[ir.Node]:
    """Return the gathers of the rows that make up the samples `value`. Their index is floored, or cast from floats."""
    gathers = []
    sampled = walk_back(value, lambda node: not _read_index(node) and is_node(node, *MOVES, *_ARITHMETIC))
    for node in dict.fromkeys(v.producer() for v in sampled if v.dtype not in INTEGER):
        index = None if node is None else _read_index(node)
        producers = [] if index is None else [v.producer() for v in _walk_index(index)]
        casts = [cast for cast in producers if is_node(cast, "Cast") and cast.outputs[0].dtype in INTEGER]
        is_rounded = any(v is not None and v.dtype not in INTEGER for cast in casts for v in cast.inputs[:1])
        if node is not None and (is_rounded or any(is_node(producer, "Floor") for producer in producers)):
            gathers.append(node)
    return gathers


def _read_index(node: ir.Node) -> ir.Value | None:
    """Return the index of a gather; None for other nodes and for a constant index."""
    return node.inputs[1] if is_node(node, *_GATHERS) and read_constant(node.inputs[1]) is None else None


def _walk_index(index: ir.Value) -> Iterator[ir.Value]:
    return walk_back(index, lambda node: is_node(node, *MOVES, *_ARITHMETIC, *_INDEXING))


def list_factors(node: ir.Node) -> list[ir.Value]:
    """Return the two factors of the product that a ReduceSum sums; empty for another node."""
    product = find_producer(node.inputs[0], *PAIRS) if is_node(node, "ReduceSum") else None
    return [v for v in product.inputs if v is not None] if is_node(product, "Mul") else []


def _add_up(graph: ir.Graph, read_leaf: Callable[[ir.Node], Any]) -> dict[ir.Node, list[Any]]:
    """Find sums. Return last node of a sum -> its leaves in order. The last node has a leaf itself, or is an Add of sums.

    A leaf is what `read_leaf` returns for a node.
    """
    totals: dict[ir.Node, list[Any]] = {}
    for node in graph:
        if first := read_leaf(node):
            totals[node] = [first]
        added: list[Any] = [find_producer(v, *PAIRS) for v in node.inputs] if is_node(node, "Add") else []
        if added and all(term in totals for term in added):
            totals[node] = [leaf for term in added for leaf in totals[term]]
            for term in {*added}:
                del totals[term]
    return totals


def find_sums(graph: ir.Graph) -> dict[ir.Node, Pairs]:
    """Find weighted sums of samples: a ReduceSum, or an Add of such sums. Return last node of a sum -> pairs by level."""
    pairs = {node: [*itertools.permutations(list_factors(node), 2)] for node in graph}
    return _add_up(graph, lambda node: next((pair for pair in pairs[node] if split_levels(pair[0])), None))


def find_tables(graph: ir.Graph) -> dict[ir.Node, list[ir.Node]]:
    """Find sums of four corners. Return last Add of a sum -> the ReduceSum nodes of its corners.

    The corners read one table at locations [batch, queries, heads, levels, points, 2].
    """
    tables = {}
    for node, corners in _add_up(graph, lambda node: node if find_gather(node) else None).items():
        rows = [gather for corner in corners if (gather := find_gather(corner)) is not None]
        is_one_table = len({[*walk_sources(gather.inputs[0])][-1] for gather in rows}) == 1
        if len(rows) == 4 and is_one_table and _find_scaled_locations(rows[0])[0]:
            tables[node] = corners
    return tables


def find_gather(corner: ir.Node) -> ir.Node | None:
    """If `corner` is a ReduceSum over weighted rows, return the Gather of these rows; else return None."""
    producers = (find_producer(v, *VIEWS) for v in list_factors(corner))
    return next((node for node in producers if is_node(node, "Gather") and _read_index(node)), None)


def read_table(corners: list[ir.Node]) -> Candidates:
    """Return candidates for the samples of all levels, which read one table. `corners`: the sums of the four corners."""
    gather = find_gather(corners[0])
    assert gather is not None
    assert gather.inputs[0] is not None
    locations, maps = _find_scaled_locations(gather)
    if not maps:
        raise Unfit("the file does not fix the sizes of its maps")
    images = walk_back(gather.inputs[0], lambda node: is_node(node, *VIEWS, "Concat", "Cast"))
    points: Any = next((size for v in locations if isinstance(size := dims(v)[4], int)), 0)
    return Candidates(list(images), locations, maps, points)


def list_weights(corner: ir.Node) -> list[ir.Value]:
    """Return candidates for weights: the sources of a corner's coefficient, the farthest first."""
    shares = [v for v in list_factors(corner) if not is_node(find_producer(v, *VIEWS), "Gather")]
    values = [v for share in shares for v in walk_back(share, lambda node: is_node(node, *VIEWS, "Mul", "Where", "Cast"))]
    return [v for v in reversed(values) if v.dtype not in INTEGER]


def _find_scaled_locations(gather: ir.Node) -> tuple[list[ir.Value], list[Maps]]:
    """Return candidates for the locations, and for the constant sizes of maps, from which the index of a row is computed.

    Candidates for locations have six axes.
    """
    chains: list[list[ir.Value]] = []
    sides: dict[int, dict[tuple[int, ...], None]] = {0: {}, 1: {}}
    both: dict[Maps, None] = {}
    assert gather.inputs[1] is not None
    products = [v.producer() for v in _walk_index(gather.inputs[1]) if v.dtype not in INTEGER]
    factors = [two for node in products if is_node(node, "Mul") for two in (node.inputs, node.inputs[::-1])]
    for factor, other in factors:
        array = read_constant(other)
        if factor is None or array is None or not array.ndim or not np.isfinite(array).all():
            continue
        picked = find_producer(factor, *PAIRS)
        axis = read_number(picked.inputs[1]) if is_node(picked, "Gather") else None
        located = picked.inputs[0] if picked is not None and axis in (0, 1) else factor
        chain = [v for v in walk_sources(located, *MOVES) if len(dims(v)) == 6 and dims(v)[-1] == 2]
        chains += [chain] if chain else []
        if axis in (0, 1):
            sides[int(axis)][tuple(map(int, array.reshape(-1)))] = None
        elif array.shape[-1] == 2 and chain and isinstance(points := dims(chain[-1])[4], int) and points:
            both[tuple((int(height), int(width)) for width, height in array.reshape(-1, 2)[::points])] = None
    pairs = itertools.product(sides[0], sides[1])
    both |= {tuple(zip(heights, widths, strict=True)): None for widths, heights in pairs if len(widths) == len(heights)}
    tensors = dict.fromkeys([*intersect(chains), *itertools.chain(*chains)] if chains else ())
    return list(tensors), list(both)
