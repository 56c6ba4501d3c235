"""Describe the inputs and outputs of each operator: the table `OPERATORS`.

The C++ library is built from the same table, by native/src/call/describe.py. So this file imports only the standard library.
A bare operator samples its first input, value; two index tables, locations and weights describe the samples. An operator with
logits takes the outputs of linear layers, and calls a bare operator.
"""

from __future__ import annotations

import dataclasses
from functools import cached_property
from typing import Any, Literal, NamedTuple

# attention: heads sample the levels of a pyramid.
# aggregation: groups of channels sample the maps of cameras.
# pooling: points are summed in cells.
Kind = Literal["attention", "aggregation", "pooling"]


class SamplingInputs(NamedTuple):
    """The five inputs of a bare operator that reads maps at locations, as tensors or as their names."""

    value: Any
    shapes: Any
    starts: Any
    locations: Any
    weights: Any


@dataclasses.dataclass(frozen=True)
class Input:
    """An input tensor of an operator.

    Axes of the same name have the same size. `a * b` is a single axis or two. `2 or 4` is an axis of size 2 or 4. `R` is the
    number of reference points; an option decides its legal sizes.
    """

    name: str
    elements: Literal["floating", "index", "number"]  # "index": int32 or int64; "number": floating or integer
    shape: str
    differentiable: bool = False
    optional: bool = False

    @cached_property
    def axes(self) -> tuple[str, ...]:
        return tuple(self.shape.split(", "))

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Return the axes, with `a * b` as two axes."""
        return tuple(self.shape.replace(" * ", ", ").split(", "))


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    name: str
    kind: Kind
    tensors: tuple[Input, ...]
    output: tuple[str, ...]  # axes of the output; its dtype is that of the first input
    rows: int  # rows of value that a sample reads
    sharded: tuple[str, ...]  # axes along which processes may share the work
    sizes: tuple[str, ...] = ()  # axes of the output whose sizes callers pass as numbers
    choices: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # option -> values, the default first
    divides: tuple[str, ...] = ()  # (a, b): the size of axis a divides the size of axis b
    bare: str = ""  # the bare operator of an operator with logits

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tensors)

    @cached_property
    def tables(self) -> tuple[str, str]:
        return self.inputs[1], self.inputs[2]

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Return the indices of the differentiable inputs, value first."""
        return tuple(i for i, t in enumerate(self.tensors) if t.differentiable)

    @cached_property
    def weights(self) -> int:
        """Return the index of weights or logits, which have an element for every sample and group."""
        return self.differentiable[-1]

    @cached_property
    def options(self) -> tuple[str, ...]:
        """Return the arguments after the tensors, in the syntax of a schema."""
        return (*(f"SymInt {size}" for size in self.sizes), *(f"str {option}" for option in self.choices))

    @property
    def queries(self) -> str:
        """Return the axis of queries, anchors or channels: axis 1 of the output."""
        return self.output[1]

    @property
    def blocks(self) -> str:
        """Return the axis of blocks of channels: heads or groups. The output's last dimension is blocks times channels."""
        return self.divides[0] if self.divides else self.output[-1].split(" * ")[0]

    @cached_property
    def axes(self) -> dict[str, tuple[int | None, ...]]:
        """Return, for every axis of `sharded`, its dimension in each input and in the output. None for an input means that
        every process needs the whole input. None for the output means that the output is a sum over the axis."""
        dimensions = {}
        for axis in self.sharded:
            # An axis that divides the channels into blocks is sharded with the channels.
            whole = self.divides[1] if self.divides[:1] == (axis,) else None
            dimensions[axis] = tuple(
                axes.index(axis)
                if axis in axes
                else next((i for i, other in enumerate(axes) if other == whole or other.split(" * ")[0] == axis), None)
                for axes in (*(t.axes for t in self.tensors), self.output)
            )
        return dimensions

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """Return the indices of the inputs that cannot be sharded: index tables, and inputs without a batch axis."""
        if self.kind == "pooling":
            return tuple(i for i, t in enumerate(self.tensors) if t.elements == "index")
        return tuple(i for i, dimension in enumerate(self.axes["bs"][:-1]) if dimension is None)


