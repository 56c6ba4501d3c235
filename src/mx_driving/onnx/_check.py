"""Run an ONNX file, and each match of deformable attention in it, on a runtime. Judge the outputs."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch

from .._io import temporary_folder
from .._operator.description import SAMPLING
from .._operator.rules import Problem, first_line
from .._replay.calls import RecordedCall
from .._replay.error_bound import ErrorBound
from .._replay.judge import COARSE, RIGHT, WRONG, Judged, find_coarse_factor, judge
from . import _file, _outputs
from ._forms import OURS
from ._graph import Unfit, add_outputs, list_outputs, read_constant
from ._matches import Match, draw_across_borders, find_again, find_matches, read_bare_inputs, write_match
from ._nodes import find_nodes, name_unknown, restore_plugins, use_our_nodes
from ._runtimes import Arrays, Failed, Run, make_inputs, open_with_library, run_session

_FAR = -10.0  # off every map
IN_THE_FILE, ACROSS, WITHIN = "in the file", "across borders", "within the file"


@dataclass(frozen=True)
class Comparison:
    """The verdict on a match: run alone on its inputs IN_THE_FILE, alone with locations ACROSS borders, or WITHIN the file.

    `judged` is None if the runtime gave no output. `why` describes the fault.
    """

    match: Match
    inputs: str
    judged: Judged | None
    why: str

    @property
    def right(self) -> bool:
        return self.judged is not None and self.judged.verdict != WRONG

    def facts(self) -> dict[str, Any]:
        error, float32, verdict = (j.device, j.float32, j.verdict) if (j := self.judged) else (None, None, WRONG)
        errors = {"error": error, "float32": float32}
        return {"match": self.match.name, "inputs": self.inputs, **errors, "verdict": verdict, "why": self.why}


@dataclass
class Checked:
    """The report of `check`. `left`: name of a sum of weighted samples -> the reason why the sum is not a match."""

    matches: list[Match]
    left: dict[str, str]
    comparisons: list[Comparison] = field(default_factory=list)
    outputs: list[_outputs.Output] = field(default_factory=list)

    @property
    def right(self) -> bool:
        return all(verdict.right for verdict in (*self.comparisons, *self.outputs))

    def facts(self) -> dict[str, Any]:
        """Return the facts that `--json` prints."""
        matches = [{"name": m.name, "words": m.words, "nodes": list(m.nodes)} for m in self.matches]
        return {
            "right": self.right,
            "matches": matches,
            "comparisons": [comparison.facts() for comparison in self.comparisons],
            "outputs": [output.facts() for output in self.outputs],
            "left": [{"name": name, "why": why} for name, why in self.left.items()],
        }


def check(
    path: str | Path, run: Run, inputs: Arrays, precision: torch.dtype | None = None, original: str | Path | None = None
) -> Checked:
    """Run a file and its matches on a runtime.

    Args:
        inputs: all inputs of the file by name; if empty, random inputs are made.
        precision: the dtype that the runtime computes in, if it is narrower than the dtypes of the file.
        original: the file that this file was made from. If given, matches and true outputs come from it.
    """
    path = _file.check_path("path_in", path)
    original = None if original is None else _file.check_path("--original", original)
    name = "--original" if original else "path_in"
    file = _file.load(original or path, name)
    matches, left = find_matches(file)
    if not matches:
        why = "; ".join(f"{name}: {reason}" for name, reason in left.items())
        why = why or f"it has no weighted samples{name_unknown(file.model.graph)}"
        rule = "must hold deformable attention that is certain, or a node of it"
        raise Problem(f"{name} {rule}; got {original or path} ({why})")
    if original:
        model = _file.load(path).model
        try:
            matches = [find_again(match, model) for match in matches]
        except Unfit as unfit:
            raise Problem(f"path_in must be made of --original, with its names of tensors; got {path}: {unfit}") from None
    with temporary_folder() as folder:
        return _Checker(path, file, matches, run, folder, precision).check(inputs, left)


@dataclass
class _Checker:
    path: Path
    file: _file.LoadedFile  # the file that has the matches: the file at `path`, or the original
    matches: list[Match]
    run: Run
    folder: Path
    precision: torch.dtype | None
    origin: str = "in this precision"  # where NaN and infinite locations come from, in words

    def check(self, inputs: Arrays, left: dict[str, str]) -> Checked:
        report = Checked(self.matches, left)
        model = self.file.model
        names = [str(v.name) for v in model.graph.outputs]
        # Let onnxruntime run the file with our nodes, and also give the inputs of matches as outputs.
        for node in [node for node in find_nodes(model.graph) if node.domain != OURS]:
            with contextlib.suppress(Unfit):  # the report lists the node in `left`
                use_our_nodes(model, [node])
        values = {str(v.name): v for match in self.matches for v in match.tensors}
        add_outputs(model, (v for v in values.values() if v.producer() is not None))
        fed, true = self.run_reference(inputs, {name: default.numpy() for name, default in self.file.defaults.items()})
        constants = {name: numbers.copy() for name, v in values.items() if (numbers := read_constant(v)) is not None}
        computed = {**fed, **true, **constants}
        arrays = {name: computed[name] for name in values}
        not_finite = [name for match in self.matches for name in match.locations if not np.isfinite(arrays[name]).all()]
        finite: Arrays = {}
        if not_finite:
            finite, self.origin = _outputs.run_with_finite(
                model, not_finite, lambda changed: self.run_reference(fed, model=changed)[1]
            )
        for number, match in enumerate(self.matches):
            # Run a file that contains only the match.
            own, file = {str(v.name): arrays[str(v.name)] for v in match.tensors}, self.folder / f"match{number}.onnx"
            write_match(match, own, file)
            for words, drawn in {IN_THE_FILE: own, ACROSS: draw_across_borders(match, own)}.items():
                if drawn is not None:
                    floats = {n: torch.from_numpy(a) for n, a in drawn.items() if self.precision and a.dtype.kind == "f"}
                    drawn = drawn | {n: t.to(self.precision).double().numpy().astype(drawn[n].dtype) for n, t in floats.items()}
                    feeds = {role: drawn[str(v.name)] for role, v in match.inputs.items()}
                    run = functools.partial(self.run, file, feeds)
                    report.comparisons.append(self.compare(match, words, drawn, run, "output"))
        # Judge the outputs of the whole file. `finite` has finite locations in place of NaN and infinite ones.
        eps, near = torch.finfo(self.precision).eps if self.precision else 0.0, []
        for moved in _outputs.change_by_ulps(model, fed, eps):
            with contextlib.suppress(Problem):  # a file with changed weights may not run
                near.append(self.run_reference(moved)[1])
        try:
            outputs = self.run(self.path, fed)
            for name in [name for name in names if isinstance(true[name], np.ndarray)]:  # without outputs that are sequences
                changed = [arrays[name] for arrays in near]
                report.outputs.append(_outputs.judge(name, true[name], changed, outputs.get(name), finite.get(name), eps))
        except Failed as failed:
            report.outputs = [_outputs.Output("all outputs", math.inf, 1, 0, str(failed))]
        if not report.right and all(comparison.right for comparison in report.comparisons):
            # Run the whole file with the inputs and outputs of all matches as graph outputs, and judge each match.
            model, file = _file.load(self.path).model, self.folder / "within.onnx"
            tensors = arrays.keys() | {match.name for match in self.matches}
            add_outputs(model, (v for v in list_outputs(model) if v.name in tensors))
            restore_plugins(model)
            ir.save(model, file, external_data="within.data")
            with contextlib.suppress(Failed):  # The runtime may lack memory for more outputs, or refuse them.
                outputs = self.run(file, fed)
                for match in self.matches:
                    compared = self.compare(match, WITHIN, {**arrays, **outputs}, lambda: outputs, match.name)
                    report.comparisons.append(compared)
        return report

    def run_reference(
        self, inputs: Arrays, defaults: Arrays | None = None, model: ir.Model | None = None
    ) -> tuple[Arrays, Arrays]:
        """Return the inputs of the file, and the outputs that onnxruntime computes from them on the CPU."""
        file = self.folder / "reference.onnx"
        ir.save(model or self.file.model, file, external_data="reference.data")
        try:
            session = open_with_library(file)
            fed = make_inputs(session, inputs, defaults)
            return fed, run_session(session, fed)
        except Problem:
            raise
        except Exception as error:  # onnxruntime raises a dozen classes
            raise Problem(f"path_in must run in onnxruntime on these inputs; got {first_line(error)}") from None

    def compare(self, match: Match, words: str, arrays: Arrays, run: Callable[[], Arrays], name: str) -> Comparison:
        """Judge the output `name` of `run` on the inputs `arrays`. `words` says where they come from."""
        inputs, notes = read_bare_inputs(match, arrays), []
        if self.precision:
            inputs = tuple(t.to(self.precision) if t.is_floating_point() else t for t in inputs)
        shape = inputs[0].shape[0], inputs[3].shape[1], math.prod(inputs[0].shape[2:])
        dtype = None if self.precision else match.part.graph.outputs[0].dtype  # None: any floating dtype
        try:
            outputs = run()
            if name not in outputs:
                raise Failed(f"the runtime must give the output {name!r}; got {', '.join(outputs) or 'nothing'}")
            array = outputs[name]
            # A plugin's output may have separate axes for heads and channels.
            if array.shape not in (shape, (*shape[:2], *inputs[0].shape[2:])):
                raise Failed(f"it gives {array.shape}; the operator gives {shape}")
            if array.dtype != dtype.numpy() if dtype else array.dtype.kind != "f":
                raise Failed(f"it gives {array.dtype}; the file says {dtype.numpy() if dtype else 'a floating dtype'}")
        except Failed as failed:
            return Comparison(match, words, None, str(failed))
        output = torch.from_numpy(array.reshape(shape))
        if match.locations:  # Move queries with NaN or infinite locations off the map, and zero their output.
            value, shapes, starts, locations, weights = inputs
            left_out = ~locations.isfinite().flatten(2).all(2)
            locations = torch.where(left_out.reshape(*left_out.shape, *[1] * (locations.ndim - 2)), _FAR, locations)
            inputs, output = (value, shapes, starts, locations, weights), torch.where(left_out[..., None], 0, output)
            if left_out.any():
                count = f"{int(left_out.sum())} of {left_out.numel()} queries are left out"
                notes = [f"{count}: their locations are NaN or infinite, {self.origin}"]
        operator = SAMPLING[match.operator].bare or match.operator
        call = RecordedCall(match.name, {"operator": operator}, inputs, {"output": output.to(inputs[0].dtype)})
        (judged,) = judge(call).results
        if judged.verdict != RIGHT and (narrow := self.precision or match.narrow_dtype):
            # Judge again, with the error of sums in 16 bits. Try the locations as they are, and as files and runtimes round
            # them in 16 bits: grid = 2 * location - 1, pixel = ((grid + 1) * size - 1) / 2.
            value, shapes, starts, locations, weights = inputs
            located, sides = [locations := locations.float()], shapes.flip(-1)[:, None].float()
            for grids in ((2 * locations).to(narrow) - 1, (2 * locations - 1).to(narrow)):
                located.append((grids.float() + 1) / 2)
                if shapes.dim() == 2:  # Aggregation has a map for each camera and scale, and locations for all scales.
                    located.append(((((grids + 1) * sides).to(narrow) - 1).float() / 2 + 0.5) / sides)
            for rounded in located:
                bound = ErrorBound(replace(call, inputs=(value, shapes, starts, rounded, weights)))
                if (factor := find_coarse_factor(bound, "output", narrow)) == 1:
                    why = f"its error is typical of {str(narrow).removeprefix('torch.')}, in which the file is computed"
                    judged = replace(judged, verdict=COARSE, why=why)
                    break
                judged = replace(judged, verdict=WRONG, why=f"it is {factor:.4g} times the truth") if factor else judged
        return Comparison(match, words, judged, "; ".join([judged.why] * bool(judged.why) + notes))
