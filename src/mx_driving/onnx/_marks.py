"""Gathers that `fuse` writes have a mark, from which another form can be made of them: where a place begins, and its sizes.

The mark is in `metadata_props` of the node that ends the place, which runtimes pass over. It proves nothing: a trial does.
"""

from __future__ import annotations

import itertools
import json
from typing import Any

import onnx_ir as ir

from ._forms import Call
from ._graph import Unfit, before, dims
from ._search import Sampling

KEY = "mx_driving.multi_scale_deformable_attn"
_ENDS, _AXES = ("value", "locations", "weights"), (4, 6, 5)


def mark(output: ir.Value, call: Call) -> None:
    """Levels that do not lie one behind the other get none: `Sampling` has no place for them."""
    sizes, node = call.sizes, output.producer()
    assert node is not None
    assert not isinstance(sizes, str)
    areas = [height * width for height, width in sizes.maps]
    if (*sizes.starts, sizes.keys) == (0, *itertools.accumulate(areas)):
        ends = {end: value.name for end, value in zip(_ENDS, call.floating, strict=True)}
        numbers = {"maps": sizes.maps, "points": sizes.points, "heads": sizes.heads, "channels": sizes.channels}
        node.metadata_props[KEY] = json.dumps(ends | numbers)


def marked(graph: ir.Graph) -> list[ir.Node]:
    return [node for node in graph if KEY in node.metadata_props]


def read(graph: ir.Graph, node: ir.Node) -> Sampling:
    """What a mark says.

    Raises:
        Unfit: it is not one of ours, or does not fit the graph.
    """
    try:
        said = json.loads(node.metadata_props[KEY])
        maps = tuple((_size(height), _size(width)) for height, width in said["maps"])
        points, heads, channels = (_size(said[name]) for name in ("points", "heads", "channels"))
        ends = [str(said[end]) for end in _ENDS]
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError):
        raise Unfit(f"its metadata {KEY} cannot be read") from None
    names = {v.name: v for v in (*graph.inputs, *graph.initializers.values(), *(v for n in graph for v in n.outputs))}
    found = [names[end] for end in ends if end in names]
    if [len(dims(value)) for value in found] != [*_AXES] or not maps:
        raise Unfit(f"its metadata {KEY} does not fit the file")
    return Sampling(found[0], found[1], found[2], node.outputs[0], maps, (points,) * len(maps), heads, channels)


def _size(number: Any) -> int:
    if not isinstance(number, int) or number < 1:
        raise ValueError
    return number


def inside(sampling: Sampling) -> set[ir.Node | None]:
    """The nodes of a place."""
    ends = {sampling.value, sampling.locations, sampling.weights}
    values = before(sampling.output, lambda node: not any(output in ends for output in node.outputs))
    return {value.producer() for value in values if value not in ends}
