"""Find deformable attention among the weighted sums of an ONNX graph, and give a reason for each other sum."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import onnx_ir as ir

from ._constants import find_constants
from ._file import walk_nodes
from ._graph import MOVES, Unfit, is_node, name_unshaped, producer
from ._identities import bypass
from ._nodes import find_nodes
from ._samples import split_levels
from ._search import Pairs, Sampling, find_candidates, find_sums, find_table_candidates, find_tables
from ._trial import prove

_LIKELIEST = 24  # most candidates to try; in all known files the right candidate is among the first five


def find_samplings(model: ir.Model, tables: bool = True) -> Iterator[tuple[str, Sampling | str]]:
    """Yield (name of the sum's tensor, sampling that passes its trial). If no sampling passes, yield (name, reason).

    GridSample nodes outside the weighted sums of the main graph come first. The caller may replace a sampling before it takes
    the next. `tables=False` leaves out the form "gather".
    """
    with bypass(model):
        yield from _search(model, tables)


def _search(model: ir.Model, tables: bool) -> Iterator[tuple[str, Sampling | str]]:
    corners, sums = find_tables(model.graph), find_sums(model.graph)
    yield from _find_in_subgraphs(model).items()
    for node in _single_samplers(model.graph, sums):
        yield str(node.outputs[0].name), "it is not one of the levels whose weighted samples are summed up"
    for node in [*(corners if tables else ()), *(node for node in sums if node not in corners)]:
        name = str(node.outputs[0].name)
        try:
            if node in corners:
                yield name, _prove_one(model, find_table_candidates(node, corners[node]))
            else:
                yield name, _prove_sum(model, node, sums[node])
        except Unfit as unfit:
            yield name, str(unfit) + name_unshaped(node.outputs[0])


def _prove_sum(model: ir.Model, node: ir.Node, pairs: Pairs) -> Sampling:
    """Return the first candidate that passes its trial. Concatenate constants of the levels first."""
    return _first(lambda constants: _prove_one(model, find_candidates(node, pairs, constants)), find_constants(pairs))


def _prove_one(model: ir.Model, guesses: list[Sampling]) -> Sampling:
    return _first(lambda sampling: prove(model, sampling), guesses[:_LIKELIEST])


def _first(attempt: Callable[[Any], Sampling], choices: Iterable[Any]) -> Sampling:
    """Return the result of the first choice that fits, or raise the error of the first choice."""
    reasons = []
    for choice in choices:
        try:
            return attempt(choice)
        except Unfit as unfit:
            reasons.append(unfit)
    raise (reasons or [Unfit("no tensors have the shapes of the operator's value, locations and weights")])[0]


def _single_samplers(graph: ir.Graph, sums: dict[ir.Node, Pairs]) -> list[ir.Node]:
    """Return the GridSample nodes that are in none of the sums."""
    samples = (samples for pairs in sums.values() for samples, _ in pairs)
    seen = {producer(part, *MOVES) for value in samples for part in split_levels(value)}
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
        for node in (*sums, *find_nodes(graph), *_single_samplers(graph, sums)):
            left[str(node.outputs[0].name)] = f"it lies in {where}; only nodes of the main graph are replaced"
    return left
