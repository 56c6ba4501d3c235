"""Read a recording, and convert its calls of the vendor's and the extensions' functions to calls of the operators. An
unreadable file becomes one Problem; the others are still read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._foreign.stand_ins import sampling_inputs, stand_in
from .._foreign_functions import FUNCTIONS
from .._operator import checks
from .._operator.description import OPERATORS, POOL, Operator, SamplingInputs
from .._operator.rules import Problem, ruled
from .._torch_private import TorchDispatchMode

FORMAT = 1  # the version of the file format that this module reads; it must equal record.FORMAT
GRADIENTS = "-gradients"  # ends the name of the file that holds a call's gradients
_BARE = [name for name, operator in OPERATORS.items() if not operator.bare]
_SCHEMA = {
    **dict.fromkeys(("function", "device", "caller", "reason", "form"), str),
    **{"index": int, "sizes": dict, "strides": dict},
}
Facts = dict[str, Any]  # tensors and sizes by name
_POOLS = {function.name: function for function in FUNCTIONS if function.operator == POOL}
_ABSENT = dict.fromkeys(("depth", "ranks_depth", "ranks_feat", "memo"))
_CHANNELS_FIRST_FEAT = "voxel_pooling_inference_forward_wrapper"


@dataclass
class RecordedCall:
    """A recorded call of a function, converted to a call of an operator. `results`: name -> the device's output or gradient."""

    name: str
    about: dict[str, Any]
    inputs: tuple[Tensor, ...]
    results: dict[str, Tensor]
    sizes: tuple[int, ...] = ()  # the operator's integer arguments
    grad_output: Tensor | None = None

    @property
    def description(self) -> Operator:
        return OPERATORS[self.about["operator"]]

    @property
    def sampling(self) -> SamplingInputs:
        return SamplingInputs(*self.inputs)

    @property
    def input_names(self) -> tuple[str, ...]:
        return SamplingInputs._fields if self.description.kind != "pooling" else self.description.inputs

    @property
    def gradients(self) -> tuple[str, ...]:
        """Return the names of the operator's gradients."""
        return tuple("grad_" + self.input_names[i] for i in self.description.differentiable)

    @property
    def has_queries(self) -> tuple[bool, ...]:
        """Return for each input whether its axis 1 is also axis 1 of the output: queries, or channels in pooling."""
        return tuple(axis is not None for axis in self.description.axes[self.description.queries][:-1])

    @property
    def num_queries(self) -> int:
        return next(t.shape[1] for t, has_axis in zip(self.inputs, self.has_queries, strict=True) if has_axis)

    def is_by_query(self, result: str) -> bool:
        """Return whether a result has an axis of queries. A result without that axis is a sum over queries."""
        return result == "output" or self.has_queries[self.input_names.index(result.removeprefix("grad_"))]

    def shape_of(self, result: str) -> tuple[int, ...]:
        if result in ("output", "grad_output"):
            if self.description.kind == "pooling":
                return (self.sizes[0], self.inputs[0].shape[1], *self.sizes[1:])
            return (self.inputs[0].shape[0], self.inputs[3].shape[1], math.prod(self.inputs[0].shape[2:]))
        return tuple(self.inputs[self.input_names.index(result.removeprefix("grad_"))].shape)


def find_calls(path: Path) -> dict[str, Path]:
    """Return the calls of a folder and its subfolders, or the call of a file, as name -> path without suffix."""
    if not os.path.exists(path):  # pathlib fails on a name that is too long
        raise Problem(f"calls must be a folder that record.py wrote, or one file of it; got {path}, which is not there")
    files = [path] if path.is_file() else sorted(path.rglob("*.pt"))
    stems = [f.with_name(f.stem.removesuffix(GRADIENTS)) for f in files if f.suffix == ".pt"]
    if not stems:
        raise Problem(f"calls must hold files call-*.pt; got none in {path}")
    return {str(stem.relative_to(path)) if path.is_dir() else stem.name: stem for stem in stems}


def list_files(stems: Iterable[Path]) -> list[Path]:
    return [stem.with_name(f"{stem.name}{end}.pt") for stem in stems for end in ("", GRADIENTS)]


