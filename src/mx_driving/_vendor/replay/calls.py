"""Reads a recording. An unreadable file becomes one Problem; the others are still read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mx_driving_portable.record import FORMAT

from ..._cli_support.problems import Problem, ruled
from ..._operator import checks
from ..._operator.description import OPERATORS, Operator, SamplingInputs
from . import forms

GRADIENTS = "-gradients"  # the end of the name of a file that belongs to a call's
_BARE = [name for name, row in OPERATORS.items() if not row.bare]
_TYPES = {
    **dict.fromkeys(("function", "device", "caller", "reason", "form"), str),
    **{"index": int, "packed": bool, "cleared": bool, "sizes": dict, "strides": dict, "shared": list},
}


@dataclass
class RecordedCall:
    """A call as the operator's. `inputs` end in a tensor of the sizes, if the operator has some. `results`: the output and the
    gradients that the device computed, by name. `problems` say what could not be read of it."""

    name: str
    about: dict[str, Any]
    inputs: tuple[Tensor, ...]
    results: dict[str, Tensor]
    grad_output: Tensor | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def row(self) -> Operator:
        return OPERATORS[self.about["operator"]]

    @property
    def sampling(self) -> SamplingInputs:
        return SamplingInputs(*self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        return SamplingInputs._fields if self.row.kind != "pooling" else self.row.inputs

    @property
    def arguments(self) -> tuple[Any, ...]:
        """The operator's arguments: sizes as numbers."""
        return arguments(self.row, self.inputs)

    @property
    def num_queries(self) -> int:
        """The size of the output's axis 1: queries, or channels of cells."""
        return next(t.shape[1] for t, has_axis in zip(self.inputs, self.has_queries(), strict=False) if has_axis)

    def has_queries(self) -> list[bool]:
        """Return for each input whether its axis 1 is that of queries."""
        return [axis is not None for axis in (*self.row.axes[self.row.queries][:-1], *(None,) * bool(self.row.sizes))]

    def is_by_query(self, result: str) -> bool:
        """Return whether each query has entries of its own."""
        return result == "output" or self.has_queries()[self.input_names.index(result.removeprefix("grad_"))]

    @property
    def gradients(self) -> tuple[str, ...]:
        """The names of the operator's gradients."""
        return tuple("grad_" + self.input_names[i] for i in self.row.differentiable)

    def shape_of(self, result: str) -> tuple[int, ...]:
        if result in ("output", "grad_output"):
            return forms.output_shape(self.row, self.inputs)
        return tuple(self.inputs[self.input_names.index(result.removeprefix("grad_"))].shape)