_TABLE = (
    Operator(
        "multi_scale_deformable_attn",
        kind="attention",
        tensors=(
            Input("value", "floating", "bs, num_keys, num_heads, embed_dims", differentiable=True),
            Input("value_spatial_shapes", "index", "num_levels, 2"),
            Input("value_level_start_index", "index", "num_levels"),
            Input(
                "sampling_locations", "floating", "bs, num_queries, num_heads, num_levels, num_points, 2", differentiable=True
            ),
            Input("attention_weights", "floating", "bs, num_queries, num_heads, num_levels, num_points", differentiable=True),
        ),
        output=("bs", "num_queries", "num_heads * embed_dims"),
        rows=4,
        sharded=("bs", "num_queries", "num_heads", "num_levels", "num_points"),
    ),
    Operator(
        "deformable_aggregation",
        kind="aggregation",
        tensors=(
            Input("feature_maps", "floating", "bs, num_feat, c", differentiable=True),
            Input("spatial_shape", "index", "cam, scale, 2"),
            Input("scale_start_index", "index", "cam, scale"),
            Input("sample_locations", "floating", "bs, anchor, pts, cam, 2", differentiable=True),
            Input("weight", "floating", "bs, anchor, pts, cam, scale, group", differentiable=True),
        ),
        output=("bs", "anchor", "c"),
        rows=4,
        divides=("group", "c"),
        sharded=("bs", "anchor", "group", "cam", "pts"),
    ),
    Operator(
        "geometric_kernel_attention",
        kind="attention",
        tensors=(
            Input("value", "floating", "bs, num_keys, num_heads, embed_dims", differentiable=True),
            Input("spatial_shapes", "index", "num_levels, 2"),
            Input("level_start_index", "index", "num_levels"),
            Input("sampling_locations", "number", "bs, num_queries, num_heads, num_levels, num_points, 2"),
            Input("attention_weights", "floating", "bs, num_queries, num_heads, num_levels, num_points", differentiable=True),
        ),
        output=("bs", "num_queries", "num_heads * embed_dims"),
        rows=1,
        sharded=("bs", "num_queries", "num_heads", "num_levels", "num_points"),
    ),
    Operator(
        "multi_scale_deformable_attn_with_logits",
        kind="attention",
        tensors=(
            Input("value", "floating", "bs, num_keys, num_heads, embed_dims", differentiable=True),
            Input("value_spatial_shapes", "index", "num_levels, 2"),
            Input("value_level_start_index", "index", "num_levels"),
            Input("reference_points", "floating", "bs, num_queries, R, 2 or 4", differentiable=True),
            Input("sampling_offsets", "floating", "bs, num_queries, num_heads, num_levels, num_points, 2", differentiable=True),
            Input("attention_logits", "floating", "bs, num_queries, num_heads, num_levels * num_points", differentiable=True),
        ),
        output=("bs", "num_queries", "num_heads * embed_dims"),
        rows=4,
        choices={"reference_axis": ("level", "point")},
        sharded=("bs", "num_queries", "num_heads"),
        bare="multi_scale_deformable_attn",
    ),
    Operator(
        "deformable_aggregation_with_logits",
        kind="aggregation",
        tensors=(
            Input("feature_maps", "floating", "bs, num_feat, c", differentiable=True),
            Input("spatial_shape", "index", "cam, scale, 2"),
            Input("scale_start_index", "index", "cam, scale"),
            Input("key_points", "floating", "bs, anchor, pts, 3", differentiable=True),
            Input("projection", "floating", "bs, cam, 4, 4", differentiable=True),
            Input("logits", "floating", "bs, anchor, cam, scale, pts, group", differentiable=True),
            Input("image_size", "floating", "bs, cam, 2", optional=True),
            Input("pair_scale", "floating", "bs, anchor, cam, pts", optional=True),
        ),
        output=("bs", "anchor", "c"),
        rows=4,
        divides=("group", "c"),
        sharded=("bs", "anchor", "group"),
        bare="deformable_aggregation",
    ),
    Operator(
        "geometric_kernel_attention_with_logits",
        kind="attention",
        tensors=(
            Input("value", "floating", "bs, num_keys, num_heads, embed_dims", differentiable=True),
            Input("spatial_shapes", "index", "num_levels, 2"),
            Input("level_start_index", "index", "num_levels"),
            Input("reference_points", "floating", "bs, num_queries, num_heads, 2"),
            Input("window", "index", "num_points, 2"),
            Input("attention_logits", "floating", "bs, num_queries, num_heads, num_levels * num_points", differentiable=True),
        ),
        output=("bs", "num_queries", "num_heads * embed_dims"),
        rows=1,
        sharded=("bs", "num_queries", "num_heads"),
        bare="geometric_kernel_attention",
    ),
    Operator(
        "bev_pool_v3",
        kind="pooling",
        tensors=(
            Input("feat", "floating", "num_feat, c", differentiable=True),
            Input("depth", "floating", "num_depth", differentiable=True),
            Input("ranks_feat", "index", "n"),
            Input("ranks_depth", "index", "n"),
            Input("ranks_bev", "index", "n"),
        ),
        output=("bs", "c", "d", "h", "w"),
        rows=1,
        sizes=("bs", "d", "h", "w"),
        sharded=("c", "n"),
    ),
)

OPERATORS = {operator.name: operator for operator in _TABLE}
MULTI_SCALE, AGGREGATION = "multi_scale_deformable_attn", "deformable_aggregation"
GEOMETRIC, POOL = "geometric_kernel_attention", "bev_pool_v3"
# The operators that read maps at locations.
SAMPLING = {name: operator for name, operator in OPERATORS.items() if operator.kind != "pooling"}
