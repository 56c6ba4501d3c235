"""Deformable attention in somebody else's ONNX file becomes our node for onnxruntime."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx_ir as ir

from ._constants import batches, spelled_out
from ._file import check_path, load
from ._forms import DOMAIN, WRITE, Call, Sizes
from ._graph import Unfit, dims, is_node, source
from ._marks import KEY, inside, mark, marked, read
from ._nodes import nodes, rewrite
from ._save import save
from ._search import Sampling, candidates, nearest, sums
from ._trial import padding, prove, tables
from ._writer import Writer, written

_LIKELIEST = 24  # candidates; the right one is among the first five in all files that we know


@dataclass(frozen=True)
class Fused:
    """What `fuse` found in a file, by the name of the tensor that the samples are summed up in.

    Attributes:
        path: the file that was written.
        replaced: name -> what became a node, in words.
        left: name -> why it stays as it was. GridSample nodes that belong to no weighted sum are here, too.
    """

    path: Path
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.replaced)} replaced, {len(self.left)} left"]
        lines += [f"  replaced {name}: {what}" for name, what in self.replaced.items()]
        return "\n".join(lines + [f"  left {name}: {why}" for name, why in self.left.items()])


def certain(model: ir.Model, node: ir.Node, samples: list[ir.Value], weights: list[ir.Value]) -> Sampling:
    """Return the first candidate that passes its trial. Constants of levels become one tensor, for each possible batch."""
    reasons = []
    for batch in batches(samples, weights):
        try:
            with spelled_out(model, samples, weights, batch) as spelled:
                return _certain(model, node, samples, spelled)
        except Unfit as unfit:
            reasons.append(unfit)
    if reasons:
        raise reasons[0]
    return _certain(model, node, samples, weights)


def _certain(model: ir.Model, node: ir.Node, samples: list[ir.Value], weights: list[ir.Value]) -> Sampling:
    """Return the first candidate that passes its trial. If none of the likeliest does, raise what is wrong with the first."""
    reasons = []
    for sampling in candidates(node, samples, weights)[:_LIKELIEST]:
        try:
            prove(model, sampling)
            return sampling
        except Unfit as unfit:
            reasons.append(unfit)
    raise (reasons or [Unfit("no tensors have the shapes of the operator's value, locations and weights")])[0]


def _as_marked(model: ir.Model, node: ir.Node) -> Sampling:
    prove(model, sampling := read(model.graph, node))
    return sampling


def places(model: ir.Model) -> dict[ir.Node, Callable[[], Sampling]]:
    """The last node of each place that `fuse` wrote as gathers, and of each that others wrote; and what proves it or raises
    Unfit."""
    found, written = {node: partial(_as_marked, model, node) for node in marked(model.graph)}, set()
    for node in found:
        with contextlib.suppress(Unfit):
            written |= inside(read(model.graph, node))
    others = {node: both for node, both in sums(model.graph).items() if node not in written}
    return found | {node: partial(certain, model, node, *both) for node, both in others.items()}


def left_in_subgraphs(model: ir.Model) -> dict[str, str]:
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


def _single_samplers(graph: ir.Graph) -> list[ir.Node]:
    """Return GridSample nodes that belong to no weighted sum."""
    seen = {source(part).producer() for samples, _ in sums(graph).values() for part in samples}
    return [node for node in graph if is_node(node, "GridSample") and node not in seen]


def _subgraphs(attribute: ir.Attr) -> list[ir.Graph]:
    if attribute.type == ir.AttributeType.GRAPH:
        return [attribute.value]
    return list(attribute.value) if attribute.type == ir.AttributeType.GRAPHS else []


def _samples(write: Writer, value: ir.Value, sampling: Sampling, *last: int) -> ir.Value:
    """Locations or weights with an axis of levels and one of points, the same number for each level."""
    points = sampling.points
    if len(set(points)) > 1:
        places, mask = padding(points)
        value = write.like(value, "Gather", write.table("places", places), axis=3)
        if not last:
            assert value.dtype is not None
            value = write.like(value, "Mul", write.table("mask", mask, value.dtype.numpy()))
    return write.shaped(value, sampling.num_heads, len(points), max(points), *last)


def _call(write: Writer, sampling: Sampling) -> Call:
    heads, channels = sampling.num_heads, sampling.channels
    value = write.shaped(sampling.value, heads, channels)
    locations, weights = _samples(write, sampling.locations, sampling, 2), _samples(write, sampling.weights, sampling)
    shapes, starts = tables(sampling)
    given = value, write.table("spatial_shapes", shapes), write.table("level_start_index", starts), locations, weights
    batch = dims(sampling.value)[0]
    fixed = batch if isinstance(batch, int) else None
    return Call(*given, Sizes(fixed, sampling.num_keys, heads, channels, sampling.maps, tuple(starts), max(sampling.points)))


def _replace(model: ir.Model, sampling: Sampling, form: str, **options: str | None) -> None:
    with written(model, sampling.output) as write:
        new = WRITE[form](write, call := _call(write, sampling), **options)
        if form == "gather":
            mark(new, call)
        write.put_in_place(new)


def in_words(sampling: Sampling) -> str:
    maps = ", ".join(f"{height} x {width}" for height, width in sampling.maps)
    points = " + ".join(map(str, sampling.points)) if len(set(sampling.points)) > 1 else str(sampling.points[0])
    return f"{sampling.num_heads} heads of {sampling.channels} channels, {points} points on maps of {maps}"


def _fuse(model: ir.Model, path: Path, form: str, **options: str | None) -> Fused:
    report, others = Fused(path, left=left_in_subgraphs(model)), nodes(model.graph)
    singles = _single_samplers(model.graph)
    for node in nearest(model.graph):
        report.left[str(node.outputs[0].name)] = 'its samples are nearest rows ("discrete"); the operator interpolates'
    for node, proved in places(model).items():
        if form == "gather" and KEY in node.metadata_props:
            continue
        name = str(node.outputs[0].name)
        try:
            sampling = proved()
            _replace(model, sampling, form, **options)
            report.replaced[name] = in_words(sampling)
        except Unfit as unfit:
            report.left[name] = str(unfit)
    _rewrite(model, others, report, form, **options)
    for node in singles:
        report.left[str(node.outputs[0].name)] = "it is not one of the levels whose weighted samples are summed up"
    return report


def _what_is_there(model: ir.Model) -> str:
    there = Counter(f"{node.domain}::{node.op_type}" for node in nodes(model.graph))
    words = ", ".join(f"{count} of the node {name}" for name, count in there.items())
    if gathers := len(marked(model.graph)):
        words += f"{', ' * bool(words)}{gathers} in the form gather"
    return f"it has {words} already, and no other weighted samples" if words else "it has no weighted samples"


def _rewrite(model: ir.Model, others: list[ir.Node], report: Fused, form: str, **options: str | None) -> None:
    """Nodes of other forms."""
    for node in others:
        name = str(node.outputs[0].name)
        try:
            if node.domain != DOMAIN.get(form):
                report.replaced[name] = rewrite(model, node, form, **options)
        except Unfit as unfit:
            report.left[name] = str(unfit)


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Other libraries log what they cannot infer, with tracebacks, or warn of it."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript", "onnxruntime.tools.symbolic_shape_infer")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _write(path_in: Path, path_out: Path, form: str, **options: str | None) -> Fused:
    model = load(path_in)
    report = _fuse(model, path_out, form, **options)
    if not report.replaced:
        why = "; ".join(f"{name}: {reason}" for name, reason in report.left.items()) or _what_is_there(model)
        raise ValueError(f"path_in must hold deformable attention made of GridSample or gathers; got {path_in} ({why})")
    save(model, path_in, path_out)
    return report


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def fuse(path_in: str | os.PathLike[str], path_out: str | os.PathLike[str], form: str, **options: str | None) -> Fused:
    source, target = check_path("path_in", path_in), check_path("path_out", path_out)
    if source.resolve() == target.resolve():
        raise ValueError(f"path_out must be another file than path_in; got {target} for both")
    try:
        with silent():
            return _write(source, target, form, **options)
    except ir.serde.SerdeError as error:  # onnx_ir's, of a text that is not UTF-8, for one
        raise ValueError(f"path_in must be an ONNX file; got {source}: {_first_cause(error)}") from None