def arguments(row: Operator, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    return (*inputs[:-1], *inputs[-1].tolist()) if row.sizes else tuple(inputs)


def find_calls(path: Path) -> list[Path]:
    """Return the paths, without endings, of the calls of a folder and of the folders in it, or of the one call of a file."""
    if not os.path.exists(path):  # pathlib fails on a name that is too long
        raise Problem(f"calls must be a folder that record.py wrote, or one file of it; got {path}, which is not there")
    files = [path] if path.is_file() else sorted(path.rglob("*.pt"))
    stems = [f.with_name(f.stem.removesuffix(GRADIENTS)) for f in files if f.suffix == ".pt" and f.is_file()]
    if not stems:
        raise Problem("; ".join([f"calls must hold files call-*.pt; got none in {path}", *unfinished_files(path)]))
    return list(dict.fromkeys(stems))


def unfinished_files(path: Path) -> list[str]:
    """Return a sentence for each file that the recording did not finish."""
    parts = sorted(path.rglob("*.part")) if path.is_dir() else []
    return [f"{part.name} must be whole; got one that the recording did not finish" for part in parts]


def early_ends(path: Path) -> Iterator[str | Problem]:
    """Yield why a recording ended before its program did, by its manifest."""
    for file in sorted(path.rglob("manifest.json")) if path.is_dir() else []:
        try:
            with ruled(f"{file.relative_to(path)} must be a manifest that record.py wrote"):
                manifest = json.loads(file.read_bytes())
                if reason := manifest.get("ended_early"):
                    yield f"the recording ended early: {reason}"
                elif not manifest.get("finished", True):
                    yield "the recording has no end: its program still runs, was killed, or could write no more"
        except Problem as problem:
            yield problem


def read(root: Path, stems: list[Path]) -> Iterator[RecordedCall | Problem]:
    """Yield one call after another, or why there is none."""
    for stem in stems:
        name = str(stem.relative_to(root)) if root.is_dir() else stem.name
        try:
            with ruled(f"{name} must be a call that can be read"):
                call = _read(name, stem)
        except Problem as problem:
            yield problem
        else:
            yield call


def _read(name: str, stem: Path) -> RecordedCall:
    file, gradients_file = (stem.with_name(f"{stem.name}{end}.pt") for end in ("", GRADIENTS))
    if not file.is_file():
        raise Problem(f"{name}{GRADIENTS} must lie beside {name}, which has its inputs; got no such file")
    about, tensors = _load(name, file)
    with ruled(f"{name} must be a legal call of {about['operator']}"):
        row = OPERATORS[about["operator"]]
        inputs = forms.inputs_of(name, about, tensors)
        checks.check_inputs(row, *arguments(row, inputs))
        checks.contents(row, arguments(row, inputs))
    call = RecordedCall(name, about, inputs, {})
    if gradients_file.is_file():
        try:  # the output is judged whatever the gradients are
            tensors.update(_load(name + GRADIENTS, gradients_file)[1])
        except Problem as problem:
            call.problems.append(str(problem))
    _take_results(call, tensors)
    if not call.results:
        raise Problem("; ".join([f"{name} must hold an output or gradients; got {', '.join(tensors)}", *call.problems]))
    return call


def _load(name: str, file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a file says about its call, and its tensors."""
    with ruled(f"{file.name} must be a whole file that record.py wrote"):
        whole = torch.load(file, weights_only=True, map_location="cpu")
        metadata, tensors = whole["metadata"], {str(key): t.detach() for key, t in whole["tensors"].items()}
        if (theirs := metadata.get("format")) != str(FORMAT):
            raise Problem(f"{file.name} must have format {FORMAT}, the one that this version reads; got {theirs}")
        about = json.loads(metadata["call"])
        operator = about["operator"]
    if operator not in _BARE:
        raise Problem(f"the operator of {name} must be one of {', '.join(_BARE)}; got {operator}")
    for key, kind in _TYPES.items():
        if not isinstance(about.get(key, kind()), kind):
            raise Problem(f"the {key} of {name} must be of type {kind.__name__}; got {about[key]}")
    return {key: _printable(fact) if isinstance(fact, str) else fact for key, fact in about.items()}, tensors


def _printable(text: str) -> str:
    """Replace characters that no terminal takes: file names may have any bytes."""
    return "".join(c if c.isprintable() else "?" for c in text)


def _take_results(call: RecordedCall, tensors: dict[str, Tensor]) -> None:
    """Take the results that belong to the inputs, and say what is wrong with the others."""
    for name in ("grad_output", "output", *call.gradients):
        if name not in tensors:
            continue
        shape = call.shape_of(name)
        t = forms.in_operators_shape(call.about, name, tensors[name], shape)
        if t.shape != shape or not t.is_floating_point():
            got = f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"
            call.problems.append(f"{name} of {call.name} must be floating, of shape {shape}; got {got}")
        elif name == "grad_output":
            call.grad_output = t
        else:
            call.results[name] = t
    gradients = [name for name in call.gradients if name in call.results]
    if gradients and call.grad_output is None:
        call.problems.append(f"{call.name} must hold grad_output for its gradients to be judged; got none")
    if call.about.get("cleared") is False:
        kind = "gradients" if gradients else "output"
        rule = f"{kind} of {call.name} must be zero before a function adds to them"
        call.problems.append(f"{rule}; got others, so they are not judged")
        call.grad_output = None
        call.results = {} if not gradients else call.results
    if call.grad_output is None:
        call.results = {name: t for name, t in call.results.items() if name == "output"}
