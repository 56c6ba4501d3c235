"""Find deformable attention among the weighted sums of an ONNX graph. Give a reason for sums that are not attention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from ._constants import find_constants
from ._file import LoadedFile
from ._graph import MOVES, Unfit, find_producer, is_node, name_unshaped
from ._identities import bypass_identities
from ._nodes import find_nodes
from ._order import walk_nodes
from ._samples import split_levels
from ._search import Pairs, Sampling, find_candidates, find_sums, find_table_candidates, find_tables
from ._trial import prove

_LIKELIEST = 24  # at most so many candidates are tried; in all known files the right candidate is among the first five


def find_samplings(file: LoadedFile, tables: bool = True) -> Iterator[tuple[str, Sampling | str]]:
    """For each weighted sum, yield the name of its tensor, and the sampling that passes its trial or the reason why none does.

    GridSample nodes outside the weighted sums of the main graph come first. The caller may replace a sampling before it takes
    the next, because the search runs in a copy. `tables=False` leaves out the form "gather".
    """
    copy = replace(file, model=file.model.clone())
    bypassed = bypass_identities(copy.model)
    for name, sampling in _search(copy, tables):
        if isinstance(sampling, Sampling):
            part = sampling.extract()
            inputs = dict.fromkeys(str(v.name) for node in part for v in node.inputs if v is not None)
            names = *(str(node.name) for node in part), *(node for value in inputs for node in bypassed.get(value, ()))
            sampling = replace(sampling.find_in(file.model), part=part, nodes=names)
        yield name, sampling


def _search(file: LoadedFile, tables: bool) -> Iterator[tuple[str, Sampling | str]]:
    graph = file.model.graph
    corners, sums = find_tables(graph), find_sums(graph)
    yield from _find_in_subgraphs(file.model).items()
    for node in _find_single_samplers(graph, sums):
        yield str(node.outputs[0].name), "it is not one of the levels whose weighted samples are summed up"
    for node in [*(corners if tables else ()), *(node for node in sums if node not in corners)]:
        name = str(node.outputs[0].name)
        try:
            if node in corners:
                yield name, _prove_first(file, find_table_candidates(node, corners[node]))
            else:
                yield name, _prove_sum(file, node, sums[node])
        except Unfit as unfit:
            yield name, str(unfit) + name_unshaped(node.outputs[0])


def _prove_sum(file: LoadedFile, node: ir.Node, pairs: Pairs) -> Sampling:
    """Return the first candidate that passes its trial. If the levels have constant inputs, first try tensors made of these."""
    return _take_first(lambda constants: _prove_first(file, find_candidates(node, pairs, constants)), find_constants(pairs))


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
