"""Find deformable attention among the weighted sums of an ONNX graph. Give a reason for sums that are not attention.

Exporters fold nodes that do not depend on an input. Then each level has a constant map, grid or weights, and `_find_constants`
concatenates the constants of all levels to one tensor for the operator. This tensor is outside the graph: only a replacement
writes it into the file. A trial runs the file's own constants. onnx_ir and onnxscript fold nodes, but join no levels: a file of
tests/onnx/test_onnx_fuse_constants.py is refused without `_find_constants`, also after onnxscript's optimiser.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ._file import LoadedFile
from ._graph import (
    MOVES,
    Unfit,
    are_fixed,
    dims,
    find_producer,
    is_node,
    name_unshaped,
    read_constant,
    walk_nodes,
    walk_sources,
)
from ._identities import bypass_identities
from ._nodes import find_nodes
from ._samples import split_levels
from ._search import Pairs, Sampling, find_candidates, find_sums, find_table_candidates, find_tables
from ._trial import prove

_LIKELIEST = 24  # at most so many candidates are tried; in all known files the right candidate is among the first five
Array = np.ndarray[Any, Any]


def find_samplings(file: LoadedFile, tables: bool = True) -> Iterator[tuple[str, Sampling | str]]:
    """For each weighted sum, yield the name of its tensor, and the sampling that passes its trial or the reason why none does.

    GridSample nodes outside the weighted sums of the main graph come first. The caller may replace a sampling before it takes
    the next, because the search runs in a copy. `tables=False` leaves out the form "gather".
    """
    copy = replace(file, model=file.model.clone())
    bypassed, graph = bypass_identities(copy.model), copy.model.graph
    corners, sums = find_tables(graph), find_sums(graph)
    yield from _find_in_subgraphs(copy.model).items()
    for node in _find_single_samplers(graph, sums):
        yield str(node.outputs[0].name), "it is not one of the levels whose weighted samples are summed up"
    for node in [*(corners if tables else ()), *(node for node in sums if node not in corners)]:
        name = str(node.outputs[0].name)
        try:
            if node in corners:
                sampling = _prove_first(copy, find_table_candidates(node, corners[node]))
            else:
                sampling = _prove_sum(copy, node, sums[node])
        except Unfit as unfit:
            yield name, str(unfit) + name_unshaped(node.outputs[0])
            continue
        part = sampling.extract()
        inputs = dict.fromkeys(str(v.name) for node in part for v in node.inputs if v is not None)
        names = *(str(node.name) for node in part), *(node for value in inputs for node in bypassed.get(value, ()))
        yield name, replace(sampling.find_in(file.model), part=part, nodes=names)


def _prove_sum(file: LoadedFile, node: ir.Node, pairs: Pairs) -> Sampling:
    """Return the first candidate that passes its trial. If the levels have constant inputs, first try tensors made of these."""
    return _take_first(lambda constants: _prove_first(file, find_candidates(node, pairs, constants)), _find_constants(pairs))


def _prove_first(file: LoadedFile, candidates: list[Sampling]) -> Sampling:
    return _take_first(lambda sampling: prove(file, sampling), candidates[:_LIKELIEST])


def _take_first(attempt: Callable[[Any], Sampling], choices: Iterable[Any]) -> Sampling:
    """Return the result of the first choice that fits, or raise the error of the first choice."""
    reasons = []
    for choice in choices:
        try:
            return attempt(choice)
        except Unfit as unfit:
            reasons.append(unfit)
    raise (reasons or [Unfit("no tensors have the shapes of the operator's value, locations and weights")])[0]


def _find_single_samplers(graph: ir.Graph, sums: dict[ir.Node, Pairs]) -> list[ir.Node]:
    """Return the GridSample nodes that are in none of the sums."""
    samples = (samples for pairs in sums.values() for samples, _ in pairs)
    seen = {find_producer(part, *MOVES) for value in samples for part in split_levels(value)}
    return [node for node in graph if is_node(node, "GridSample") and node not in seen]


def _find_in_subgraphs(model: ir.Model) -> dict[str, str]:
    """Return name -> reason for attention in branches of If, bodies of Loop, and functions that were not inlined."""
    graphs: dict[Any, str] = {f: f"the local function {f.domain}::{f.name}" for f in model.functions.values()}
    for node in walk_nodes(model):
        for attribute in node.attributes.values():
            is_graph, are_graphs = (attribute.type == kind for kind in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS))
            subgraphs = [attribute.value] if is_graph else attribute.value if are_graphs else ()
            graphs |= dict.fromkeys(subgraphs, f"a subgraph of {node.op_type} ({node.name})")
    left = {}
    for graph, where in graphs.items():
        sums = find_sums(graph)
        for node in (*sums, *find_nodes(graph), *_find_single_samplers(graph, sums)):
            left[str(node.outputs[0].name)] = f"it lies in {where}; only nodes of the main graph are replaced"
    return left


def _find_constants(pairs: Pairs) -> Iterator[dict[str, ir.Value]]:
    """For each possible batch, yield role -> constant tensor of all levels. Then yield an empty dictionary."""
    nodes = [find_producer(part, *MOVES) for samples, _ in pairs for part in split_levels(samples)]
    samplers = [node for node in nodes if is_node(node, "GridSample")]
    values = {
        "value": [node.inputs[0] for node in samplers],
        "locations": [node.inputs[1] for node in samplers],
        "weights": [weights for _, weights in pairs],
    }
    arrays = {role: [_compute_constant(v) for v in tensors if v is not None] for role, tensors in values.items()}
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
        joined = {role: _join_levels(numbers, batch, role) for role, numbers in whole.items()}
        name = pairs[0][0].name
        if constants := {role: ir.val(f"{name}/{role}", const_value=t) for role, t in joined.items() if t is not None}:
            yield constants
    yield {}


def _compute_constant(value: ir.Value) -> Array | None:
    """Return the array of a constant, or of a part or a view of a constant; else None."""
    if (array := read_constant(value)) is not None or read_constant([*walk_sources(value, *MOVES)][-1]) is None:
        return None if array is None else array.copy()  # copied, because the file of weights is closed later
    assert value.graph is not None
    try:
        part = ir.Model(ir.convenience.extract(value.graph, [], [value]), ir_version=10)
        return ReferenceEvaluator(ir.serde.serialize_model(ir.external_data.load_to_model(part))).run(None, {})[0]  # pyright: ignore
    except Exception:  # a node after the constant reads an input or is invalid; onnx raises dozens of classes
        return None


def _join_levels(arrays: Sequence[Array], batch: int, role: str) -> ir.TensorProtocol | None:
    """Concatenate the constants of all levels in the operator's layout: separate axes for batch and heads, and one axis of keys
    for height and width. Return None if their sizes do not fit the batch."""
    if any(array.ndim != 4 or array.size == 0 or array.shape[0] % batch for array in arrays):
        return None
    dtype, axis = arrays[0].dtype, 1 if role == "value" else 3
    if role == "value":
        blocks = [a.reshape(batch, -1, a.shape[1], a.shape[2] * a.shape[3]).transpose(0, 3, 1, 2) for a in arrays]
    elif role == "locations":
        blocks = [((a.astype(float) + 1) / 2).reshape(batch, -1, *a.shape[1:]).transpose(0, 2, 1, 3, 4) for a in arrays]
        dtype = np.float32 if dtype.itemsize == 2 else dtype  # (grid + 1) / 2 would lose digits in 16 bits
    else:
        blocks = [a.reshape(batch, -1, *a.shape[2:]).transpose(0, 2, 1, 3) for a in arrays]
    if len({block.shape[:axis] + block.shape[axis + 1 :] for block in blocks}) > 1:
        return None
    return ir.tensor(np.concatenate(blocks, axis).astype(dtype))
