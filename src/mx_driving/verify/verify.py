"""Runs an ONNX file, and each of its places of deformable attention alone, on a runtime, and judges what it gives."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx_ir as ir
import torch

from .._cli_support.problems import Problem
from ..measure import onnx_files
from ..onnx import _file
from ..onnx._fuse import silent
from ..onnx._graph import Unfit, constant
from ..replay.calls import Call
from ..replay.judge import WRONG, Verdict, judge
from . import whole
from .places import Array, Arrays, Place, across_borders, as_reference, call, places, rewritten, write
from .runtimes import Failed, Run

IN_THE_FILE, ACROSS, WITHIN = "in the file", "across borders", "within the file"


@dataclass(frozen=True)
class Tried:
    """A place on some inputs: a verdict, or why there is none."""

    place: Place
    inputs: str
    verdict: Verdict | None
    problem: str = ""

    @property
    def right(self) -> bool:
        return self.verdict is not None and self.verdict.word != WRONG


@dataclass
class Verified:
    """`left`: weighted samples that are no place, by name, and why."""

    places: list[Tried] = field(default_factory=list)
    outputs: list[whole.Output] = field(default_factory=list)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def right(self) -> bool:
        return all(one.right for one in (*self.places, *self.outputs))


def verify(
    path: str | Path, run: Run, given: Arrays, precision: torch.dtype | None = None, original: str | Path | None = None
) -> Verified:
    """Args:
    given: the file's inputs by name, all of them; random if there are none.
    precision: what the runtime computes in, if that is narrower than the file's dtypes.
    original: the file that this one was made of, which then says where the places are, and what is true.
    """
    try:
        path = _file.check_path("path_in", path)
        original = None if original is None else _file.check_path("--original", original)
        with silent():
            model = _file.load(original or path)
            found, left = places(model)
            if original:
                written = _file.load(path)
                found = [rewritten(place, written) for place in found]
    except Unfit as unfit:
        raise Problem(f"path_in must be made of --original, with its names of tensors; got {path}: {unfit}") from None
    except ValueError as error:
        raise Problem(str(error)) from None
    outputs = [str(v.name) for v in model.graph.outputs]
    if not found:
        why = "; ".join(f"{name}: {reason}" for name, reason in left.items()) or "it has no weighted samples"
        rule = "must hold deformable attention that is certain, or a node of it"
        raise Problem(f"{'--original' if original else 'path_in'} {rule}; got {original or path} ({why})")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        defaults = {str(v.name): v.meta["default"].numpy() for v in model.graph.inputs if "default" in v.meta}
        fed, arrays, made, near = _of_reference(model, folder, given, defaults, found, precision)
        report = Verified(left=left)
        for number, place in enumerate(found):
            report.places += _alone(place, arrays, run, folder / f"place{number}.onnx", precision)
        report.outputs = _outputs(path, run, fed, made, near, outputs)
        if not report.right and all(one.right for one in report.places):
            report.places += _within(path, found, run, fed, arrays, folder / "within.onnx", precision)
    return report


def _of_reference(
    model: ir.Model, folder: Path, given: Arrays, defaults: Arrays, found: list[Place], precision: torch.dtype | None
) -> tuple[Arrays, Arrays, Arrays, list[Arrays]]:
    """What the file is fed, what its places are, what it gives, and what it gives after small changes."""
    wanted = as_reference(model, found)
    fed, made = _reference(model, folder, given, defaults)
    arrays = {name: _array(v, {**fed, **made}) for name, v in wanted.items()}
    eps = torch.finfo(precision).eps if precision else 0.0
    return fed, arrays, made, [_run_changed(model, folder, moved) for moved in whole.changed(model, fed, eps)]


def _run_changed(model: ir.Model, folder: Path, moved: Arrays) -> Arrays:
    """Return no outputs where changed weights make a file that does not run. The file itself does."""
    try:
        return _reference(model, folder, moved)[1]
    except Problem:
        return {}


def _reference(model: ir.Model, folder: Path, given: Arrays, defaults: Arrays | None = None) -> tuple[Arrays, Arrays]:
    """The file's inputs and its outputs, by onnxruntime on the CPU."""
    file = folder / "reference.onnx"
    ir.save(model, file, external_data="reference.data")
    try:
        running = onnx_files.session(file)
        fed = onnx_files.inputs(running, given, defaults)
        return fed, dict(zip((one.name for one in running.get_outputs()), running.run(None, fed), strict=True))
    except Problem:
        raise
    except Exception as error:  # onnxruntime has a dozen kinds of its own
        raise Problem(f"path_in must run in onnxruntime on these inputs; got {str(error).splitlines()[0]}") from None