def read(name: str, stem: Path) -> tuple[RecordedCall, list[str]]:
    """Return a call, and reasons for results that are left out. Raise a Problem if the call cannot be read."""
    file, gradients_file = list_files([stem])
    if not file.is_file():
        raise Problem(f"{name}{GRADIENTS} must lie beside {name}, which has its inputs; got no such file")
    about, tensors = _load(file)
    with ruled(f"{name} must be a legal call of {about['operator']}"):
        operator = OPERATORS[about["operator"]]
        inputs, sizes = read_inputs(name, about, tensors)
        checks.check_inputs(operator, *inputs, *sizes)
        checks.check_numbers(operator, (*inputs, *sizes))
    problems = []
    if gradients_file.is_file():
        try:  # if this file cannot be read, the output is still judged
            tensors.update(_load(gradients_file)[1])
        except Problem as problem:
            problems.append(str(problem))
    call = RecordedCall(name, about, inputs, {}, sizes)

    # Add the results whose shapes match the call's inputs.
    names = [result for result in ("output", *call.gradients) if result in tensors]
    if not names:
        raise Problem(f"{name} must hold an output or gradients; got {', '.join(tensors)}")
    if names != ["output"] and "grad_output" not in tensors:
        problems.append(f"{name} must hold grad_output for its gradients to be judged; got none")
        names = [result for result in names if result == "output"]
    for result in (["grad_output"] if "grad_output" in tensors else []) + names:
        shape, t = call.shape_of(result), tensors[result]
        if about["operator"] == POOL:
            function = about.get("form", "")
            if t.dim() and result in ("output", "grad_output") and function in _POOLS and _POOLS[function].layout.endswith("C"):
                t = t.movedim(-1, 1)
            if t.dim() > 1 and result == "grad_feat":
                t = t.movedim(1, -1) if function == _CHANNELS_FIRST_FEAT else t
                t = t.flatten()[: math.prod(shape)]  # without depth, feat may have more rows than there are points
        if t.numel() == math.prod(shape):
            t = t.reshape(shape)
        if t.shape == shape and t.is_floating_point():
            call.results[result] = t
        else:
            dtype = str(t.dtype).removeprefix("torch.")
            problems.append(f"{result} of {name} must be floating, of shape {shape}; got {tuple(t.shape)} {dtype}")
    call.grad_output = call.results.pop("grad_output", None)
    if call.grad_output is None:
        call.results = {result: t for result, t in call.results.items() if result == "output"}
    return call, problems


def _load(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the metadata and the tensors of a file."""
    with ruled(f"{file.name} must be a whole file that record.py wrote"):
        contents = torch.load(file, weights_only=True, map_location="cpu")
        _check_dict(file.name, contents)
        metadata, tensors = contents.get("metadata"), contents.get("tensors")
        _check_dict(f"metadata of {file.name}", metadata, str)
        _check_dict(f"tensors of {file.name}", tensors, Tensor)
        tensors = {name: t.detach() for name, t in tensors.items()}
        if metadata.get("format") != str(FORMAT):
            raise Problem(
                f"{file.name} must have format {FORMAT}, the one that this version reads; got {metadata.get('format')}"
            )
        about = json.loads(metadata.get("call", "null"))
        _check_dict(f"call of {file.name}", about)
        operator = about.get("operator")
    if operator not in _BARE:
        raise Problem(f"the operator of {file.name} must be one of {', '.join(_BARE)}; got {operator}")
    for key, kind in _SCHEMA.items():
        if not isinstance(about.get(key, kind()), kind):
            raise Problem(f"the {key} of {file.name} must be of type {kind.__name__}; got {about[key]}")
    return about, tensors


def _check_dict(name: str, value: Any, kind: type = object) -> None:
    """Check that a value is a dictionary with keys of type str and entries of type `kind`."""
    wrong = [value]
    if isinstance(value, dict):
        wrong = [key for key in value if not isinstance(key, str)]
        wrong += [entry for entry in value.values() if not isinstance(entry, kind)]
    if wrong:
        entries = "" if kind is object else f" of {kind.__name__}"
        raise Problem(f"{name} must be a dict{entries}; got {type(wrong[0]).__name__}")


class _Captured(Exception):
    """Carries the arguments of an operator out of the function that calls the operator."""


class _Capture(TorchDispatchMode):
    """Raise _Captured with the arguments of the first operator, instead of computing it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mx_driving":
            raise _Captured(args)
        return func(*args, **(kwargs or {}))


def read_inputs(name: str, about: Facts, tensors: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the operator's input tensors and its sizes."""
    facts = {**_ABSENT, **about.get("sizes", {}), **tensors}
    try:
        if OPERATORS[about["operator"]].kind == "pooling":
            # Call our pooling function with the recorded arguments, and take the inputs of the operator that it calls.
            function = about.get("form", POOL)
            if function not in _POOLS:
                raise Problem(f"the form of {name} must be one of {', '.join(_POOLS)}; got {function}")
            arguments, inputs = [facts[parameter] for parameter in _POOLS[function].names], None
            try:
                with torch.no_grad(), _Capture():
                    find_pool(function)(*arguments)
            except _Captured as captured:
                inputs = captured.args[0][1:-1] if _POOLS[function].backward else captured.args[0]
            if inputs is None:
                raise Problem(f"{name} must call {POOL}; got none")
        else:
            tables = {name: facts[name] for name in ("shapes", "starts") if name in facts}
            tables = {name: t if t.dtype in (torch.int32, torch.int64) else t.long() for name, t in tables.items()}
            inputs = sampling_inputs(about["operator"], {**facts, **tables})
    except KeyError as error:
        present = ", ".join(sorted(name for name, fact in facts.items() if fact is not None))
        raise Problem(f"{name} must hold {error.args[0]}; got {present or 'nothing'}") from None
    return tuple(inputs[:5]), tuple(inputs[5:])


def find_pool(function: str) -> Callable[..., Any]:
    """Return our pooling function for a name in the table of foreign functions. For BEVPoolV3.apply, return bev_pool_v3, which
    takes the same arguments."""
    if _POOLS[function].module != "mx_driving":
        return stand_in(_POOLS[function])
    return getattr(ops, "bev_pool_v3" if function == "BEVPoolV3.apply" else function)
