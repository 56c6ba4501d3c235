"""Reads a recording. What cannot be read is a Problem of its own; everything else of the folder is read all the same."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import _geometry
from .._checks import inputs as checks
from .._checks.rules import FLOATING, INDEX
from .._cli_support.problems import Problem, need, ruled
from .._operators import OPERATORS, Operator, SamplingInputs
from . import _pools, _schema

ENDINGS = (".safetensors", ".pt")
GRADIENTS = "-gradients"  # the end of the name of a file that belongs to a call's
PLACES = SamplingInputs._fields


@dataclass
class Call:
    """A recorded call. `inputs`: tensors; the last one has the sizes of an operator that has some. `results`: the output and
    gradients that the device computed, by name."""

    name: str
    about: dict[str, Any]
    inputs: tuple[Tensor, ...]
    results: dict[str, Tensor]
    grad_output: Tensor | None = None
    problems: list[str] = field(default_factory=list)  # what of it could not be read

    @property
    def row(self) -> Operator:
        return OPERATORS[self.about["operator"]]

    @property
    def sampling(self) -> SamplingInputs:
        """The inputs of an operator that reads maps at locations."""
        return SamplingInputs(*self.inputs)

    @property
    def places(self) -> tuple[str, ...]:
        """Names of the inputs."""
        return PLACES if self.row.samples else self.row.inputs

    @property
    def queries(self) -> int:
        """How many there are, or how many channels of cells."""
        return next(t.shape[1] for t, along in zip(self.inputs, self.along_queries(), strict=False) if along)

    def along_queries(self) -> list[bool]:
        """Which inputs have an axis of queries: the second."""
        return [axis is not None for axis in (*self.row.axes[self.row.queries][:-1], *(None,) * bool(self.row.sizes))]

    def by_query(self, result: str) -> bool:
        """Whether each query has entries of its own."""
        return result == "output" or self.along_queries()[self.places.index(result.removeprefix("grad_"))]

    @property
    def gradients(self) -> tuple[str, ...]:
        """Names of the gradients that the operator has."""
        return tuple("grad_" + self.places[i] for i in self.row.differentiable)

    def like(self, result: str) -> Tensor:
        """The input whose dtype the result has, by the operator's rules."""
        return self.inputs[0 if result == "output" else self.places.index(result.removeprefix("grad_"))]


def stems(path: Path) -> list[Path]:
    """The calls of a folder and of the folders in it, or the one call of a file: their paths without endings."""
    if not os.path.exists(path):  # pathlib fails on a name that is too long
        raise Problem(f"calls must be a folder that record.py wrote, or one file of it; got {path}, which is not there")
    files = [path] if path.is_file() else [f for f in sorted(path.rglob("*")) if f.is_file()]
    found = [f.with_name(f.stem.removesuffix(GRADIENTS)) for f in files if f.suffix in ENDINGS]
    if not found:
        raise Problem(f"calls must hold files call-*.safetensors or call-*.pt; got none in {path}{_because(unfinished(path))}")
    return list(dict.fromkeys(found))


def unfinished(path: Path) -> list[str]:
    """A sentence for each file that the recording did not finish. The temporary ones are of safetensors."""
    parts = sorted([*path.rglob("*.part"), *path.rglob(".tmp*")]) if path.is_dir() else []
    return [f"{_schema.shown(part.name)} must be whole; got one that the recording did not finish" for part in parts]


def read(root: Path, paths: list[Path]) -> Iterator[Call | Problem]:
    """One call after another, or why there is none."""
    for stem in paths:
        name = _schema.shown(stem.relative_to(root) if root.is_dir() else stem.name)
        try:
            with ruled(f"{name} must be a call that can be read"):
                call = _read(name, stem)
        except Problem as problem:
            yield Problem(_schema.shown(problem, _schema.SENTENCE))
        else:
            yield call


def _read(name: str, stem: Path) -> Call:
    own, other = (_file(stem.with_name(stem.name + part)) for part in ("", GRADIENTS))
    if own is None:
        raise Problem(f"{name}{GRADIENTS} must lie beside {name}, which has its inputs; got no such file")
    about, tensors = _load(name, own)
    call = _call(name, about, tensors)
    if other:
        try:  # the call itself is judged whatever its gradients are
            found = _load(name + GRADIENTS, other)[1]
            call.grad_output = found.get("grad_output")
            call.results.update({n: found[n] for n in call.gradients if n in found})
        except Problem as problem:
            call.problems.append(str(problem))
    _hold_results(call)
    if not call.results:
        got = _schema.shown(", ".join(tensors))
        raise Problem(f"{name} must hold an output or gradients; got {got}{_because(call.problems)}")
    return call


def _because(problems: list[str]) -> str:
    return "".join(f"; {problem}" for problem in problems)


def _file(path: Path) -> Path | None:
    return next((file for end in ENDINGS if (file := path.with_name(path.name + end)).is_file()), None)