def _array(value: ir.Value, arrays: Arrays) -> Array:
    held = constant(value)
    return arrays[str(value.name)] if held is None else held.copy()


def _alone(place: Place, arrays: Arrays, run: Run, file: Path, precision: torch.dtype | None) -> list[Tried]:
    """The place's own file."""
    own = {str(v.name): arrays[str(v.name)] for v in (*place.fed.values(), *place.fixed.values())}
    write(place, own, file)
    found = []
    for words, given in {IN_THE_FILE: own, ACROSS: across_borders(place, own)}.items():
        if given is not None:
            given = {name: _rounded(array, precision) for name, array in given.items()}
            fed = {role: given[str(v.name)] for role, v in place.fed.items()}
            found.append(_tried(place, words, given, lambda fed=fed: run(file, fed), "output", precision))
    return found


def _within(
    path: Path, found: list[Place], run: Run, fed: Arrays, arrays: Arrays, file: Path, precision: torch.dtype | None
) -> list[Tried]:
    """The whole file, which gives the places' inputs and outputs, too: each place on what the runtime itself gave it."""
    with silent():
        model = _file.load(path)
    names = arrays.keys() | {place.name for place in found}
    computed = (v for v in _file.outputs(model) if v.name in names and constant(v) is None)
    model.graph.outputs.extend(v for v in computed if not v.is_graph_output())
    ir.save(model, file, external_data="within.data")
    try:
        made = run(file, fed)
    except Failed:  # it may lack memory, or refuse such outputs; all else is judged already
        return []
    arrays = {**arrays, **made}
    return [_tried(place, WITHIN, arrays, lambda: made, place.name, precision) for place in found]


def _tried(
    place: Place, words: str, arrays: Arrays, run: Callable[[], Arrays], output: str, precision: torch.dtype | None
) -> Tried:
    inputs = call(place, arrays)
    if precision:
        inputs = tuple(t.to(precision) if t.is_floating_point() else t for t in inputs)
    try:
        got = _output(inputs, run(), output)
    except Failed as failed:
        return Tried(place, words, None, str(failed))
    found = Call(place.name, {"operator": place.bare}, inputs, {"output": got.to(inputs[0].dtype)})
    return Tried(place, words, judge(found))


def _output(inputs: tuple[torch.Tensor, ...], made: Arrays, name: str) -> torch.Tensor:
    """A place's output as the operator gives it. Plugins give heads and channels apart."""
    value, *_, locations, _ = inputs
    shape = value.shape[0], locations.shape[1], math.prod(value.shape[2:])
    if name not in made:
        raise Failed(f"the runtime must give the output {name!r}; got {', '.join(made) or 'nothing'}")
    if made[name].shape not in (shape, (*shape[:2], *value.shape[2:])):
        raise Failed(f"it gives {made[name].shape}; the operator gives {shape}")
    return torch.from_numpy(made[name].reshape(shape))


def _rounded(array: Array, precision: torch.dtype | None) -> Array:
    if precision is None or array.dtype.kind != "f":
        return array
    return torch.from_numpy(array).to(precision).to(torch.float64).numpy().astype(array.dtype)


def _outputs(path: Path, run: Run, fed: Arrays, true: Arrays, near: list[Arrays], names: list[str]) -> list[whole.Output]:
    try:
        got = run(path, fed)
    except Failed as failed:
        return [whole.Output("all outputs", math.inf, 1, 0, str(failed))]
    arrays = [name for name in names if isinstance(true[name], np.ndarray)]  # others are lists
    return [whole.judged(name, true[name], [one[name] for one in near if name in one], got.get(name)) for name in arrays]
