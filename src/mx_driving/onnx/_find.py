"""Which weighted sums of an ONNX graph are deformable attention, and why others are none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx_ir as ir

from ._constants import batches, spelled_out
from ._graph import Unfit, is_node, source
from ._nodes import nodes
from ._quantized import has_quantizers, reason, without_quantizers
from ._search import Sampling, candidates, nearest, sums
from ._table import find_tables, table_candidates
from ._trial import part, prove

_LIKELIEST = 24  # candidates; the right one is among the first five in all files that we know


def find_samplings(model: ir.Model, tables: bool = True) -> Iterator[tuple[str, Sampling | str]]:
    """Yield the tensor in which samples are summed up, and the sampling that passes its trial, or a reason why none does.

    A caller may replace a sampling before it asks for the next one. `tables=False` leaves out the form "gather".
    """
    corners = find_tables(model.graph)
    levels = {node: both for node, both in sums(model.graph).items() if node not in corners}
    for node in [*(corners if tables else ()), *levels]:
        try:
            if node in corners:
                sampling = _prove_one(model, table_candidates(node, corners[node]))
            else:
                sampling = certain(model, node, *levels[node])
            yield str(node.outputs[0].name), sampling
        except Unfit as unfit:
            yield str(node.outputs[0].name), str(unfit)


def certain(model: ir.Model, node: ir.Node, samples: list[ir.Value], weights: list[ir.Value]) -> Sampling:
    """Return the first candidate that passes its trial. Constants of levels become one tensor, for each possible batch."""
    reasons = []
    for batch in batches(samples, weights):
        try:
            with spelled_out(model, samples, weights, batch) as spelled:
                return _prove_one(model, candidates(node, samples, spelled))
        except Unfit as unfit:
            reasons.append(unfit)
    if reasons:
        raise reasons[0]
    return _prove_one(model, candidates(node, samples, weights))


def _prove_one(model: ir.Model, guesses: list[Sampling]) -> Sampling:
    """Return the first candidate that passes its trial. If none of the likeliest does, raise what is wrong with the first."""
    reasons = []
    for sampling in guesses[:_LIKELIEST]:
        try:
            return prove(model, sampling)
        except Unfit as unfit:
            reasons.append(unfit)
    raise (reasons or [Unfit("no tensors have the shapes of the operator's value, locations and weights")])[0]


def find_left(model: ir.Model) -> dict[str, str]:
    """Return name -> reason of samples that are in no weighted sum of the main graph, or are nearest rows."""
    left = _find_in_subgraphs(model)
    for node in nearest(model.graph):
        left[str(node.outputs[0].name)] = 'its samples are nearest rows ("discrete"); the operator interpolates'
    for node in _single_samplers(model.graph):
        left[str(node.outputs[0].name)] = "it is not one of the levels whose weighted samples are summed up"
    return left


def explain_quantized(model: ir.Model, left: dict[str, str]) -> None:
    """Say of attention that int8 tools have quantised that it is, rather than what each of its GridSample nodes lacks."""
    if not left or not has_quantizers(model):
        return
    copy, removed = without_quantizers(model)
    for name, sampling in find_samplings(copy):
        if isinstance(sampling, Sampling):
            nodes, _ = part(sampling)
            if why := reason(nodes, {*sampling.ends}, removed):
                for node in nodes:
                    left.pop(str(node.outputs[0].name), None)
                left[name] = why


def _single_samplers(graph: ir.Graph) -> list[ir.Node]:
    """Return GridSample nodes that belong to no weighted sum."""
    seen = {source(part).producer() for samples, _ in sums(graph).values() for part in samples}
    return [node for node in graph if is_node(node, "GridSample") and node not in seen]


def _find_in_subgraphs(model: ir.Model) -> dict[str, str]:
    """Return name -> reason of attention in branches of If, bodies of Loop, and functions that were not inlined."""
    left: dict[str, str] = {}
    roots: list[tuple[Any, str]] = [(model.graph, "")]
    roots += [(function, f"the local function {function.domain}::{function.name}") for function in model.functions.values()]
    for root, function in roots:
        graphs = {root: function} | {
            graph: f"a subgraph of {node.op_type} ({node.name})"
            for node in ir.traversal.RecursiveGraphIterator(root)
            for attribute in node.attributes.values()
            for graph in _subgraphs(attribute)
        }
        graphs.pop(model.graph, None)
        for graph, where in graphs.items():
            for node in (*sums(graph), *nearest(graph), *nodes(graph), *_single_samplers(graph)):
                left[str(node.outputs[0].name)] = f"it lies in {where}; only nodes of the main graph are replaced"
    return left


def _subgraphs(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.value]
    return list(attribute.value) if attribute.type == ir.AttributeType.GRAPHS else []
