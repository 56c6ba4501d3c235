"""A whole file's outputs on a runtime beside those of onnxruntime, and how far rounding may move them.

Rounding anywhere in a file acts like a small change of its weights and inputs. So these are changed by a few ulps, several
times, and what the outputs then move by is what rounding may do. Where a ranking nearly ties, rounding exchanges whole queries;
therefore an output is judged by how many of its numbers moved further, and the changed files say how many may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .places import Array, Arrays

_SEEDS = 3
_ULPS = 4.0  # that weights and inputs are changed by, at most
_FURTHER = 16.0  # times the usual change; the changes of one tensor differ by less
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


def changed(model: ir.Model, arrays: Arrays, eps: float) -> Iterator[Arrays]:
    """Change the model's weights in place, and give inputs that are changed, too: by ulps of their dtypes, or of eps."""
    weights = {v: np.asarray(v.const_value.numpy()) for v in model.graph.initializers.values() if v.const_value is not None}
    for seed in range(_SEEDS):
        random = np.random.default_rng(seed)
        for value, array in weights.items():
            if array.dtype.kind == "f":
                value.const_value = ir.tensor(_moved(array, random, eps), name=value.name)
        yield {name: _moved(array, random, eps) if array.dtype.kind == "f" else array for name, array in arrays.items()}


def _moved(array: Array, random: np.random.Generator, eps: float) -> Array:
    eps = max(eps, float(np.finfo(array.dtype).eps))
    with np.errstate(over="ignore"):
        moved = (array * (1 + _ULPS * eps * random.uniform(-1, 1, array.shape))).astype(array.dtype)
    return np.where(np.isfinite(moved), moved, array)


def judged(name: str, true: Array, near: list[Array], got: Array | None) -> Output:
    """`true`: onnxruntime's; `near`: those of changed weights and inputs."""
    if got is None:
        return Output(name, np.inf, 1, 0, "the runtime does not give it")
    if got.shape != true.shape:
        return Output(name, np.inf, 1, 0, f"it has shape {got.shape}, where onnxruntime's has {true.shape}")
    moves = [_distance(one, true) if one.shape == true.shape else np.full(true.shape, np.inf) for one in near]
    most = np.maximum.reduce(moves)
    distance = _distance(got, true)
    allowed = _allowed(most, true)
    off, moved = (float(np.mean(d > allowed)) if d.size else 0.0 for d in (distance, most))
    return Output(name, float(distance.max()) if distance.size else 0.0, off, moved)


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
