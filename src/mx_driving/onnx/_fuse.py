"""Deformable attention in somebody else's ONNX file becomes our node for onnxruntime."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ._file import load
from ._graph import Unfit, dims, is_node, source
from ._save import save
from ._search import Sampling, candidates, nearest, sums
from ._trial import padding, prove, tables


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


def certain(model: ir.Model, node: ir.Node, samples: list[ir.Value], weights: ir.Value) -> Sampling:
    """The first candidate that passes its trial. If none does, what is wrong with the likeliest."""
    reasons = []
    for sampling in candidates(node, samples, weights):
        try:
            prove(model, sampling)
            return sampling
        except Unfit as unfit:
            reasons.append(unfit)
    raise (reasons or [Unfit("no tensors have the shapes of the operator's value, locations and weights")])[0]


class _Writer:
    """Nodes in place of a sampling, whose names begin with its output's name and are none of those that are taken."""

    def __init__(self, name: str, taken: set[str]) -> None:
        self.name, self.taken, self.tape = name, taken, ir.tape.Tape()

    def fresh(self, what: str) -> str:
        names = (f"{self.name}/{what}{number or ''}" for number in itertools.count())
        name = next(name for name in names if name not in self.taken)
        self.taken.add(name)
        return name

    def table(self, what: str, numbers: Any, dtype: Any = np.int64) -> ir.Value:
        name = self.fresh(what)
        return self.tape.initializer(ir.tensor(np.array(numbers, dtype), name=name), name=name)

    def op(self, kind: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        name = self.fresh(kind)
        return self.tape.op(kind, inputs, attributes or None, domain=domain, name=name, output=ir.Value(name=name))

    def shaped(self, value: ir.Value, sizes: tuple[int, ...]) -> ir.Value:
        """Two axes as they are, then these."""
        if dims(value)[2:] == sizes:
            return value
        return self.op("Reshape", value, self.table("shape", [0, 0, *sizes]))

    def samples(self, value: ir.Value, sampling: Sampling, *last: int) -> ir.Value:
        """Locations or weights with an axis of levels and one of points, the same number for each level."""
        heads, points = sampling.num_heads, sampling.points
        if len(set(points)) > 1:
            places, mask = padding(points)
            value = self.op("Gather", value, self.table("places", places), axis=3)
            if not last:
                assert sampling.weights.dtype is not None
                value = self.op("Mul", value, self.table("mask", mask, sampling.weights.dtype.numpy()))
        return self.shaped(value, (heads, len(points), max(points), *last))


def _names(model: ir.Model) -> set[str]:
    """All names of tensors and nodes: a subgraph must not hide one of the graph around it."""
    graphs = list(model.graphs())
    nodes = [node for graph in graphs for node in graph]
    values = [*(v for g in graphs for v in (*g.inputs, *g.initializers.values())), *(v for n in nodes for v in n.outputs)]
    return {str(named.name) for named in (*values, *nodes)}


def _replace(model: ir.Model, sampling: Sampling) -> None:
    old = sampling.output
    write = _Writer(str(old.name), _names(model))
    value = write.shaped(sampling.value, (sampling.num_heads, sampling.channels))
    locations, weights = write.samples(sampling.locations, sampling, 2), write.samples(sampling.weights, sampling)
    shapes, starts = tables(sampling)
    inputs = value, write.table("spatial_shapes", shapes), write.table("level_start_index", starts), locations, weights
    new = write.op("multi_scale_deformable_attn", *inputs, domain="mx_driving")
    producer = old.producer()
    assert producer is not None
    new.shape, new.type = old.shape, old.type
    for table in write.tape.initializers:
        model.graph.register_initializer(table)
    model.graph.insert_after(producer, write.tape.nodes)
    name, old.name = old.name, write.fresh("before")
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    new.name = name


def in_words(sampling: Sampling) -> str:
    maps = ", ".join(f"{height} x {width}" for height, width in sampling.maps)
    points = " + ".join(map(str, sampling.points)) if len(set(sampling.points)) > 1 else str(sampling.points[0])
    return f"{sampling.num_heads} heads of {sampling.channels} channels, {points} points on maps of {maps}"


def _fuse(model: ir.Model, path: Path) -> Fused:
    report, seen = Fused(path), set()
    for node, (samples, weights) in sums(model.graph).items():
        seen.update(source(part).producer() for part in samples)
        name = str(node.outputs[0].name)
        try:
            sampling = certain(model, node, samples, weights)
        except Unfit as unfit:
            report.left[name] = str(unfit)
        else:
            report.replaced[name] = in_words(sampling)
            _replace(model, sampling)
    for node in nearest(model.graph):
        report.left[str(node.outputs[0].name)] = 'its samples are nearest rows ("discrete"); the operator interpolates'
    for node in model.graph:
        if is_node(node, "GridSample") and node not in seen:
            report.left[str(node.outputs[0].name)] = "it is not one of the levels whose weighted samples are summed up"
    return report


def _what_is_there(model: ir.Model) -> str:
    ours = Counter(node.op_type for node in model.graph if node.domain == "mx_driving")
    nodes = ", ".join(f"{count} of our node {name}" for name, count in ours.items())
    return f"it has {nodes} already, and no other weighted samples" if ours else "it has no weighted samples"


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Other libraries log, with tracebacks, what they cannot infer."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript", "onnxruntime.tools.symbolic_shape_infer")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def fuse(path_in: str | os.PathLike[str], path_out: str | os.PathLike[str]) -> Fused:
    source, target = Path(path_in), Path(path_out)
    if source.resolve() == target.resolve():
        raise ValueError(f"path_out must be another file than path_in; got {target} for both")
    with silent():
        model = load(source)
        report = _fuse(model, target)
    if not report.replaced:
        why = "; ".join(f"{name}: {reason}" for name, reason in report.left.items()) or _what_is_there(model)
        raise ValueError(f"path_in must hold deformable attention made of GridSample or gathers; got {source} ({why})")
    save(model, source, target)
    return report
