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
