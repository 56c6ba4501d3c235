"""Find candidates for deformable attention in an ONNX graph: weighted sums of samples.

Files move values in different ways (Reshape, Transpose, Split, Gather ...), so the search requires no order of nodes. It walks
upstream from a sum to tensors that may be the operator's inputs. `_trial.py` then compares the sum with the operator.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import onnx_ir as ir

from ._graph import PAIRS, VIEWS, are_fixed, dims, find_producer, intersect, is_node, walk_chosen_sources, walk_sources
from ._samples import (
    Candidates,
    Maps,
    are_of_one_table,
    find_gather,
    list_factors,
    list_weights,
    read_level,
    read_table,
    split_levels,
)

_MAPS = 1000  # at most so many combinations of level sizes are tried. Most have another number of keys than any tensor.
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
    part: ir.Graph | None = None  # a copy of these nodes, except for those that change nothing

    @property
    def ends(self) -> tuple[ir.Value, ir.Value, ir.Value]:
        return self.value, self.locations, self.weights

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """Return role -> input, for the inputs in the graph."""
        ends = zip(("value", "locations", "weights"), self.ends, strict=True)
        return {role: end for role, end in ends if end.graph is not None or end.const_value is None}

    def find_in(self, model: ir.Model) -> Sampling:
        """Return this sampling with the tensors of `model` that have the same names. An end that `model` lacks stays."""
        values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
        value, locations, weights = (values.get(str(end.name), end) for end in self.ends)
        output, shapes = values[str(self.output.name)], tuple(values[str(v.name)] for v in self.shapes)
        return replace(self, value=value, locations=locations, weights=weights, output=output, shapes=shapes)

    def extract(self) -> ir.Graph:
        """Return a copy of the nodes between inputs and output."""
        assert self.output.graph is not None
        return ir.convenience.extract(self.output.graph, [*self.inputs.values(), *self.shapes], [self.output])

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
    def is_cast(self) -> bool:
        return self.output.dtype != self.value.dtype

    @property
    def num_keys(self) -> int:
        return sum(height * width for height, width in self.maps)


def _add_up(graph: ir.Graph, read_leaf: Callable[[ir.Node], Any]) -> dict[ir.Node, list[Any]]:
    """Return node -> leaves in order, for each node with a leaf and each Add of such nodes. Leave out the terms of an Add.

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
    """Return node -> pairs in order of levels, for each ReduceSum over weighted samples and each Add of such sums."""

    def read_pair(node: ir.Node) -> Any:
        return next((pair for pair in itertools.permutations(list_factors(node), 2) if split_levels(pair[0])), None)

    return _add_up(graph, read_pair)


def find_tables(graph: ir.Graph) -> dict[ir.Node, list[ir.Node]]:
    """Return node -> the four corners' ReduceSum nodes, for the last Add of each sum of four corners."""
    corners = _add_up(graph, lambda node: node if find_gather(node) else None)
    return {node: sums for node, sums in corners.items() if are_of_one_table(sums)}


def find_candidates(node: ir.Node, pairs: Pairs, constants: Mapping[str, ir.Value]) -> list[Sampling]:
    """Return the samplings that the shapes allow, the likeliest first.

    `constants`: role -> constant tensor of all levels.
    """
    levels = [read_level(part, constants) for samples, _ in pairs for part in split_levels(samples)]
    weights = [constants["weights"]] if "weights" in constants else intersect(walk_chosen_sources(w) for _, w in pairs)

    def count_doubts(sampling: Sampling) -> int:
        """Return a penalty: the number of casts and of batch and query sizes that differ from those of locations."""
        bs, queries = dims(sampling.locations)[:2]
        sizes = *dims(sampling.weights)[:2], *dims(sampling.output)[:2], dims(sampling.value)[0]
        different = sum(size != expected for size, expected in zip(sizes, (bs, queries, bs, queries, bs), strict=True))
        return different + sampling.is_cast

    return sorted(_list_candidates(node, levels, weights), key=count_doubts)


def find_table_candidates(node: ir.Node, corners: list[ir.Node]) -> list[Sampling]:
    candidates = _list_candidates(node, [read_table(corners)], intersect(map(list_weights, corners)))
    return sorted(candidates, key=lambda sampling: sampling.is_cast)


def _list_candidates(node: ir.Node, levels: list[Candidates], weights: list[ir.Value]) -> Iterator[Sampling]:
    """Yield the samplings whose shapes fit. Several may fit, because axes may have equal sizes."""
    images, locations = intersect(level.images for level in levels), intersect(level.locations for level in levels)
    for choice in itertools.islice(itertools.product(*(level.maps for level in levels)), _MAPS):
        maps = tuple(size for sizes in choice for size in sizes)
        points = tuple(level.points for level, sizes in zip(levels, choice, strict=True) for _ in sizes)
        keys, joined, apart = sum(height * width for height, width in maps), (sum(points),), (len(points), points[0])
        all_heads = {
            heads
            for v in locations
            for heads in dims(v)[2:3]
            if isinstance(heads, int) and _ends_with(v, (heads, *joined, 2), (heads, *apart, 2))
        }
        for heads in all_heads:
            samples = [(heads, *joined)] + [(heads, *apart)] * (len(set(points)) == 1)
            values = {}  # value -> number of channels
            for v in _drop_casts(images):
                sizes = dims(v)
                has_rank = (len(sizes) == 4 and sizes[2] == heads) or len(sizes) == 3
                if has_rank and _may_equal(sizes[1], keys) and are_fixed(blocks := sizes[2:]):
                    width = math.prod(blocks)
                    values |= {v: width // heads} if width and width % heads == 0 else {}
            located = [v for v in _drop_casts(locations) if _ends_with(v, *((*s, 2) for s in samples))]
            weighing = [v for v in _drop_casts(weights) if _ends_with(v, *samples)]
            for (value, channels), location, weight in itertools.product(values.items(), located, weighing):
                for output in _list_outputs(node, heads * channels):
                    yield Sampling(value, location, weight, output, maps, points, heads, channels, node.outputs[0].dtype)


def _drop_casts(values: list[ir.Value]) -> Iterable[ir.Value]:
    """Return the first of each group of values that differ only by casts."""
    firsts: dict[ir.Value, ir.Value] = {}
    for value in values:
        *_, uncast = walk_sources(value)
        firsts.setdefault(uncast, value)
    return firsts.values()


def _ends_with(value: ir.Value, *last: tuple[int, ...]) -> bool:
    """Return whether the sizes after the first two axes are in `last`. A free size matches any size."""
    return any(len(dims(value)) == 2 + len(sizes) and all(map(_may_equal, dims(value)[2:], sizes)) for sizes in last)


def _may_equal(size: int | str | None, number: int) -> bool:
    return size == number or not isinstance(size, int)


def _list_outputs(node: ir.Node, width: int) -> Iterator[ir.Value]:
    """Yield the sum and its views with three axes, up to the first value with several readers."""
    value = node.outputs[0]
    while True:
        if len(shape := dims(value)) == 3 and _may_equal(shape[2], width):
            yield value
        users = list(value.uses())
        if len(users) != 1 or value.is_graph_output() or users[0].idx or not is_node(users[0].node, *VIEWS, "Cast"):
            return
        value = users[0].node.outputs[0]
