"""An ONNX file before and after `mx_driving.onnx.fuse`: run by onnxruntime on the same inputs, compared, and timed in turn."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mx_driving.onnx

from .._cli_support.problems import Problem
from . import models
from .timing import interleaved

Arrays = Mapping[str, np.ndarray[Any, Any]]
_FEW = 8  # columns


@dataclass(frozen=True)
class Compared:
    """`difference` is a share of the largest magnitude, without the queries that are off: near ties of a ranking move them."""

    difference: float
    off: int
    before: float  # milliseconds
    after: float
    rounds: int

    def __str__(self) -> str:
        off = f", {self.off} queries change places" if self.off else ""
        times = f"{self.before:.1f} ms before, {self.after:.1f} ms after, medians of {self.rounds} rounds in turn"
        return f"outputs differ by {self.difference:.0e} of their magnitude{off}; {times}"


def session(path: Path) -> Any:
    """On as many threads as torch has, with our nodes."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = torch.get_num_threads()
    options.register_custom_ops_library(mx_driving.onnx.library())
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def inputs(running: Any, given: Arrays) -> dict[str, np.ndarray[Any, Any]]:
    """What is given; else random floats from 0 to 1, ones, and a free batch of 1."""
    random = np.random.default_rng(0)
    wanted = {one.name: one for one in running.get_inputs()}
    return {name: given[name] if name in given else _made(one, random) for name, one in wanted.items()}


def _made(wanted: Any, random: np.random.Generator) -> np.ndarray[Any, Any]:
    sizes = [1 if axis == 0 and not isinstance(size, int) else size for axis, size in enumerate(wanted.shape)]
    if free := [str(size) for size in sizes if not isinstance(size, int)]:
        raise Problem(f"--inputs must have {wanted.name!r}, whose sizes {', '.join(free)} the file leaves free; got none")
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    if wanted.type in kinds:
        return random.random(sizes).astype(kinds[wanted.type])
    whole = {"tensor(int64)": np.int64, "tensor(int32)": np.int32, "tensor(bool)": np.bool_}
    if wanted.type not in whole:
        raise Problem(f"--inputs must have {wanted.name!r}, of type {wanted.type}; got none")
    return np.ones(sizes, whole[wanted.type])


def _marked(out: np.ndarray[Any, Any]) -> torch.Tensor:
    """The largest number of a dtype marks anchors that are none, and counts as infinite."""
    tensor = torch.from_numpy(out)
    return torch.where(tensor.abs() == torch.finfo(tensor.dtype).max, tensor * torch.inf, tensor)


def _floats(outputs: list[Any]) -> dict[str, torch.Tensor]:
    """Outputs that are floats. Boxes, scores and classes beside one another have magnitudes of their own: a column each."""
    found = {}
    for place, out in enumerate(outputs):
        if out.dtype.kind == "f" and out.size:
            columns = out.shape[-1] if out.ndim == 3 and out.shape[-1] <= _FEW else 1
            found |= {f"{place}.{column}": part for column, part in enumerate(_marked(out).tensor_split(columns, -1))}
    return found


def _difference(before: list[Any], after: list[Any]) -> tuple[float, int]:
    theirs, ours = map(_floats, (before, after))
    if not theirs:
        return 0.0, 0
    if len({out.shape[:2] for out in theirs.values()}) > 1 or all(out.dim() < 3 for out in theirs.values()):
        return models.largest(ours, theirs), 0
    theirs, ours = ({name: out.reshape(*out.shape[:2], -1) for name, out in outs.items()} for outs in (theirs, ours))
    off = models.queries_off(ours, theirs)
    kept = [{name: out[:, ~off] for name, out in outputs.items()} for outputs in (ours, theirs)]
    return (models.largest(*kept) if not off.all() else float("inf")), int(off.sum())


def compare(before: Path, after: Path, seconds: float, given: Arrays | None = None) -> Compared:
    running = {"before": session(before), "after": session(after)}
    fed = inputs(running["before"], given or {})
    difference, off = _difference(*(one.run(None, fed) for one in running.values()))
    found = interleaved({name: lambda one=one: one.run(None, fed) for name, one in running.items()}, seconds)
    earlier, later = (1e3 * statistics.median(times) for times in found.values())
    return Compared(difference, off, earlier, later, min(map(len, found.values())))
