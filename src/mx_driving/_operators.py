"""Facts about the operators that several modules need: one row per operator.

Every operator reads `value` at the samples that two index tables and the rest of its inputs say. A bare operator is given
locations and weights. An operator with logits is given what linear layers make, and is built on a bare one. Modules that
serve all operators call the inputs by their places: samples are read from `value`, whatever the operator itself calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import _whose as _whose  # here, because nearly every module of the package imports this one first

# The places of inputs: the first three of every operator, then those of a bare one.
VALUE, SHAPES, STARTS, LOCATIONS, WEIGHTS = range(5)
# Axis -> its dimension in each input and in the output. None: the input is needed whole, or the output is a sum over the axis.
Axes = dict[str, tuple[int | None, ...]]


class Inputs(NamedTuple):
    """One thing for each of the five inputs of a bare operator, such as its name."""

    value: str
    shapes: str
    starts: str
    locations: str
    weights: str


class Operator(NamedTuple):
    name: str
    inputs: tuple[str, ...]  # their names; of a bare operator an `Inputs`
    differentiable: tuple[int, ...]  # which of them have a gradient, value first
    rows: int  # rows of value that a sample reads
    axes: Axes
    queries: str  # the axis of what attends: axis 1 of the output and of the fourth input
    blocks: str  # the axis that cuts channels into blocks: the output's last dimension is this axis times channels
    grouped: bool = False  # the last axis of weights is `blocks`, so that a sample has several weights
    integer_locations: bool = False  # locations may be integers
    weights: int = WEIGHTS  # the place of weights or logits: one for each sample, and group
    optional: tuple[int, ...] = ()  # which inputs may be None
    options: tuple[str, ...] = ()  # what follows the tensors, as a schema declares it
    bare: str = ""  # the operator that this one is built on

    @property
    def tables(self) -> tuple[str, str]:
        """The names of the index tables."""
        return self.inputs[SHAPES], self.inputs[STARTS]

    @property
    def shared(self) -> tuple[int, ...]:
        """The places of the inputs that have no batch: the index tables, and what else belongs to the whole model."""
        return tuple(i for i, at in enumerate(self.axes["bs"][:-1]) if at is None)


_ATTENTION: Axes = {
    "bs": (0, None, None, 0, 0, 0),
    "num_queries": (None, None, None, 1, 1, 1),
    "num_heads": (2, None, None, 2, 2, 2),
    "num_levels": (None, 0, 0, 3, 3, None),
    "num_points": (None, None, None, 4, 4, None),
}
_AGGREGATION: Axes = {
    "bs": (0, None, None, 0, 0, 0),
    "anchor": (None, None, None, 1, 1, 1),
    "group": (2, None, None, None, 5, 2),
    "cam": (None, 0, 0, 3, 3, None),
    "pts": (None, None, None, 2, 2, None),
}
_BARE = (
    Operator(
        "multi_scale_deformable_attn",
        Inputs("value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights"),
        differentiable=(VALUE, LOCATIONS, WEIGHTS),
        rows=4,
        axes=_ATTENTION,
        queries="num_queries",
        blocks="num_heads",
    ),
    Operator(
        "deformable_aggregation",
        Inputs("feature_maps", "spatial_shape", "scale_start_index", "sample_locations", "weight"),
        differentiable=(VALUE, LOCATIONS, WEIGHTS),
        rows=4,
        axes=_AGGREGATION,
        queries="anchor",
        blocks="group",
        grouped=True,
    ),
    Operator(
        "geometric_kernel_attention",
        Inputs("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights"),
        differentiable=(VALUE, WEIGHTS),
        rows=1,
        axes=_ATTENTION,
        queries="num_queries",
        blocks="num_heads",
        integer_locations=True,
    ),
)


def _with_logits(bare: Operator, inputs: tuple[str, ...], differentiable: tuple[int, ...], **facts: object) -> Operator:
    """The operator `bare` from where linear layers end. `inputs` follow value and the index tables."""
    name, names = f"{bare.name}_with_logits", (*bare.inputs[:LOCATIONS], *inputs)
    return bare._replace(name=name, inputs=names, differentiable=differentiable, bare=bare.name, **facts)


# No level, camera or point can be left out: softmax is over all of them.
_WITH_LOGITS = (
    _with_logits(
        _BARE[0],
        ("reference_points", "sampling_offsets", "attention_logits"),
        differentiable=(VALUE, 3, 4, 5),
        weights=5,
        options=("str reference_axis",),
        axes={
            "bs": (0, None, None, 0, 0, 0, 0),
            "num_queries": (None, None, None, 1, 1, 1, 1),
            "num_heads": (2, None, None, None, 2, 2, 2),
        },
    ),
    _with_logits(
        _BARE[1],
        ("key_points", "projection", "logits", "image_size", "pair_scale"),
        differentiable=(VALUE, 3, 4, 5),
        weights=5,
        optional=(6, 7),
        axes={
            "bs": (0, None, None, 0, 0, 0, 0, 0, 0),
            "anchor": (None, None, None, 1, None, 1, None, 1, 1),
            "group": (2, None, None, None, None, 5, None, None, 2),
        },
    ),
    _with_logits(
        _BARE[2],
        ("reference_points", "window", "attention_logits"),
        differentiable=(VALUE, 5),
        weights=5,
        axes={
            "bs": (0, None, None, 0, None, 0, 0),
            "num_queries": (None, None, None, 1, None, 1, 1),
            "num_heads": (2, None, None, 2, None, 2, 2),
        },
    ),
)
OPERATORS = {row.name: row for row in (*_BARE, *_WITH_LOGITS)}


def gradients(tensors: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradient of each tensor where `mask` asks for it, an empty tensor where it does not."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if wanted else t.new_empty((0,))
        for t, wanted in zip(tensors, mask, strict=True)
    ]
