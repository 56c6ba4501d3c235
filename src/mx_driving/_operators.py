"""What is true of an operator and more than one room must know: one row per operator.

Every operator reads five tensors, and rooms that serve all operators call them by the names of `Inputs`. `value` is what
samples are read from, whatever the operator itself calls it; `shapes` and `starts` are its index tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

# Where each of the five is among an operator's inputs.
VALUE, SHAPES, STARTS, LOCATIONS, WEIGHTS = range(5)
TABLES = (SHAPES, STARTS)
# Axis -> which dimension it is of the five inputs and of the output. None where an input is needed whole; where the output is
# None, the axis is summed over.
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
