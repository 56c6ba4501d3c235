"""Samples of all levels that are gathered from one table, as torch exports the operator by default, and as `fuse` writes it.

Four sums over samples, one for each corner of a pixel, read the same rows. Their indices are floors of locations * sizes - 0.5:
the sizes of the maps are a constant that locations are multiplied by.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx_ir as ir

from ._graph import INTEGER, VIEWS, Unfit, before, common, constant, dims, is_node, number, sources
from ._levels import indices_of_rows
from ._search import Sampling, add_up, outputs_of_sum

_OF_WEIGHTS = VIEWS | {"Mul", "Where", "Cast"}
_OF_TABLE = VIEWS | {"Concat", "Cast"}
Array = np.ndarray[Any, Any]
Maps = tuple[tuple[int, int], ...]


def find_tables(graph: ir.Graph) -> dict[ir.Node, list[ir.Node]]:
    """Return the last Add of each sum of four corners, and the corners' ReduceSum nodes."""
    corners = add_up(graph, lambda node: node if is_node(node, "ReduceSum") and _row(node) is not None else None)
    return {node: sums for node, sums in corners.items() if len(sums) == 4 and _are_of_attention(sums)}


def _are_of_attention(corners: list[ir.Node]) -> bool:
    """Whether the corners read one table, at locations [batch, queries, heads, levels, points, 2]."""
    rows = [node for corner in corners if (node := _row(corner)) is not None]
    index = _index(corners[0])
    return len({node.inputs[0] for node in rows}) == 1 and index is not None and bool(_locations(index)[0])


def table_candidates(node: ir.Node, corners: list[ir.Node]) -> list[Sampling]:
    """Return the samplings that the sum may be, going by shapes. None is certain before a trial."""
    samplings = list(_candidates(node, corners))
    if not samplings:
        index = _index(corners[0])
        unknown = index is None or not _locations(index)[1]
        shapes = "no tensors have the shapes of the operator's value, locations and weights"
        raise Unfit("the file does not fix the sizes of its maps" if unknown else shapes)
    return samplings


def _candidates(node: ir.Node, corners: list[ir.Node]) -> Iterator[Sampling]:
    gather, weights = _row(corners[0]), common(map(_weights, corners))
    assert gather is not None
    assert gather.inputs[0] is not None
    assert gather.inputs[1] is not None
    values = [v for v in before(gather.inputs[0], lambda n: is_node(n, *_OF_TABLE)) if len(dims(v)) == 4]
    tensors, sizes = _locations(gather.inputs[1])
    for value, locations, maps in itertools.product(values, tensors, sizes):
        keys, heads, channels = dims(value)[1:]
        blocks = dims(locations)[2:5]
        numbers = (keys, heads, channels, *blocks)
        if not all(isinstance(size, int) for size in numbers) or blocks[:2] != (heads, len(maps)):
            continue
        if keys != sum(height * width for height, width in maps):
            continue
        ends = [v for v in weights if dims(v)[2:] in (blocks, (heads, blocks[1] * blocks[2]))]  # pyright: ignore
        outputs = [v for v in outputs_of_sum(node, heads * channels, "Cast") if v.dtype == value.dtype]  # pyright: ignore
        for weight, output in itertools.product(ends, outputs):
            points: Any = (blocks[2],) * len(maps)
            yield Sampling(value, locations, weight, output, maps, points, heads, channels)  # pyright: ignore


def _row(corner: ir.Node) -> ir.Node | None:
    """Return the Gather whose rows the corner weighs and sums up."""
    product = corner.inputs[0].producer() if corner.inputs[0] is not None else None
    if product is None or not is_node(product, "Mul"):
        return None
    gathers = [node for v in product.inputs if (node := _behind_views(v)) is not None and is_node(node, "Gather")]
    return next((node for node in gathers if constant(node.inputs[1]) is None), None)


def _index(corner: ir.Node) -> ir.Value | None:
    node = _row(corner)
    return None if node is None else node.inputs[1]


def _behind_views(value: ir.Value | None) -> ir.Node | None:
    node = None if value is None else value.producer()
    while node is not None and is_node(node, *VIEWS):
        node = None if node.inputs[0] is None else node.inputs[0].producer()
    return node


def _weights(corner: ir.Node) -> list[ir.Value]:
    """Return what the corner's share may be computed from, the farthest first."""
    (product,) = (v.producer() for v in corner.inputs[:1] if v is not None)
    assert product is not None
    shares = [v for v in product.inputs if v is not None and not is_node(_behind_views(v), "Gather")]
    values = [v for share in shares for v in before(share, lambda n: is_node(n, *_OF_WEIGHTS))]
    return [v for v in reversed(values) if v.dtype not in INTEGER]


def _locations(index: ir.Value) -> tuple[list[ir.Value], list[Maps]]:
    """Return tensors of six axes that the index is computed from, and the sizes of maps that it is computed with."""
    tensors: dict[ir.Value, None] = {}
    sides: dict[int, dict[tuple[int, ...], None]] = {0: {}, 1: {}}
    both: dict[Maps, None] = {}
    for factor, array in _scaled(index):
        picked = factor.producer()
        axis = number(picked.inputs[1]) if picked is not None and is_node(picked, "Gather") else None
        located = picked.inputs[0] if picked is not None and axis in (0, 1) else factor
        chain = [v for v in sources(located, "Cast") if len(dims(v)) == 6 and dims(v)[-1] == 2] if located is not None else []
        tensors |= dict.fromkeys(chain)
        if axis in (0, 1):
            sides[int(axis)][tuple(map(int, array.reshape(-1)))] = None
        elif array.shape[-1] == 2 and chain and isinstance(points := dims(chain[-1])[4], int) and points:
            both[tuple((int(height), int(width)) for width, height in array.reshape(-1, 2)[::points])] = None
    pairs = itertools.product(sides[0], sides[1])
    both |= {tuple(zip(heights, widths, strict=True)): None for widths, heights in pairs if len(widths) == len(heights)}
    return list(tensors), list(both)


def _scaled(index: ir.Value) -> Iterator[tuple[ir.Value, Array]]:
    """Yield floats that the index is computed from and that are multiplied by constants, and the constants."""
    for value in indices_of_rows(index):
        node = value.producer()
        if node is not None and is_node(node, "Mul") and value.dtype not in INTEGER:
            for factor, other in (node.inputs, node.inputs[::-1]):
                array = constant(other)
                if factor is not None and array is not None and array.ndim and np.isfinite(array).all():
                    yield factor, array
