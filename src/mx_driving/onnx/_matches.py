"""Find matches of deformable attention in an ONNX file, and write a match as a separate file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from .._operator import composition
from .._operator.description import SAMPLING
from . import _file, _find, _trial
from ._forms import NODES, OURS
from ._graph import Unfit, describe_node, extract
from ._nodes import POOLS, LogitInputs, find_nodes, has_logits, name_operator, read_inputs, restore_plugins
from ._runtimes import Arrays
from ._samples import Sampling, make_bare_inputs

SCALE = NODES[OURS]
_LOGITS = "value", "value_spatial_shapes", "reference_points", "sampling_offsets", "attention_logits"
_NARROW: dict[Any, torch.dtype] = {ir.DataType.BFLOAT16: torch.bfloat16, ir.DataType.FLOAT16: torch.float16}
_PLACES = "locations", "sampling_locations", "sample_locations", "reference_points", "sampling_offsets"


@dataclass(frozen=True)
class Match:
    """Deformable attention in a file: standard operators that passed a trial, or one node of a form.

    Attributes:
        name: the name of the computed tensor.
        words: a description of the nodes.
        inputs: role -> tensor. These tensors are the inputs of the match's file.
        tables: name -> tensor of sizes, or index table. These tensors are constants in the match's file.
        nodes: the names of the nodes.
        part: the model that `write_match` writes to the match's file.
        source: the sampling or the node.
        operator: the name of our operator.
    """

    name: str
    words: str
    inputs: dict[str, ir.Value]
    tables: dict[str, ir.Value]
    nodes: tuple[str, ...]
    part: ir.Model
    source: Sampling | ir.Node
    operator: str = SCALE

    @property
    def locations(self) -> list[str]:
        """Return the names of location tensors, whose NaN is not compared; none for our own nodes, which define that result."""
        is_ours = isinstance(self.source, ir.Node) and self.source.domain == OURS
        return [] if is_ours else [str(v.name) for role, v in self.inputs.items() if role in _PLACES]

    @property
    def narrow_dtype(self) -> torch.dtype | None:
        """Return float16 or bfloat16 if a tensor of the match has this dtype, so that it may compute in 16 bits; else None."""
        if isinstance(self.source, Sampling):
            values = [v for node in self.part.graph for v in (*node.inputs, *node.outputs)]
            dtypes = {None if v is None else v.dtype for v in values}
            return next((narrow for dtype, narrow in _NARROW.items() if dtype in dtypes), None)
        return next((narrow for v in self.inputs.values() if (narrow := _NARROW.get(v.dtype))), None)

    @property
    def tensors(self) -> list[ir.Value]:
        return [*self.inputs.values(), *self.tables.values()]


@_file.silence_libraries()
def find_matches(file: _file.LoadedFile) -> tuple[list[Match], dict[str, str]]:
    """Return all matches, and name -> reason for attention that is no match."""
    matches, left, model = [], {}, file.model
    for name, sampling in _find.find_samplings(file):
        if not isinstance(sampling, Sampling):
            left[name] = sampling
            continue
        assert sampling.part is not None
        inputs = sampling.inputs
        tables = {str(v.name): v for v in (*sampling.shapes, *sampling.ends) if v not in inputs.values()}
        name = str(sampling.output.name)
        matches.append(Match(name, sampling.words, inputs, tables, sampling.nodes, sampling.part, sampling))
    for node in find_nodes(model.graph):
        if node.domain == OURS and node.op_type not in SAMPLING:
            continue
        name = str(node.outputs[0].name)
        try:
            if node.op_type in POOLS:
                raise Unfit(f"it is a pool, {describe_node(node)}; attention is verified")
            if has_logits(node):
                LogitInputs(node)  # may raise Unfit
            elif node.domain != OURS:
                read_inputs(node)  # may raise Unfit
        except Unfit as unfit:
            left[name] = str(unfit)
            continue
        operator = name_operator(node)
        roles = _LOGITS if has_logits(node) else SAMPLING[operator].inputs
        tensors = {roles[index]: v for index, v in enumerate(node.inputs) if v is not None}
        tables = {str(v.name): v for role, v in tensors.items() if role in SAMPLING[operator].tables}
        inputs = {role: v for role, v in tensors.items() if str(v.name) not in tables}
        part = extract(model, list(dict.fromkeys(tensors.values())), node.outputs[0])
        matches.append(Match(name, f"one node {node.op_type}", inputs, tables, (str(node.name),), part, node, operator))
    return matches, left


def find_again(match: Match, model: ir.Model) -> Match:
    """Find the match in another file by the names of its tensors.

    Raises:
        Unfit: a name is missing.
    """
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    names = [*(str(v.name) for v in match.inputs.values()), match.name]
    if missing := [name for name in names if name not in values]:
        raise Unfit(f"it has no {missing[0]}")
    ends = [values[name] for name in (*names[:-1], *match.tables) if name in values]
    return replace(match, part=extract(model, ends, values[match.name]))


def write_match(match: Match, arrays: Arrays, path: Path) -> None:
    """Write the match as a file. Its inputs have the names of roles and the sizes of the arrays; its output is "output"."""
    graph = match.part.graph
    roles = {str(v.name): role for role, v in match.inputs.items()}
    ends = {str(v.name): v for v in graph.inputs}
    output = graph.outputs[0]
    for value in [*graph.initializers.values(), *(v for node in graph for v in node.outputs)]:
        if value.name in {*match.inputs, "output"}:
            value.name = f"{value.name}/inside"
    graph.inputs.clear()
    for name, value in ends.items():
        graph.initializers.pop(name, None)
        if name in roles:
            value.name, value.shape = roles[name], ir.Shape(arrays[name].shape)
            graph.inputs.append(value)
        else:
            value.const_value = ir.tensor(arrays[name], name=name)
            graph.register_initializer(value)
    output.name = "output"
    restore_plugins(match.part)
    ir.save(match.part, path)


def read_bare_inputs(match: Match, arrays: Arrays) -> tuple[Tensor, ...]:
    """Return the five inputs of the bare operator. `arrays`: name of a tensor -> array."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    if isinstance(match.source, Sampling):
        return make_bare_inputs(match.source, tuple(tensors[str(v.name)] for v in match.source.ends))
    description = SAMPLING[match.operator]
    if has_logits(match.source):
        # Convert the inputs of a plugin to those of our operator with logits.
        value, shapes, references, offsets, logits = (tensors[str(v.name)] for v in match.source.inputs if v)
        (batch, queries), heads, shapes = references.shape[:2], value.shape[2], shapes.long()
        areas = shapes.prod(1)
        references = references.reshape(batch, queries, -1, 2)
        offsets = offsets.reshape(batch, queries, heads, len(shapes), -1, 2)
        rows = value, shapes, areas.cumsum(0) - areas, references, offsets, logits.reshape(batch, queries, heads, -1)
        return composition.bare_inputs(description.name, *rows, "point")
    inputs: list[Any] = [None if v is None else tensors[str(v.name)] for v in match.source.inputs]
    inputs += [None] * (len(description.inputs) - len(inputs))
    names = [option.split()[1] for option in description.options]
    options = [match.source.attributes[name].value for name in names if name in match.source.attributes]
    return composition.bare_inputs(description.name, *inputs, *options) if description.bare else tuple(inputs)


def draw_across_borders(match: Match, arrays: Arrays) -> Arrays | None:
    """Return arrays of the same sizes with locations across every border of the maps.

    Return None for operators other than multi_scale_deformable_attn.
    """
    if match.operator != SCALE:
        return None
    sampling = match.source
    if not isinstance(sampling, Sampling):
        tensor, shapes, _, _, shares = read_bare_inputs(match, arrays)
        maps, (heads, channels) = tuple((int(height), int(width)) for height, width in shapes), tensor.shape[2:]
        ends = (ir.Value(name=str(v.name), shape=ir.Shape(arrays[str(v.name)].shape)) for v in match.inputs.values())
        value, locations, weights = ends
        points = (shares.shape[4],) * len(maps)
        sampling = Sampling(value, locations, weights, value, maps, points, heads, channels, None)
    names = [str(v.name) for v in sampling.ends]
    random = _trial.draw_inputs(sampling, 1, tuple(arrays[name].shape for name in names))
    return arrays | {name: t.numpy().astype(arrays[name].dtype) for name, t in zip(names, random, strict=True)}
