"""Attention whose value, locations or weights are numbers of the file: exporters fold all that depends on no input.

Each level then has a constant map, grid or share of its own. The search and the trial need one tensor for all levels. So write
that tensor as an initializer, and nodes that compute each level's constant from it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from ._graph import constant, dims, is_node, number, source, sources
from ._levels import parts
from ._writer import Writer

Array = np.ndarray[Any, Any]
Use = tuple[ir.Node, int]  # a node, and the index of an input of it


def batches(samples: list[ir.Value], weights: list[ir.Value]) -> list[int]:
    """Return what the batch may be if a constant is to be spelled out; nothing if none is."""
    uses = [*_uses_of_samplers(samples, 0), *_uses_of_samplers(samples, 1), *_uses_of_weights(samples, weights)]
    if not any(_array(use) is not None for use in uses):
        return []
    values = {v for node, index in uses for v in sources(node.inputs[index])}  # pyright: ignore[reportArgumentType]
    return sorted({1, *(size for v in values for size in dims(v)[:1] if isinstance(size, int) and size > 0)})


@contextmanager
def spelled_out(model: ir.Model, samples: list[ir.Value], weights: list[ir.Value], batch: int) -> Iterator[list[ir.Value]]:
    """Write constants of levels as parts of one tensor, and give the new weights. If an error is raised, undo it."""
    shares = _uses_of_weights(samples, weights)
    maps, grids, masks = _uses_of_samplers(samples, 0), _uses_of_samplers(samples, 1), _masks(samples, shares)
    replaced = [((node, index), node.inputs[index]) for node, index in (*shares, *maps, *grids, *masks)]
    try:
        _drop(model, masks)
        _spell_out(model, shares, batch, "weights")
        _spell_out(model, maps, batch, "value")
        _spell_out(model, grids, batch, "locations")
        yield [node.inputs[index] for node, index in shares] or weights  # pyright: ignore[reportReturnType]
    except BaseException:
        for (node, index), old in replaced:
            node.replace_input_with(index, old)
        raise


def _uses_of_samplers(samples: list[ir.Value], index: int) -> list[Use]:
    """Return the maps (0) or the grids (1) of all levels."""
    nodes = [source(part).producer() for part in samples]
    return [(node, index) for node in nodes if node is not None and is_node(node, "GridSample")]


def _uses_of_weights(samples: list[ir.Value], weights: list[ir.Value]) -> list[Use]:
    """Return where weights are multiplied with these samples."""
    uses = [(use.node, use.idx) for v in weights for use in v.uses() if is_node(use.node, "Mul")]
    return [(node, index) for node, index in uses if (other := node.inputs[1 - index]) and {*parts(other)} & {*samples}]


def _array(use: Use) -> Array | None:
    """Return the numbers of a constant, or of a part or another view of a constant."""
    value = use[0].inputs[use[1]]
    assert value is not None
    if (array := constant(value)) is not None or constant(source(value)) is None or value.producer() is None:
        return array
    graph = value.graph
    assert graph is not None
    try:
        part = ir.Model(ir.convenience.extract(graph, [], [value]), ir_version=10)
        return ReferenceEvaluator(ir.serde.serialize_model(ir.external_data.load_to_model(part))).run(None, {})[0]  # pyright: ignore
    except Exception:  # a step after the constant reads an input of the graph, or is no right node: it has dozens of kinds
        return None


def _spell_out(model: ir.Model, uses: list[Use], batch: int, what: str) -> None:
    """Compute the constants of all levels from one tensor. Leave them if a level has none, or the batch does not fit."""
    arrays = [array for use in uses if (array := _array(use)) is not None]
    if what == "weights":
        arrays = [_as_large_as_samples(use, array) for use, array in zip(uses, arrays, strict=False)]
    if not uses or len(arrays) < len(uses) or any(a.ndim != 4 or a.size == 0 or a.shape[0] % batch for a in arrays):
        return
    perm, axis = {"value": ((0, 3, 1, 2), 1), "locations": ((0, 2, 1, 3, 4), 3), "weights": ((0, 2, 1, 3), 3)}[what]
    blocks = [_as_block(array, batch, what).transpose(perm) for array in arrays]
    if len({block.shape[:axis] + block.shape[axis + 1 :] for block in blocks}) > 1:
        return
    node, index = uses[0]
    write = Writer(model, node.inputs[index])  # pyright: ignore[reportArgumentType]
    whole = write.table(what, np.concatenate(blocks, axis), arrays[0].dtype)
    ends = list(itertools.accumulate(block.shape[axis] for block in blocks))
    for (node, index), start, end, array in zip(uses, [0, *ends], ends, arrays, strict=False):
        part = write.op("Slice", whole, *(write.table("limit", [limit]) for limit in (start, end, axis)))
        moved = write.op("Transpose", part, perm=[int(axis) for axis in np.argsort(perm)])
        new = write.op("Reshape", moved, write.table("shape", array.shape))
        if what == "locations":
            two, one = (write.table("number", factor, array.dtype) for factor in (2, 1))
            new = write.op("Sub", write.op("Mul", new, two), one)
        new.shape, new.type = ir.Shape(array.shape), whole.type
        node.replace_input_with(index, new)
    write.put_first()


def _as_large_as_samples(use: Use, array: Array) -> Array:
    """Return weights [batch * heads, 1, queries, points], which a file may broadcast."""
    node, index = use
    sizes = dims(node.inputs[1 - index])  # pyright: ignore[reportArgumentType]
    if len(sizes) != 4 or not all(isinstance(size, int) for size in sizes):
        return array
    shape: Any = (sizes[0], 1, *sizes[2:])
    return np.broadcast_to(array, shape) if np.broadcast_shapes(array.shape, shape) == shape else array


def _as_block(array: Array, batch: int, what: str) -> Array:
    """Split batch and heads, and take the axes together that the operator has in one."""
    if what == "value":
        return array.reshape(batch, -1, array.shape[1], array.shape[2] * array.shape[3])
    if what == "locations":
        return ((array.astype(np.float64) + 1) / 2).reshape(batch, -1, *array.shape[1:])
    return array.reshape(batch, -1, *array.shape[2:])


def _masks(samples: list[ir.Value], shares: list[Use]) -> list[Use]:
    """Return constant masks of weights that are False only where the grid is off the map: there the operator reads nothing."""
    grids, masks = _uses_of_samplers(samples, 1), []
    for (node, index), grid in zip(shares, grids, strict=False) if len(shares) == len(grids) else ():
        *_, last = sources(node.inputs[index])  # pyright: ignore[reportArgumentType]
        where, numbers = last.producer(), _array(grid)
        if where is None or numbers is None or not is_node(where, "Where") or number(where.inputs[2]) != 0:
            continue
        mask, (height, width) = constant(where.inputs[0]), dims(grid[0].inputs[0])[2:]  # pyright: ignore[reportArgumentType]
        pixels = ((numbers + 1) * np.array([width, height]) - 1) / 2
        inside = ((pixels > -1) & (pixels < np.array([width, height]))).all(-1)
        if mask is not None and mask.shape == inside.shape and (mask | ~inside).all():
            masks.append((where, 0))
    return masks


def _drop(model: ir.Model, masks: list[Use]) -> None:
    for node, index in masks:
        write = Writer(model, node.outputs[0])
        node.replace_input_with(index, write.table("mask", np.ones_like(constant(node.inputs[index])), np.bool_))
        write.put_first()
