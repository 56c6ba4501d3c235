"""Run an ONNX file before and after `mx_driving.onnx.fuse` on the same inputs, and compare outputs and times."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mx_driving.onnx

from .._agreement import ULPS, difference_beside_ties, model_difference
from .._files import temporary_folder
from .._measure.timing import interleaved
from .._operator.problems import Problem
from ._session import open_session

Arrays = Mapping[str, np.ndarray[Any, Any]]
_FEW = 8  # the columns of an output are compared separately if there are at most so many
_SAME = 1e-5  # do not look for NaN locations if outputs differ by less than this share of the magnitude
_DTYPES = {
    "tensor(float)": np.float32,
    "tensor(double)": np.float64,
    "tensor(bool)": np.bool_,
    "tensor(float16)": np.float16,
    **{f"tensor({sign}int{bits})": getattr(np, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)},
}


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


def open_with_library(path: Path, **options: Any) -> Any:
    """Return a session with our nodes and torch's number of threads. `options` go to open_session."""
    return open_session(path, library=mx_driving.onnx.library(), threads=torch.get_num_threads(), **options)


def run_session(running: Any, arrays: Arrays) -> dict[str, Any]:
    """Return the outputs by name. Arrays that are not inputs of the file are ignored."""
    names = {described.name for described in running.get_inputs()}
    outputs = running.run(None, {name: array for name, array in arrays.items() if name in names})
    return dict(zip((described.name for described in running.get_outputs()), outputs, strict=True))


def make_inputs(running: Any, arrays: Arrays, defaults: Arrays | None = None) -> dict[str, np.ndarray[Any, Any]]:
    """Return `arrays`, which must contain all inputs without a default.

    If `arrays` is empty, make inputs: random floats, ones of other dtypes, and a batch of 1.
    """
    defaults, random = defaults or {}, np.random.default_rng(0)
    required = {described.name: described for described in running.get_inputs()}
    allowed = required | {described.name: described for described in running.get_overridable_initializers()}
    if not arrays:
        return {name: defaults[name] if name in defaults else _make_input(required[name], random) for name in required}
    _check_names(list(allowed), [name for name in required if name not in defaults], list(arrays))
    for name, array in arrays.items():
        _check_input(allowed[name], array)
    return {**{name: array for name, array in defaults.items() if name in required}, **arrays}


def _check_names(allowed: list[str], required: list[str], names: list[str]) -> None:
    if unknown := [name for name in names if name not in allowed]:
        raise Problem(f"--inputs must have arrays for the file's inputs, {', '.join(allowed)}; got {', '.join(unknown)}")
    if missing := [name for name in required if name not in names]:
        raise Problem(f"--inputs must have all inputs of the file, {', '.join(required)}; got no {', '.join(missing)}")


def _check_input(expected: Any, array: np.ndarray[Any, Any]) -> None:
    dtype, shape = _DTYPES.get(expected.type, array.dtype), expected.shape or array.shape
    sizes = zip(shape, array.shape, strict=False)
    fits = len(shape) == array.ndim and all(not isinstance(fixed, int) or fixed == size for fixed, size in sizes)
    if array.dtype != dtype or not fits:
        rule = f"{np.dtype(dtype).name} of shape ({', '.join(map(str, shape))})"
        raise Problem(f"--inputs must have {expected.name!r} as {rule}; got {array.dtype.name} of shape {array.shape}")


def _make_input(described: Any, random: np.random.Generator) -> np.ndarray[Any, Any]:
    sizes = [1 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(described.shape)]
    if free := [str(size) for size in sizes if not isinstance(size, int)]:
        raise Problem(f"--inputs must have {described.name!r}, whose sizes {', '.join(free)} the file leaves free; got none")
    dtype = _DTYPES.get(described.type)
    if dtype is None:
        raise Problem(f"--inputs must have {described.name!r}, of type {described.type}; got none")
    return random.random(sizes).astype(dtype) if np.dtype(dtype).kind == "f" else np.ones(sizes, dtype)


