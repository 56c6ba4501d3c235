"""A whole file's outputs on a runtime beside those of onnxruntime, and how far rounding may move them.

Rounding anywhere in a file acts like a small change of its weights and inputs. So change these by a few ulps, several times:
rounding may move the outputs as far as these changes do. Where a ranking nearly ties, rounding exchanges whole queries;
therefore an output is judged by how many of its numbers moved further, and the changed files say how many may.

Numbers that decide a shape stay: the scales of a Resize, floor(0.9999999 * 1), would leave no batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ._graph import MOVES, before, is_node
from ._matches import Array, Arrays

_SEEDS = 3
_ULPS = 4.0  # that weights and inputs are changed by, at most
_FURTHER = 16.0  # times the usual change; the changes of one tensor differ by less
# Inputs that decide the shape of a node's output, or what is left of it.
_SHAPING = {
    **dict.fromkeys(("Resize", "Upsample", "Pad", "Slice", "Clip", "NonMaxSuppression"), (1, 2, 3, 4)),
    **dict.fromkeys(("Range", "ConstantOfShape"), (0, 1, 2)),
    **dict.fromkeys(("Reshape", "Expand", "Tile", "TopK", "OneHot", "Split", "AffineGrid"), (1,)),
}
_OF_SHAPES = MOVES | {
    "Add",
    "Cast",
    "Ceil",
    "Concat",
    "Div",
    "Floor",
    "Max",
    "Min",
    "Mul",
    "ReduceProd",
    "Round",
    "Sub",
    "Where",
}
_SOME = 0.02  # of an output's numbers may be off without being judged wrong: a ranking with near ties


@dataclass(frozen=True)
class Output:
    """`off`: the part of its numbers that rounding does not explain. `near`: that part in the changed files."""

    name: str
    difference: float
    off: float
    near: float
    problem: str = ""

    @property
    def may(self) -> float:
        return min(1.0, _SOME + 2 * self.near)

    @property
    def right(self) -> bool:
        return not self.problem and self.off <= self.may

    def row(self) -> dict[str, Any]:
        numbers = {"difference": self.difference, "off": self.off, "may_be_off": self.may}
        return {"output": self.name, **numbers, "verdict": "right" if self.right else "wrong", "why": self.problem}


def change(model: ir.Model, arrays: Arrays, eps: float) -> Iterator[Arrays]:
    """Change the model's weights in place, and give inputs that are changed, too: by ulps of their dtypes, or of eps."""
    shaping = _values_that_decide_shapes(model)
    initializers = (v for v in model.graph.initializers.values() if v.const_value is not None and v not in shaping)
    weights = {v: np.asarray(v.const_value.numpy()) for v in initializers if v.const_value is not None}
    names = {str(v.name) for v in shaping}
    for seed in range(_SEEDS):
        random = np.random.default_rng(seed)
        for value, array in weights.items():
            if array.dtype.kind == "f":
                value.const_value = ir.tensor(_moved(array, random, eps), name=value.name)
        yield {n: a if a.dtype.kind != "f" or n in names else _moved(a, random, eps) for n, a in arrays.items()}


def _values_that_decide_shapes(model: ir.Model) -> set[ir.Value]:
    """Return scales of Resize, ends of Range and the like, and what they are computed from by arithmetic of shapes."""
    nodes = [node for node in ir.traversal.RecursiveGraphIterator(model.graph) if is_node(node, *_SHAPING)]
    shaping = [node.inputs[i] for node in nodes for i in _SHAPING[node.op_type] if i < len(node.inputs)]
    return {v for end in shaping if end is not None for v in before(end, lambda node: is_node(node, *_OF_SHAPES))}


def _moved(array: Array, random: np.random.Generator, eps: float) -> Array:
    eps = max(eps, float(np.finfo(array.dtype).eps))
    with np.errstate(over="ignore"):
        moved = (array * (1 + _ULPS * eps * random.uniform(-1, 1, array.shape))).astype(array.dtype)
    return np.where(np.isfinite(moved), moved, array)


def judge(name: str, true: Array, near: list[Array], got: Array | None) -> Output:
    """`true`: onnxruntime's; `near`: those of changed weights and inputs, which count where their shape is the same."""
    if got is None:
        return Output(name, np.inf, 1, 0, "the runtime does not give it")
    if got.shape != true.shape:
        return Output(name, np.inf, 1, 0, f"it has shape {got.shape}, where onnxruntime's has {true.shape}")
    most = np.maximum.reduce([_distance(one, true) for one in near if one.shape == true.shape] or [_few_ulps(true)])
    distance = _distance(got, true)
    allowed = _allowed(most, true)
    off, moved = (float(np.mean(d > allowed)) if d.size else 0.0 for d in (distance, most))
    return Output(name, float(distance.max()) if distance.size else 0.0, off, moved)


def _few_ulps(true: Array) -> Array:
    """Return what outputs move by if no changed file gives outputs of these shapes."""
    if true.dtype.kind != "f":
        return np.zeros(true.shape)
    largest = np.abs(true[np.isfinite(true)]).max(initial=0.0)
    return np.full(true.shape, _ULPS * float(np.finfo(true.dtype).eps) * largest)


def _distance(a: Array, b: Array) -> Array:
    """Of numbers; infinite where one is none, and of classes and indices where they differ."""
    if b.dtype.kind != "f":
        return np.where(a == b, 0.0, np.inf)
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(invalid="ignore"):
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        return np.where(same, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf, posinf=np.inf))


def _allowed(most: Array, true: Array) -> Array:
    """By the usual change along the longer of the last two axes, that of queries. Boxes and scores lie beside one another along
    the other, and move by amounts of their own."""
    if true.dtype.kind != "f" or not true.size:
        return np.zeros(true.shape)
    axis = max(range(-min(2, true.ndim), 0), key=lambda axis: true.shape[axis], default=None)
    usual = np.nan_to_num(np.median(most, axis=axis, keepdims=True), posinf=0.0)
    largest = np.abs(true[np.isfinite(true)]).max(initial=0.0)
    return np.broadcast_to(_FURTHER * usual + float(np.finfo(true.dtype).eps) * largest, true.shape)
