"""Places of deformable attention in an ONNX file, each as a file of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from .. import _composition
from .._operators import SAMPLING
from ..onnx import _file, _fuse, _trial
from ..onnx._forms import NODES, OURS
from ..onnx._graph import Unfit, constant
from ..onnx._nodes import as_ours
from ..onnx._search import Sampling

Array = np.ndarray[Any, Any]
Arrays = dict[str, Array]
SCALE = NODES[OURS]
PLUGINS = {*NODES.values()} - {SCALE}  # NVIDIA's, and the vendor's for its converter


@dataclass(frozen=True)
class Place:
    """Where a file samples deformably: standard operators that are certain to, or one node.

    Attributes:
        name: of the tensor that it computes.
        words: what it is made of.
        fed: role -> tensor, the inputs of the place's own file.
        fixed: sizes and index tables, by name. The place's own file holds them as constants.
        part: the place's own file, before `write`.
        of: what says how the operator is called.
    """

    name: str
    words: str
    fed: dict[str, ir.Value]
    fixed: dict[str, ir.Value]
    part: ir.Model
    of: Sampling | ir.Node

    @property
    def operator(self) -> str:
        return self.of.op_type if isinstance(self.of, ir.Node) and self.of.op_type in SAMPLING else SCALE

    @property
    def bare(self) -> str:
        return SAMPLING[self.operator].bare or self.operator


def places(model: ir.Model) -> tuple[list[Place], dict[str, str]]:
    """All places, and name -> why weighted samples are none."""
    found, left = [], _fuse.left_in_subgraphs(model)
    for node, proved in _fuse.places(model).items():
        try:
            found.append(_of_sampling(model, proved()))
        except Unfit as unfit:
            left[str(node.outputs[0].name)] = str(unfit)
    return found + [_of_node(model, node) for node in model.graph if _samples(node)], left


def _samples(node: ir.Node) -> bool:
    return (node.domain == OURS and node.op_type in SAMPLING) or node.op_type in PLUGINS


def _of_sampling(model: ir.Model, sampling: Sampling) -> Place:
    fed = {"value": sampling.value, "locations": sampling.locations, "weights": sampling.weights}
    sizes = _trial.sizes_read(sampling)
    part = _trial.cut(model, sampling, sizes)
    return Place(str(sampling.output.name), _fuse.in_words(sampling), fed, {str(v.name): v for v in sizes}, part, sampling)


def _of_node(model: ir.Model, node: ir.Node) -> Place:
    row = SAMPLING[node.op_type if node.op_type in SAMPLING else SCALE]
    given = {row.inputs[place]: v for place, v in enumerate(node.inputs) if v is not None}
    fixed = {str(v.name): v for role, v in given.items() if role in row.tables}
    fed = {role: v for role, v in given.items() if str(v.name) not in fixed}
    graph = ir.convenience.extract(model.graph, list(dict.fromkeys(given.values())), [node.outputs[0]])
    part = ir.external_data.load_to_model(ir.Model(graph, ir_version=model.ir_version))
    return Place(str(node.outputs[0].name), f"one node {node.op_type}", fed, fixed, part, node)


def rewritten(place: Place, model: ir.Model) -> Place:
    """The place in another file that was made of its own, with the same names of tensors.

    Raises:
        Unfit: a tensor is not there.
    """
    values = {str(v.name): v for v in (*model.graph.inputs, *model.graph.initializers.values(), *_file.outputs(model))}
    names = [*(str(v.name) for v in place.fed.values()), place.name]
    if missing := [name for name in names if name not in values]:
        raise Unfit(f"it has no {missing[0]}")
    ends = [values[name] for name in (*names[:-1], *place.fixed) if name in values]
    graph = ir.convenience.extract(model.graph, ends, [values[place.name]])
    part = ir.external_data.load_to_model(ir.Model(graph, ir_version=model.ir_version))
    return replace(place, part=part)


def write(place: Place, arrays: Arrays, path: Path) -> None:
    """The place's own file: inputs are named by their roles and have these arrays' sizes, and the output is "output"."""
    graph = place.part.graph
    roles = {str(v.name): role for role, v in place.fed.items()}
    inputs = {str(v.name): v for v in graph.inputs}
    output = graph.outputs[0]
    for value in [*graph.initializers.values(), *(v for node in graph for v in node.outputs)]:
        if value.name in {*place.fed, "output"}:
            value.name = f"{value.name}/inside"
    graph.inputs.clear()
    for name, value in inputs.items():
        graph.initializers.pop(name, None)
        if name in roles:
            value.name, value.shape = roles[name], ir.Shape(arrays[name].shape)
            graph.inputs.append(value)
        else:
            value.const_value = ir.tensor(arrays[name], name=name)
            graph.register_initializer(value)
    output.name = "output"
    ir.save(place.part, path)


def call(place: Place, arrays: Arrays) -> tuple[Tensor, ...]:
    """The five inputs of the bare operator, of arrays by tensors' names."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if isinstance(place.of, Sampling):
        return _trial.call(place.of, tuple(tensors[str(v.name)] for v in place.fed.values()))
    row = SAMPLING[place.operator]
    inputs: list[Any] = [None if v is None else tensors[str(v.name)] for v in place.of.inputs]
    inputs += [None] * (len(row.inputs) - len(inputs))
    options = {option.split()[1]: place.of.attributes for option in row.options}
    chosen = [given[name].value for name, given in options.items() if name in given]
    return _composition.bare_inputs(row.name, *inputs, *chosen) if row.bare else tuple(inputs)


def across_borders(place: Place, arrays: Arrays) -> Arrays | None:
    """Arrays of the same sizes whose locations lie on the maps and across every border; None where nobody can make them."""
    if place.operator != SCALE:
        return None
    value, shapes, _, locations, weights = call(place, arrays)
    sampling = place.of if isinstance(place.of, Sampling) else _as_sampling(place, value, shapes, weights)
    random = _trial.inputs(sampling, 1, *locations.shape[:2])
    changed = {str(v.name): t for v, t in zip(place.fed.values(), random, strict=True)}
    return arrays | {n: t.numpy().astype(arrays[n].dtype).reshape(arrays[n].shape) for n, t in changed.items()}


def _as_sampling(place: Place, value: Tensor, shapes: Tensor, weights: Tensor) -> Sampling:
    assert isinstance(place.of, ir.Node)
    maps = tuple((int(height), int(width)) for height, width in shapes)
    points = (weights.shape[4],) * len(maps)
    ends, (heads, channels) = list(place.fed.values()), value.shape[2:]
    return Sampling(ends[0], ends[1], ends[2], place.of.outputs[0], maps, points, heads, channels)


def as_reference(model: ir.Model, found: list[Place]) -> dict[str, ir.Value]:
    """Change the model into one that onnxruntime runs, and that gives the places' inputs, too. Returns those by name."""
    for place in found:
        if isinstance(place.of, ir.Node) and place.of.op_type in PLUGINS:
            as_ours(place.of)
            model.graph.opset_imports[OURS] = 1
    wanted = {str(v.name): v for place in found for v in (*place.fed.values(), *place.fixed.values())}
    computed = (v for v in wanted.values() if v.producer() is not None and constant(v) is None)
    model.graph.outputs.extend(v for v in computed if not v.is_graph_output())
    return wanted