def _mark_largest(out: np.ndarray[Any, Any]) -> torch.Tensor:
    """Replace the largest number of the dtype by infinity. Models mark invalid anchors with this number."""
    tensor = torch.from_numpy(out)
    return torch.where(tensor.abs() == torch.finfo(tensor.dtype).max, tensor * torch.inf, tensor)


def _split_columns(outputs: list[Any]) -> dict[str, torch.Tensor]:
    """Return the floating outputs as a dictionary. Each column has its own key, because columns may be boxes, scores or classes
    with different magnitudes."""
    columns_by_name = {}
    for index, out in enumerate(outputs):
        if out.dtype.kind == "f" and out.size:
            columns = out.shape[-1] if out.ndim == 3 and out.shape[-1] <= _FEW else 1
            parts = _mark_largest(np.atleast_1d(out)).tensor_split(columns, -1)
            columns_by_name |= {f"{index}.{column}": part for column, part in enumerate(parts)}
    return columns_by_name


def _difference(before: list[Any], after: list[Any]) -> tuple[float, int]:
    if [out.shape for out in before] != [out.shape for out in after]:
        return math.inf, 0
    theirs, ours = map(_split_columns, (before, after))
    if not theirs:
        return 0.0, 0
    if len({out.shape[:2] for out in theirs.values()}) > 1 or all(out.dim() < 3 for out in theirs.values()):
        return model_difference(ours, theirs), 0
    theirs, ours = ({name: out.reshape(*out.shape[:2], -1) for name, out in outs.items()} for outs in (theirs, ours))
    return difference_beside_ties(ours, theirs)


def compare(before: Path, after: Path, seconds: float, arrays: Arrays | None = None, locations: Sequence[str] = ()) -> Compared:
    """Run both files in turn. Leave out numbers that depend on NaN or infinity in the tensors `locations` of the first file."""
    running = {"before": open_with_library(before), "after": open_with_library(after)}
    fed = make_inputs(running["before"], arrays or {})
    theirs, ours = (opened.run(None, fed) for opened in running.values())
    (difference, off), note = _difference(theirs, ours), ""
    if locations and (off or difference > _SAME):
        theirs, note = _leave_out(before, fed, locations, theirs, ours)
        difference, off = _difference(theirs, ours)
    times = interleaved({name: lambda opened=opened: opened.run(None, fed) for name, opened in running.items()}, seconds)
    earlier, later = (1e3 * statistics.median(durations) for durations in times.values())
    return Compared(difference, off, earlier, later, min(map(len, times.values())), note)


def _leave_out(path: Path, fed: Arrays, locations: Sequence[str], theirs: list[Any], ours: list[Any]) -> tuple[list[Any], str]:
    """In `theirs`, replace numbers that depend on NaN or infinite locations by ours. Return the outputs and a note."""
    from . import _file, _not_finite

    model = _file.load(path).model
    with temporary_folder() as folder:

        def run_model(model: Any) -> dict[str, Any]:
            _file.ir.save(model, folder / "model.onnx", external_data="model.data")
            return run_session(open_with_library(folder / "model.onnx"), fed)

        if not (names := _not_finite.find_not_finite(model, locations, run_model)):
            return theirs, ""
        others, origin = _not_finite.run_with_finite(model, names, run_model)
    masks = [_mask_differences(output, finite) for output, finite in zip(theirs, others.values(), strict=False)]
    share = 100 * sum(int(mask.sum()) for mask in masks) / max(1, sum(mask.size for mask in masks))
    note = f"{share:.3g} % of their numbers are left out: they depend on locations that are NaN or infinite, {origin}"
    return [np.where(mask, b, a) if a.shape == b.shape else a for a, b, mask in zip(theirs, ours, masks, strict=True)], note


def _mask_differences(output: np.ndarray[Any, Any], finite: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return where two outputs differ by more than rounding."""
    from ._outputs import find_distances, find_largest_ulp

    if output.shape != finite.shape:
        return np.zeros(output.shape, bool)
    return find_distances(finite, output) > ULPS * find_largest_ulp(output)
