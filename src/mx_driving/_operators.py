"""Facts about the operators, one row for each: what _descriptions.py says, and what follows from it.

A bare operator reads its first input, value, at the samples that two index tables, locations and weights describe. An operator
with logits takes what linear layers give, and is built on a bare one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

from . import _import_guard as _import_guard  # here, because nearly every module of the package imports this one first
from ._descriptions import TEXT

# Axis -> its dimension in each input and in the output. None: the input is needed whole, or the output is a sum over the axis.
Axes = dict[str, tuple[int | None, ...]]


# attention: heads sample the levels of a pyramid. aggregation: groups of channels sample the maps of cameras. pooling: points
# are added up in cells.
Kind = Literal["attention", "aggregation", "pooling"]


class SamplingInputs(NamedTuple):
    """One thing for each of the five inputs of a bare operator that reads maps at locations: a tensor, or a name."""

    value: Any
    shapes: Any
    starts: Any
    locations: Any
    weights: Any


class Input(NamedTuple):
    name: str
    elements: str  # floating, index or number
    axes: tuple[str, ...]
    optional: bool
    gradient: bool
    factors: tuple[str, ...]  # axes, with `a * b` as two


class Operator(NamedTuple):
    name: str
    kind: Kind
    tensors: tuple[Input, ...]
    output: tuple[str, ...]  # axes
    rows: int  # rows of value that a sample reads
    sharded: tuple[str, ...]  # axes along which the work can be split
    sizes: tuple[str, ...]  # axes of the output that no input has; given as numbers
    choices: dict[str, tuple[str, ...]]  # option -> what it may be
    divides: tuple[str, ...]  # the first of these axes divides the second; or none
    bare: str  # the operator that this one is built on, or ""
    # What follows from these:
    inputs: tuple[str, ...]  # names
    differentiable: tuple[int, ...]  # which inputs have a gradient, value first
    optional: tuple[int, ...]  # which inputs may be None
    axes: Axes  # of `sharded`
    queries: str  # the axis of what attends: axis 1 of the output
    blocks: str  # the axis that cuts channels into blocks: the output's last dimension is this axis times channels
    weights: int  # the place of weights or logits: one for each sample, and group

    @property
    def integer_locations(self) -> bool:
        return any(t.elements == "number" for t in self.tensors)

    @property
    def options(self) -> tuple[str, ...]:
        """What follows the tensors, as a schema declares it."""
        return (*(f"SymInt {size}" for size in self.sizes), *(f"str {option}" for option in self.choices))

    @property
    def tables(self) -> tuple[str, str]:
        """The names of the index tables."""
        _, shapes, starts, *_ = self.inputs
        return shapes, starts

    @property
    def shared(self) -> tuple[int, ...]:
        """The places of the inputs that all processes have whole: index tables, and what else has no batch."""
        if self.kind == "pooling":
            return tuple(i for i, t in enumerate(self.tensors) if t.elements == "index")
        return tuple(i for i, at in enumerate(self.axes["bs"][:-1]) if at is None)


def split(axes: str) -> tuple[str, ...]:
    return tuple(axes.split(", "))


def _place(axis: str, axes: tuple[str, ...], divides: tuple[str, ...]) -> int | None:
    """Where `axis` lies among `axes`: as an axis, or as what an axis of blocks counts first."""
    if axis in axes:
        return axes.index(axis)
    whole = divides[1] if divides and divides[0] == axis else None
    return next((i for i, each in enumerate(axes) if each == whole or each.split(" * ")[0] == axis), None)


def _operator(name: str, lines: list[list[str]]) -> Operator:
    keys = ("kind", "output", "sizes", "rows", "option", "divides", "sharded", "built on")
    facts = {line[0]: line[1:] for line in lines if line[0] in keys}
    tensors = tuple(
        Input(tensor, elements, split(axes), "optional" in rest, "gradient" in rest, tuple(re.split(r", | \* ", axes)))
        for tensor, elements, axes, *rest in (line for line in lines if line[0] not in keys)
    )
    output, sharded = split(facts["output"][1]), split(facts["sharded"][0])
    divides = split(facts["divides"][0]) if "divides" in facts else ()
    differentiable = tuple(i for i, t in enumerate(tensors) if t.gradient)
    return Operator(
        name,
        cast("Kind", facts["kind"][0]),
        tensors,
        output,
        rows=int(facts["rows"][0]),
        sharded=sharded,
        sizes=split(facts["sizes"][0]) if "sizes" in facts else (),
        choices={facts["option"][0]: split(facts["option"][1])} if "option" in facts else {},
        divides=divides,
        bare=facts.get("built on", [""])[0],
        inputs=tuple(t.name for t in tensors),
        differentiable=differentiable,
        optional=tuple(i for i, t in enumerate(tensors) if t.optional),
        axes={axis: tuple(_place(axis, axes, divides) for axes in (*(t.axes for t in tensors), output)) for axis in sharded},
        queries=output[1],
        blocks=divides[0] if divides else output[-1].split(" * ")[0],
        weights=differentiable[-1],
    )


def _read(text: str) -> Iterator[Operator]:
    for paragraph in text.strip().split("\n\n"):
        name, *lines = paragraph.splitlines()
        yield _operator(name, [re.split(r"\s{2,}", line.strip()) for line in lines])


OPERATORS = {operator.name: operator for operator in _read(TEXT)}
SAMPLING = {
    name: operator for name, operator in OPERATORS.items() if operator.kind != "pooling"
}  # those that read maps at locations


def autocast_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype of an output under autocast: float32 where value has 16 bits."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def empty_gradients(tensors: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Return memory for the gradient of each tensor, and a tensor without elements where `mask` is False."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed else t.new_empty((0,))
        for t, needed in zip(tensors, mask, strict=True)
    ]
