"""Leave out numbers that depend on NaN or infinite locations: implementations sample different numbers there.

torch's older exporter writes such locations for a level of one row, for which it computes a linspace of one step.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import numpy as np
import onnx_ir as ir
import torch
from torch import Tensor

from ._graph import INTEGER, add_outputs, read_constant, walk_back
from ._session import Arrays

Run = Callable[[ir.Model], Arrays]  # model -> outputs by name
_INSTEAD = 0.37  # replaces NaN and infinity. The location is on every map, and no implementation samples there for NaN.
_FAR = -10.0  # off every map
# `_find_origin` runs the model at most _RUNS times, and reads at most _NEAREST tensors in a run.
_NEAREST, _RUNS = 64, 16


def leave_out(inputs: tuple[Tensor, ...], output: Tensor) -> tuple[tuple[Tensor, ...], Tensor, int]:
    """Move queries with NaN or infinite locations off the map, and zero their output. Return inputs, output, and the number of
    these queries."""
    value, shapes, starts, locations, weights = inputs
    left_out = ~locations.isfinite().flatten(2).all(2)
    locations = torch.where(left_out.reshape(*left_out.shape, *[1] * (locations.ndim - 2)), _FAR, locations)
    output = torch.where(left_out[..., None], 0, output)
    return (value, shapes, starts, locations, weights), output, int(left_out.sum())


def find_not_finite(model: ir.Model, names: Iterable[str], run: Run) -> list[str]:
    """Return the names of the tensors with NaN or infinity."""
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    arrays = _compute_arrays(model, [values[name] for name in names if name in values], run)
    return [name for name, array in arrays.items() if not np.isfinite(array).all()]


def run_with_finite(model: ir.Model, names: list[str], run: Run) -> tuple[Arrays, str]:
    """Replace NaN and infinity in these tensors by finite numbers. Return the outputs, and the source of the NaN in words."""
    origin, changed = _find_origin(model, names[0], run), model.clone()
    values = ir.convenience.create_value_mapping(changed.graph, include_subgraphs=False)
    for value in (values[name] for name in names):
        uses, tape, producer = list(value.uses()), ir.tape.Tape(), value.producer()
        is_wide = value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE)
        dtype = value.dtype if is_wide and value.dtype else ir.DataType.FLOAT  # onnxruntime's kernels take float32 and float64
        wide = value if is_wide else tape.op("Cast", [value], {"to": dtype.value})
        zero = tape.op("Sub", [wide, wide])
        instead = tape.op("Constant", [], {"value": ir.tensor(np.array(_INSTEAD, dtype.numpy()))})
        new = tape.op("Where", [tape.op("Equal", [zero, zero]), wide, instead])
        if not is_wide and value.dtype:
            new = tape.op("Cast", [new], {"to": value.dtype.value})
        for use in uses:
            use.node.replace_input_with(use.idx, new)
        if producer is None:
            changed.graph.insert_before(changed.graph[0], tape.nodes)
        else:
            changed.graph.insert_after(producer, tape.nodes)
    return run(changed), origin


def _find_origin(model: ir.Model, name: str, run: Run) -> str:
    """Return in words the source of a tensor's NaN or infinity."""
    value = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)[name]
    for _ in range(_RUNS):
        near = [v for v in itertools.islice(walk_back(value, lambda _: True), _NEAREST) if v.dtype not in INTEGER]
        arrays, start = _compute_arrays(model, near, run), value
        is_bad = np.isnan if np.isnan(arrays[str(value.name)]).any() else np.isinf
        while node := value.producer():  # walk upstream to the first tensor with NaN or infinity
            bad = [v for v in node.inputs if v is not None and v.name in arrays and is_bad(arrays[str(v.name)]).any()]
            if not bad:
                break
            value = bad[0]
        if value is start or node is None or all(v is None or v.name in arrays or v.dtype in INTEGER for v in node.inputs):
            break
    if (node := value.producer()) is not None and node.op_type != "Constant":
        return f"first from {node.op_type} ({node.name})"
    return f"as in the file's {'input' if value.is_graph_input() else 'constant'} {value.name}"


def _compute_arrays(model: ir.Model, values: list[ir.Value], run: Run) -> Arrays:
    """Run the model and return the arrays of these tensors."""
    constants = {str(v.name): array for v in values if (array := read_constant(v)) is not None}
    copy, names = model.clone(), {str(v.name) for v in values} - constants.keys()
    in_copy = ir.convenience.create_value_mapping(copy.graph, include_subgraphs=False)
    add_outputs(copy, (in_copy[name] for name in names))
    return constants | {name: array for name, array in run(copy).items() if name in names}