def _load(name: str, path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says about its call, and its tensors."""
    file = _schema.shown(path.name)
    rule = f"{file} must be a whole file that record.py wrote"
    if path.suffix == ".pt":
        with ruled(rule):
            whole = torch.load(path, weights_only=True, map_location="cpu")
            metadata, tensors = whole["metadata"], whole["tensors"]
    else:
        need("mx-driving replay", "[replay]", "safetensors")
        from safetensors import safe_open

        with ruled(rule), safe_open(path, "pt") as whole:
            metadata, tensors = whole.metadata() or {}, {key: whole.get_tensor(key) for key in whole.keys()}  # noqa: SIM118
    with ruled(rule):
        return _schema.about(name, json.loads(_schema.metadata(file, metadata))), _schema.tensors(file, tensors)


def _call(name: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> Call:
    operator = about["operator"]
    inputs = _sampling(name, about, tensors) if OPERATORS[operator].samples else _pooling(name, about, tensors)
    call = Call(name, about, inputs, {}, tensors.get("grad_output"))
    call.results = {n: tensors[n] for n in ("output", *call.gradients) if n in tensors}
    return call


def _pooling(name: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    row = OPERATORS[about["operator"]]
    with ruled(f"{name} must be a legal call of {row.name}"):
        inputs = _pools.inputs(name, about, tensors)
        checks.INPUTS[row.name](*given(row, inputs))
        checks.contents(row, given(row, inputs))
    return inputs


def given(row: Operator, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
    """The operator's arguments: sizes as numbers."""
    return (*inputs[:-1], *inputs[-1].tolist()) if row.sizes else tuple(inputs)


def _sampling(name: str, about: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    operator = about["operator"]
    if about.get("packed") and "shapes" in tensors:
        tensors["starts"] = _geometry.starts_of(tensors["shapes"])
    missing = [place for place in PLACES if place not in tensors]
    if missing:
        raise Problem(f"{name} must hold {missing[0]}; got {_schema.shown(', '.join(sorted(tensors)) or 'nothing')}")
    inputs = SamplingInputs(*(tensors[place] for place in PLACES))
    with ruled(f"{name} must be a legal call of {operator}"):
        shapes, starts = (t if t.dtype in INDEX else t.long() for t in (inputs.shapes, inputs.starts))
        inputs = inputs._replace(shapes=shapes, starts=starts)
        checks.INPUTS[operator](*inputs)
        _schema.hold_size(name, OPERATORS[operator].grouped, inputs)
        checks.contents(OPERATORS[operator], inputs)
    return inputs


def _hold_results(call: Call) -> None:
    """Leave out results that cannot belong to the inputs, and say so."""
    value, queries = call.inputs[0], call.queries
    if call.row.samples:
        of_output = (value.shape[0], queries, math.prod(value.shape[2:]))
    else:
        bs, *cells = call.inputs[-1].tolist()
        of_output = (bs, queries, *cells)
    if not call.row.samples:
        _shape_results(call, of_output)
    elif call.grad_output is not None and call.grad_output.numel() == math.prod(of_output):
        call.grad_output = call.grad_output.reshape(of_output)  # heads and channels may be apart
    for name in [*call.results, *(["grad_output"] if call.grad_output is not None else [])]:
        found = call.grad_output if name == "grad_output" else call.results[name]
        shape = of_output if name in ("output", "grad_output") else tuple(call.like(name).shape)
        if found is not None and (tuple(found.shape) != shape or found.dtype not in FLOATING):
            got = f"{tuple(found.shape)} {str(found.dtype).removeprefix('torch.')}"
            _drop(call, name, f"{name} of {call.name} must be floating, of shape {shape}; got {got}")
    if call.grad_output is None and any(n in call.results for n in call.gradients):
        _drop(call, "grad_output", f"{call.name} must hold grad_output for its gradients to be judged; got none")
    if call.about.get("cleared") is False and call.results:
        what = "grad_output" if any(n in call.results for n in call.gradients) else "output"
        words = f"{'output' if what == 'output' else 'gradients'} of {call.name} must be zero before a function adds to them"
        _drop(call, what, f"{words}; got others, so they are not judged")


def _shape_results(call: Call, of_output: tuple[int, ...]) -> None:
    """Functions that sum points into cells have results of many shapes."""
    for name, t in call.results.items():
        shape = of_output if name == "output" else tuple(call.like(name).shape)
        call.results[name] = _pools.shaped(call.about, name, t, shape)
    if call.grad_output is not None:
        call.grad_output = _pools.shaped(call.about, "grad_output", call.grad_output, of_output)


def _drop(call: Call, name: str, sentence: str) -> None:
    call.problems.append(sentence)
    call.results.pop(name, None)
    if name == "grad_output":
        call.grad_output = None
        for gradient in call.gradients:
            call.results.pop(gradient, None)
