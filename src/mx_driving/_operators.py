"""Facts about the operators that several modules need: one row per operator.

Every operator reads five tensors. Modules that serve all operators call them by the names of `Inputs`: samples are read from
`value`, whatever the operator itself calls it, and `shapes` and `starts` are the index tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# The places of the five tensors among an operator's inputs.
VALUE, SHAPES, STARTS, LOCATIONS, WEIGHTS = range(5)
TABLES = (SHAPES, STARTS)
# Axis -> its dimension in each of the five inputs and in the output. None: the input is needed whole, or the output is a sum
# over the axis.
Axes = dict[str, tuple[int | None, ...]]


class Inputs(NamedTuple):
    """One thing for each of the five inputs, such as its name."""

    value: str
    shapes: str
    starts: str
    locations: str
    weights: str


class Operator(NamedTuple):
    name: str
    inputs: Inputs  # their names
    differentiable: tuple[int, ...]  # which of the five have a gradient, value first
    rows: int  # rows of value that a sample reads
    axes: Axes
    blocks: str  # the axis that cuts channels into blocks: the output's last dimension is this axis times channels
    grouped: bool = False  # the last axis of weights is `blocks`, so that a sample has several weights
    integer_locations: bool = False  # locations may be integers

    @property
    def tables(self) -> tuple[str, str]:
        """The names of the index tables."""
        return self.inputs.shapes, self.inputs.starts


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
_ROWS = (
    Operator(
        "multi_scale_deformable_attn",
        Inputs("value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights"),
        differentiable=(VALUE, LOCATIONS, WEIGHTS),
        rows=4,
        axes=_ATTENTION,
        blocks="num_heads",
    ),
    Operator(
        "deformable_aggregation",
        Inputs("feature_maps", "spatial_shape", "scale_start_index", "sample_locations", "weight"),
        differentiable=(VALUE, LOCATIONS, WEIGHTS),
        rows=4,
        axes=_AGGREGATION,
        blocks="group",
        grouped=True,
    ),
    Operator(
        "geometric_kernel_attention",
        Inputs("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights"),
        differentiable=(VALUE, WEIGHTS),
        rows=1,
        axes=_ATTENTION,
        blocks="num_heads",
        integer_locations=True,
    ),
)
OPERATORS = {row.name: row for row in _ROWS}


def gradients(tensors: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Memory for the gradient of each tensor where `mask` asks for it, an empty tensor where it does not."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if wanted else t.new_empty((0,))
        for t, wanted in zip(tensors, mask, strict=True)
    ]
