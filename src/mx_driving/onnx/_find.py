"""Find deformable attention among the weighted sums of an ONNX graph. Give a reason for sums that are not attention.

Files move values in different ways (Reshape, Transpose, Split, Gather ...), so the search requires no order of nodes. It walks
upstream from a sum to tensors that may be the operator's inputs. `_trial.py` then compares the sum with the operator.

Exporters fold nodes that do not depend on an input. Then each level has a constant map, grid or weights, and `_find_constants`
concatenates the constants of all levels to one tensor for the operator. This tensor is outside the graph: only a replacement
writes it into the file. A trial runs the file's own constants. onnx_ir and onnxscript fold nodes, but join no levels: a file of
tests/helpers/onnx_graphs.py (`CONSTANTS`) is refused without `_find_constants`, also after onnxscript's optimiser.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ._file import LoadedFile
from ._graph import (
    MOVES,
    VIEWS,
    Unfit,
    are_fixed,
    bypass_identities,
    dims,
    extract,
    find_producer,
    intersect,
    is_node,
    name_unshaped,
    read_constant,
    walk_chosen_sources,
    walk_nodes,
    walk_sources,
)
from ._nodes import find_nodes
from ._samples import Candidates, Pairs, Sampling, find_sums, find_tables, list_weights, read_level, read_table, split_levels
from ._trial import prove

_LIKELIEST = 24  # at most so many candidates are tried; in all known files the right candidate is among the first five
_MAPS = 1000  # at most so many combinations of level sizes are tried. No tensor has the number of keys of most of them.
Array = np.ndarray[Any, Any]


def find_samplings(file: LoadedFile, tables: bool = True) -> Iterator[tuple[str, Sampling | str]]:
    """For each weighted sum, yield the name of its tensor, and the sampling that passes its trial or the reason why none does.

    GridSample nodes outside the weighted sums of the main graph come first. The caller may replace a sampling before it takes
    the next, because the search runs in a copy. `tables=False` leaves out the form "gather".
    """
    copy = replace(file, model=file.model.clone())
    bypassed, graph = bypass_identities(copy.model), copy.model.graph
    corners, sums = find_tables(graph), find_sums(graph)
    # Only report attention in branches of If, in bodies of Loop, and in functions that were not inlined.
    graphs: dict[Any, str] = {f: f"the local function {f.domain}::{f.name}" for f in copy.model.functions.values()}
    for node in walk_nodes(copy.model):
        for attribute in node.attributes.values():
            is_graph, are_graphs = (attribute.type == kind for kind in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS))
            subgraphs = [attribute.value] if is_graph else attribute.value if are_graphs else ()
            graphs |= dict.fromkeys(subgraphs, f"a subgraph of {node.op_type} ({node.name})")
    for subgraph, where in graphs.items():
        inner = find_sums(subgraph)
        for node in (*inner, *find_nodes(subgraph), *_find_single_samplers(subgraph, inner)):
            yield str(node.outputs[0].name), f"it lies in {where}; only nodes of the main graph are replaced"
    for node in _find_single_samplers(graph, sums):
        yield str(node.outputs[0].name), "it is not one of the levels whose weighted samples are summed up"
    for node in [*(corners if tables else ()), *(node for node in sums if node not in corners)]:
        name = str(node.outputs[0].name)
        try:
            sampling = _prove_first(copy, node, corners.get(node), sums.get(node, []))
        except Unfit as unfit:
            yield name, str(unfit) + name_unshaped(node.outputs[0])
            continue
        part = sampling.extract(copy.model)
        inputs = dict.fromkeys(str(v.name) for node in part.graph for v in node.inputs if v is not None)
        names = *(str(node.name) for node in part.graph), *(node for value in inputs for node in bypassed.get(value, ()))
        # Take the tensors of the file's model that have the same names. An input that the model lacks, a constant, stays.
        values = ir.convenience.create_value_mapping(file.model.graph, include_subgraphs=False)
        value, locations, weights = (values.get(str(end.name), end) for end in sampling.ends)
        output, shapes = values[str(sampling.output.name)], tuple(values[str(v.name)] for v in sampling.shapes)
        ends = {"value": value, "locations": locations, "weights": weights, "output": output}
        yield name, replace(sampling, **ends, shapes=shapes, part=part, nodes=names)


def _prove_first(file: LoadedFile, node: ir.Node, corners: list[ir.Node] | None, pairs: Pairs) -> Sampling:
    """Return the first candidate that passes its trial. If none passes, raise the reason of the first.

    If the levels have constant inputs, first try tensors joined from these constants. `corners`: for the form "gather" the
    sums of the four corners, else None.
    """

    def count_doubts(sampling: Sampling) -> int:
        """Return a penalty: 1 for a cast, and 1 for each size of a batch or of queries that differs from that of locations."""
        (bs, queries), sizes = dims(sampling.locations)[:2], (*dims(sampling.weights)[:2], *dims(sampling.output)[:2])
        pairs = zip((*sizes, dims(sampling.value)[0]), (bs, queries, bs, queries, bs), strict=True)
        is_cast = sampling.output.dtype != sampling.value.dtype
        return is_cast + (sum(size != expected for size, expected in pairs) if corners is None else 0)

    reasons = []
    for constants in _find_constants(file.model, pairs) if corners is None else [{}]:
        try:
            if corners is None:
                levels = [read_level(part, constants) for samples, _ in pairs for part in split_levels(samples)]
                weights = intersect(walk_chosen_sources(w) for _, w in pairs)
                weights = [constants["weights"]] if "weights" in constants else weights
            else:
                levels, weights = [read_table(corners)], intersect(map(list_weights, corners))
            candidates = sorted(_list_candidates(node, levels, weights), key=count_doubts)
        except Unfit as unfit:
            reasons.append(unfit)
            continue
        for candidate in candidates[:_LIKELIEST]:
            try:
                return prove(file, candidate)
            except Unfit as unfit:
                reasons.append(unfit)
        reasons.append(Unfit("no tensors have the shapes of the operator's value, locations and weights"))
    raise reasons[0]


def _find_single_samplers(graph: ir.Graph, sums: dict[ir.Node, Pairs]) -> list[ir.Node]:
    """Return the GridSample nodes that are in none of the sums."""
    samples = (samples for pairs in sums.values() for samples, _ in pairs)
    seen = {find_producer(part, *MOVES) for value in samples for part in split_levels(value)}
    return [node for node in graph if is_node(node, "GridSample") and node not in seen]


def _compute_constant(model: ir.Model, value: ir.Value) -> Array | None:
    """Return the array of a constant, or of a part or a view of a constant; else None."""
    if (array := read_constant(value)) is not None or read_constant([*walk_sources(value, *MOVES)][-1]) is None:
        return None if array is None else array.copy()  # copied, because the file of weights is closed later
    try:
        return ReferenceEvaluator(ir.serde.serialize_model(extract(model, [], value))).run(None, {})[0]  # pyright: ignore
    except Exception:  # a node after the constant reads an input or is invalid; onnx raises dozens of classes
        return None


def _find_constants(model: ir.Model, pairs: Pairs) -> Iterator[dict[str, ir.Value]]:
    """Join the constants of levels. For each possible batch size, yield role -> joined tensor; then an empty dictionary.

    The tensors have the operator's layout: separate axes for batch and heads, and one axis of keys for height and width.
    """
    nodes = [find_producer(part, *MOVES) for samples, _ in pairs for part in split_levels(samples)]
    samplers = [node for node in nodes if is_node(node, "GridSample")]
    values = {
        "value": [node.inputs[0] for node in samplers],
        "locations": [node.inputs[1] for node in samplers],
        "weights": [weights for _, weights in pairs],
    }
    arrays = {role: [_compute_constant(model, v) for v in tensors if v is not None] for role, tensors in values.items()}
    for index, (samples, _) in enumerate(pairs):  # broadcast weights to [batch * heads, 1, queries, points]
        array, sizes = arrays["weights"][index], dims(samples)
        if array is not None and len(sizes) == 4 and are_fixed(sizes):
            shape: Any = (sizes[0], 1, *sizes[2:])
            if np.broadcast_shapes(array.shape, shape) == shape:
                arrays["weights"][index] = np.broadcast_to(array, shape)
    whole: dict[str, list[Any]] = {
        r: numbers for r, numbers in arrays.items() if numbers and all(a is not None for a in numbers)
    }
    sizes = {size for tensors in values.values() for v in tensors for s in walk_sources(v, *MOVES) for size in dims(s)[:1]}
    for batch in sorted({1, *(size for size in sizes if isinstance(size, int) and size > 0)}) if whole else ():
        constants = {}
        for role, levels in whole.items():
            if any(a.ndim != 4 or a.size == 0 or a.shape[0] % batch for a in levels):
                continue
            dtype, axis = levels[0].dtype, 1 if role == "value" else 3
            if role == "value":
                blocks = [a.reshape(batch, -1, a.shape[1], a.shape[2] * a.shape[3]).transpose(0, 3, 1, 2) for a in levels]
            elif role == "locations":
                blocks = [((a.astype(float) + 1) / 2).reshape(batch, -1, *a.shape[1:]).transpose(0, 2, 1, 3, 4) for a in levels]
                dtype = np.float32 if dtype.itemsize == 2 else dtype  # (grid + 1) / 2 would lose digits in 16 bits
            else:
                blocks = [a.reshape(batch, -1, *a.shape[2:]).transpose(0, 2, 1, 3) for a in levels]
            if len({block.shape[:axis] + block.shape[axis + 1 :] for block in blocks}) == 1:
                tensor = ir.tensor(np.concatenate(blocks, axis).astype(dtype))
                constants[role] = ir.val(f"{pairs[0][0].name}/{role}", const_value=tensor)
        if constants:
            yield constants
    yield {}


# Candidates


def _list_candidates(node: ir.Node, levels: list[Candidates], weights: list[ir.Value]) -> Iterator[Sampling]:
    """Yield the samplings with shapes of the operator. There may be several, because axes may have equal sizes."""
    images, locations = intersect(level.images for level in levels), intersect(level.locations for level in levels)
    # The sum and its views with three axes, up to the first value with several readers.
    outputs, output = [], node.outputs[0]
    while True:
        outputs += [output] * (len(dims(output)) == 3)
        users = list(output.uses())
        if len(users) != 1 or output.is_graph_output() or users[0].idx or not is_node(users[0].node, *VIEWS, "Cast"):
            break
        output = users[0].node.outputs[0]
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
                for output in outputs:
                    if _may_equal(dims(output)[2], heads * channels):
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
