"""Attention with constant value, locations or weights: exporters fold nodes that do not depend on an input.

Each level then has a constant map, grid or weights. This module concatenates the constants of all levels to one tensor for the
operator. The tensor is outside the graph: only a replacement writes it into the file. A trial runs the file's own constants.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ._graph import MOVES, are_fixed, dims, find_producer, is_node, read_constant, walk_sources
from ._samples import split_levels
from ._search import Pairs

Array = np.ndarray[Any, Any]


def find_constants(pairs: Pairs) -> Iterator[dict[str, ir.Value]]:
    """For each possible batch, yield role -> constant tensor of all levels. Then yield an empty dictionary."""
    nodes = [find_producer(part, *MOVES) for samples, _ in pairs for part in split_levels(samples)]
    samplers = [node for node in nodes if is_node(node, "GridSample")]
    values = {
        "value": [node.inputs[0] for node in samplers],
        "locations": [node.inputs[1] for node in samplers],
        "weights": [weights for _, weights in pairs],
    }
    arrays = {role: [_compute_constant(v) for v in tensors if v is not None] for role, tensors in values.items()}
    arrays["weights"] = [_broadcast_to_samples(a, samples) for a, (samples, _) in zip(arrays["weights"], pairs, strict=True)]
    whole = {role: numbers for role, numbers in arrays.items() if numbers and all(a is not None for a in numbers)}
    name = pairs[0][0].name
    sizes = {size for tensors in values.values() for v in tensors for s in walk_sources(v, *MOVES) for size in dims(s)[:1]}
    for batch in sorted({1, *(size for size in sizes if isinstance(size, int) and size > 0)}) if whole else ():
        joined = {role: _join_levels(numbers, batch, role) for role, numbers in whole.items()}
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


def _broadcast_to_samples(array: Array | None, samples: ir.Value) -> Array | None:
    """Return weights broadcast to [batch * heads, 1, queries, points]."""
    sizes = dims(samples)
    if array is None or len(sizes) != 4 or not are_fixed(sizes):
        return array
    shape: Any = (sizes[0], 1, *sizes[2:])
    return np.broadcast_to(array, shape) if np.broadcast_shapes(array.shape, shape) == shape else array


def _join_levels(arrays: Sequence[Any], batch: int, role: str) -> ir.TensorProtocol | None:
    """Concatenate the constants of all levels. Return None if their sizes do not fit the batch."""
    axis = 1 if role == "value" else 3
    if any(array.ndim != 4 or array.size == 0 or array.shape[0] % batch for array in arrays):
        return None
    blocks = [_order_axes(array, batch, role) for array in arrays]
    if len({block.shape[:axis] + block.shape[axis + 1 :] for block in blocks}) > 1:
        return None
    # (grid + 1) / 2 would lose digits in 16 bits.
    dtype = np.float32 if role == "locations" and arrays[0].dtype.itemsize == 2 else arrays[0].dtype
    return ir.tensor(np.concatenate(blocks, axis).astype(dtype))


def _order_axes(array: Array, batch: int, role: str) -> Array:
    """Return a level in the operator's layout: separate axes for batch and heads, and one axis of keys for height and width."""
    if role == "value":
        return array.reshape(batch, -1, array.shape[1], array.shape[2] * array.shape[3]).transpose(0, 3, 1, 2)
    if role == "locations":
        return ((array.astype(np.float64) + 1) / 2).reshape(batch, -1, *array.shape[1:]).transpose(0, 2, 1, 3, 4)
    return array.reshape(batch, -1, *array.shape[2:]).transpose(0, 2, 1, 3)
