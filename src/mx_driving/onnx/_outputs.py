"""Compare outputs of whole files: a runtime's with onnxruntime's, and outputs before `fuse` with outputs after.

Rounding anywhere in a file acts like a small change of its weights and inputs. So we run copies of the file whose weights and
inputs are changed by a few ulps. Each number of an output may be off as far as it moves in the copies. Rounding may also
exchange whole rows of an output, such as queries, if two scores of a ranking nearly tie. So a share of the numbers may be off
further, if their rows equal other rows of onnxruntime's output or rows of a copy's output. The copies show how large the share
may be.

Only change arrays of two or more axes. Numbers that decide a shape, such as scales of a Resize, have fewer axes.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from .._agreement import ULPS, difference_beside_ties, entry_differences, model_difference
from .._io import temporary_folder
from .._measure.speed import interleaved
from . import _file
from ._graph import INTEGER, add_outputs, read_constant, walk_back
from ._runtimes import Array, Arrays, make_inputs, open_with_library, run_session

_SEEDS = 3
_ULPS = 4.0  # the largest change of weights and inputs
_FURTHER = 16.0  # allowed error as a multiple of the usual change. Changes of a tensor's numbers vary by a smaller factor.
_SOME = 0.02  # the share of an output's numbers that may be off because of near ties in a ranking
_FEW = 8  # `compare` takes the columns of an output apart if there are at most so many
_INSTEAD = 0.37  # replaces locations of NaN and infinity. It is on every map; for NaN, no implementation samples there.
# The search for the source of NaN runs the model at most _RUNS times, and reads at most _NEAREST tensors in a run.
_NEAREST, _RUNS = 64, 16
_SAME = 1e-5  # `compare` does not look for NaN locations if outputs differ by less than this share of the magnitude


@dataclass(frozen=True)
class Output:
    """The verdict on an output of the whole file.

    Attributes:
        off: the share of numbers that rounding does not explain.
        near: the same share in outputs of changed files.
        note: the numbers that are not compared, in words.
    """

    name: str
    difference: float
    off: float
    near: float
    problem: str = ""
    note: str = ""

    @property
    def may(self) -> float:
        return min(1.0, _SOME + 2 * self.near)

    @property
    def right(self) -> bool:
        return not self.problem and self.off <= self.may

    def facts(self) -> dict[str, Any]:
        numbers = {"difference": self.difference, "off": self.off, "may_be_off": self.may}
        return {"output": self.name, **numbers, "verdict": "right" if self.right else "wrong", "why": self.problem or self.note}


def change_by_ulps(model: ir.Model, arrays: Arrays, eps: float) -> Iterator[Arrays]:
    """Change the model's weights in place, and yield changed inputs. An ulp is the dtype's, or `eps` if that is larger.

    Integers and arrays of fewer than two axes stay unchanged.
    """
    weights = {v: np.asarray(v.const_value.numpy()) for v in model.graph.initializers.values() if v.const_value is not None}
    for seed in range(_SEEDS):
        random, changed = np.random.default_rng(seed), dict(arrays)
        for key, array in (*weights.items(), *arrays.items()):
            if array.dtype.kind != "f" or array.ndim < 2:
                continue
            ulps = _ULPS * max(eps, float(np.finfo(array.dtype).eps))
            with np.errstate(over="ignore"):
                moved = (array * (1 + ulps * random.uniform(-1, 1, array.shape))).astype(array.dtype)
            moved = np.where(np.isfinite(moved), moved, array)
            if isinstance(key, ir.Value):
                key.const_value = ir.tensor(moved, name=key.name)
            else:
                changed[key] = moved
        yield changed


def judge(
    name: str, true: Array, near: list[Array], got: Array | None, finite: Array | None = None, eps: float = 0.0
) -> Output:
    """Return the verdict on an output.

    Args:
        true: onnxruntime's output.
        near: outputs with changed weights and inputs. Outputs of other shapes are ignored.
        got: the runtime's output.
        finite: the output with finite locations in place of NaN and infinity. Numbers that differ from it are not compared.
        eps: of the runtime's precision, if it is narrower than the file's. Floats may then have another floating dtype.
    """
    if got is None:
        return Output(name, np.inf, 1, 0, "the runtime does not give it")
    if got.shape != true.shape:
        return Output(name, np.inf, 1, 0, f"it has shape {got.shape}, where onnxruntime's has {true.shape}")
    if got.dtype != true.dtype and not (eps and got.dtype.kind == true.dtype.kind == "f"):
        return Output(name, np.inf, 1, 0, f"it has dtype {got.dtype}, where onnxruntime's has {true.dtype}")
    if not true.size:
        return Output(name, 0.0, 0.0, 0.0)
    ulp, near = find_largest_ulp(true), [output for output in near if output.shape == true.shape]
    changes = [find_distances(output, true) for output in near] or [np.full(true.shape, _ULPS * ulp)]
    most, distance = np.maximum.reduce(changes), find_distances(got, true)
    # The median change over the queries, on the longer of the last two axes. The shorter has boxes and scores, which move by
    # different amounts.
    axis = max(range(-min(2, most.ndim), 0), key=lambda axis: most.shape[axis], default=None)
    usual = np.nan_to_num(np.median(most, axis=axis, keepdims=True), posinf=0.0)
    left_out = np.zeros(true.shape, bool)
    if finite is not None and finite.shape == true.shape:
        left_out = find_distances(finite, true) > usual + ulp
    distance, allowed = np.where(left_out, 0.0, distance), _FURTHER * usual + ulp
    is_off, changed = distance > allowed, float(np.mean(most > allowed))
    note = f"{100 * left_out.mean():.3g} % of its numbers depend on locations that are NaN or infinite: not compared"
    output = Output(name, float(distance.max()), float(is_off.mean()), changed, note=note * bool(left_out.any()))
    if output.right and true.dtype.kind == "f":
        # Errors of one sign add up to a common factor. It must be 1, within a few ulps and the factors of changed files.
        factors, is_compared = [], ~is_off & ~left_out & np.isfinite(true)
        for array in (got, *near):
            a, b = (numbers.astype(np.float64)[is_compared & np.isfinite(array)] for numbers in (array, true))
            squares = float(np.sum(b * b))
            factors.append(float(np.sum(a * b)) / squares if squares else 1.0)
        ulps = _ULPS * max(eps, float(np.finfo(true.dtype).eps))
        if abs(factors[0] - 1) > ulps + _FURTHER * max((abs(factor - 1) for factor in factors[1:]), default=ulps):
            return replace(output, problem=f"it is {factors[0]:.6g} times onnxruntime's")
    if not output.right or not is_off.any():
        return output
    # Near ties explain numbers that are off only if rounding can give their rows. Rounding turns no number into NaN.
    if true.dtype.kind == "f":
        largest = max(float(np.abs(array[np.isfinite(array)]).max(initial=0)) for array in (true, *near))
        stray = is_off & ((distance == np.inf) | (np.abs(got) > 2 * largest))
        if stray.any():
            rule = f"where onnxruntime's are not, or more than twice its largest, {largest:.3g}"
            return replace(output, problem=f"{stray.sum()} of its numbers are NaN or infinite {rule}")
    allowed = np.broadcast_to(allowed, true.shape)
    rows, near_rows = _split_rows(true), []
    for array, change in zip(near, changes, strict=False):
        new = _find_new_rows(_split_rows(array), _split_rows(change > allowed), rows, [], _split_rows(allowed))
        near_rows.append(np.where(new[..., None], _split_rows(array), np.nan))
    most_new = max((float(np.isfinite(new).any(2).mean()) for new in near_rows), default=0.0)
    share = float(_find_new_rows(_split_rows(got), _split_rows(is_off), rows, near_rows, _split_rows(allowed)).mean())
    if share > 2 * most_new:
        fact = f"{100 * share:.3g} % of its rows are off, and are no other rows of onnxruntime's output"
        return replace(output, problem=f"{fact}; near ties only exchange rows")
    return output


def _find_new_rows(got: Array, is_off: Array, true: Array, near: list[Array], allowed: Array) -> Array:
    """Return True for rows that are off and new: equal neither to a true row at a place that is off, nor to a row of `near`."""
    rows_off: Array = np.any(is_off, 2)
    new = np.zeros(rows_off.shape, bool)

    def are_alike(rows: Array, group: Any, row: Any) -> Array:
        return (np.abs(np.subtract(rows[group], got[group, row], dtype=np.float64)) <= allowed[group, 0]).all(1)

    with np.errstate(invalid="ignore"):
        for group in np.flatnonzero(rows_off.any(1)):
            is_lost = rows_off[group].copy()
            for row in np.flatnonzero(rows_off[group]):
                alike = are_alike(true, group, row) & is_lost
                if alike.any():
                    is_lost[alike.argmax()] = False
                else:
                    new[group, row] = not any(are_alike(rows, group, row).any() for rows in near)
    return new


def _split_rows(array: Array) -> Array:
    """Return the array as [groups, rows, numbers]. The longer of the last two axes has the rows, such as queries."""
    if array.ndim < 2:
        return array.reshape(1, -1, 1)
    if array.shape[-2] < array.shape[-1]:
        array = array[..., None] if array.ndim == 2 else array.swapaxes(-1, -2)
    return array.reshape(-1, *array.shape[-2:])


def find_largest_ulp(true: Array) -> float:
    """Return the ulp of the largest number; 0 for integers, which are classes or indices."""
    if true.dtype.kind != "f":
        return 0.0
    return float(np.finfo(true.dtype).eps) * float(np.abs(true[np.isfinite(true)]).max(initial=0.0))


def find_distances(a: Array, b: Array) -> Array:
    """Return absolute differences: infinite if only one of two numbers is finite, or if two integers differ."""
    if b.dtype.kind != "f":
        return np.where(a == b, 0.0, np.inf)
    return entry_differences(*(torch.from_numpy(np.asarray(array, np.float64)) for array in (a, b))).numpy()


@dataclass(frozen=True)
class Compared:
    """`off`: the number of queries that change places because their scores nearly tie. `difference`: the largest difference of
    the other queries, divided by the largest magnitude."""

    difference: float
    off: int
    before: float  # milliseconds
    after: float
    rounds: int
    note: str = ""  # the numbers that are not compared, in words

    def __str__(self) -> str:
        off = f", {self.off} queries change places" if self.off else ""
        times = f"{self.before:.1f} ms before, {self.after:.1f} ms after, medians of {self.rounds} rounds in turn"
        return "\n".join(
            [f"outputs differ by {self.difference:.0e} of their magnitude{off}; {times}", *filter(None, [self.note])]
        )


def compare(before: Path, after: Path, seconds: float, arrays: Arrays | None = None, locations: Sequence[str] = ()) -> Compared:
    """Run both files in turn. Leave out numbers that depend on NaN or infinity in the tensors `locations` of the first file."""
    running = {"before": open_with_library(before), "after": open_with_library(after)}
    fed = make_inputs(running["before"], arrays or {})
    theirs, ours = (opened.run(None, fed) for opened in running.values())
    (difference, off), note = _difference(theirs, ours), ""
    if locations and (off or difference > _SAME):
        model = _file.load(before).model
        with temporary_folder() as folder:

            def run_model(model: ir.Model) -> dict[str, Any]:
                ir.save(model, folder / "model.onnx", external_data="model.data")
                return run_session(open_with_library(folder / "model.onnx"), fed)

            values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
            computed = _compute_arrays(model, [values[name] for name in locations if name in values], run_model)
            names = [name for name, array in computed.items() if not np.isfinite(array).all()]
            others, origin = run_with_finite(model, names, run_model) if names else ({}, "")
        masks = []  # where finite locations move a number by more than rounding does
        for output, finite in zip(theirs, others.values(), strict=False):
            same = output.shape == finite.shape
            far = find_distances(finite, output) > ULPS * find_largest_ulp(output) if same else np.zeros(output.shape, bool)
            masks.append(far)
        if names:
            share = 100 * sum(int(mask.sum()) for mask in masks) / max(1, sum(mask.size for mask in masks))
            note = f"{share:.3g} % of their numbers are left out: they depend on locations that are NaN or infinite, {origin}"
            pairs = zip(theirs, ours, masks, strict=True)
            theirs = [np.where(mask, b, a) if a.shape == b.shape else a for a, b, mask in pairs]
        difference, off = _difference(theirs, ours)
    times = interleaved({name: lambda opened=opened: opened.run(None, fed) for name, opened in running.items()}, seconds)
    earlier, later = (1e3 * statistics.median(durations) for durations in times.values())
    return Compared(difference, off, earlier, later, min(map(len, times.values())), note)


def _difference(before: list[Any], after: list[Any]) -> tuple[float, int]:
    if [out.shape for out in before] != [out.shape for out in after]:
        return math.inf, 0
    theirs, ours = {}, {}
    # Compare the columns of floating outputs separately: they may be boxes, scores or classes with different magnitudes.
    for outputs, columns_by_name in ((before, theirs), (after, ours)):
        for index, out in enumerate(outputs):
            if out.dtype.kind == "f" and out.size:
                columns = out.shape[-1] if out.ndim == 3 and out.shape[-1] <= _FEW else 1
                tensor = torch.from_numpy(np.atleast_1d(out))
                # Models mark invalid anchors with the largest number of the dtype: replace it by infinity.
                tensor = torch.where(tensor.abs() == torch.finfo(tensor.dtype).max, tensor * torch.inf, tensor)
                columns_by_name |= {f"{index}.{column}": part for column, part in enumerate(tensor.tensor_split(columns, -1))}
    if not theirs:
        return 0.0, 0
    if len({out.shape[:2] for out in theirs.values()}) > 1 or all(out.dim() < 3 for out in theirs.values()):
        return model_difference(ours, theirs), 0
    theirs, ours = ({name: out.reshape(*out.shape[:2], -1) for name, out in outs.items()} for outs in (theirs, ours))
    return difference_beside_ties(ours, theirs)


# Leave out numbers that depend on NaN or infinite locations: implementations sample different numbers there. torch's older
# exporter writes such locations for a level of one row, for which it computes a linspace of one step.


def run_with_finite(model: ir.Model, names: list[str], run: Callable[[ir.Model], Arrays]) -> tuple[Arrays, str]:
    """Replace NaN and infinity in these tensors by finite numbers. Return the outputs, and the source of the NaN in words."""
    value = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)[names[0]]
    for _ in range(_RUNS):  # walk upstream to the first tensor with NaN or infinity
        near = [v for v in itertools.islice(walk_back(value, lambda _: True), _NEAREST) if v.dtype not in INTEGER]
        arrays, start = _compute_arrays(model, near, run), value
        is_bad = np.isnan if np.isnan(arrays[str(value.name)]).any() else np.isinf
        while node := value.producer():
            bad = [v for v in node.inputs if v is not None and v.name in arrays and is_bad(arrays[str(v.name)]).any()]
            if not bad:
                break
            value = bad[0]
        if value is start or node is None or all(v is None or v.name in arrays or v.dtype in INTEGER for v in node.inputs):
            break
    origin = f"as in the file's {'input' if value.is_graph_input() else 'constant'} {value.name}"
    if (node := value.producer()) is not None and node.op_type != "Constant":
        origin = f"first from {node.op_type} ({node.name})"
    changed = model.clone()
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


def _compute_arrays(model: ir.Model, values: list[ir.Value], run: Callable[[ir.Model], Arrays]) -> Arrays:
    """Run the model and return the arrays of these tensors."""
    constants = {str(v.name): array for v in values if (array := read_constant(v)) is not None}
    copy, names = model.clone(), {str(v.name) for v in values} - constants.keys()
    in_copy = ir.convenience.create_value_mapping(copy.graph, include_subgraphs=False)
    add_outputs(copy, (in_copy[name] for name in names))
    return constants | {name: array for name, array in run(copy).items() if name in names}
