"""Describe the inputs and outputs of each operator: one text, and its rows as `OPERATORS`.

native/src/call/description.cpp has the same as a table; a test compares them. A bare operator reads its first input, value, at
samples, which two index tables, locations and weights describe. An operator with logits takes the outputs of linear layers, and
is built on a bare operator.

The first line of an operator is its name. Below are its kind (attention, aggregation or pooling) and its tensors in
order: name, elements, axes and marks, with two spaces or more between. `floating` is float32, float64, float16 or
bfloat16, `index` is int32 or int64, `number` is either. The output has the dtype of the input that is named in its line.
Axes of one name have one size; `a * b` is one axis, or two axes in an input. `2 or 4` is an axis of either size.
`R` is the number of reference points, which depends on an option. After the output come `sizes`, axes that no input has: calls
give them as numbers; `option`, a name and its words; `divides`, an axis that divides another; `sharded`, the axes along which
processes may share the work; and `built on`, the bare operator.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor

TEXT = """
multi_scale_deformable_attn
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    value_spatial_shapes     index     num_levels, 2
    value_level_start_index  index     num_levels
    sampling_locations       floating  bs, num_queries, num_heads, num_levels, num_points, 2          gradient
    attention_weights        floating  bs, num_queries, num_heads, num_levels, num_points             gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     4
    sharded                  bs, num_queries, num_heads, num_levels, num_points

deformable_aggregation
    kind                     aggregation
    feature_maps             floating  bs, num_feat, c                                                gradient
    spatial_shape            index     cam, scale, 2
    scale_start_index        index     cam, scale
    sample_locations         floating  bs, anchor, pts, cam, 2                                        gradient
    weight                   floating  bs, anchor, pts, cam, scale, group                             gradient
    output                   feature_maps  bs, anchor, c
    rows                     4
    divides                  group, c
    sharded                  bs, anchor, group, cam, pts

geometric_kernel_attention
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    spatial_shapes           index     num_levels, 2
    level_start_index        index     num_levels
    sampling_locations       number    bs, num_queries, num_heads, num_levels, num_points, 2
    attention_weights        floating  bs, num_queries, num_heads, num_levels, num_points             gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     1
    sharded                  bs, num_queries, num_heads, num_levels, num_points

multi_scale_deformable_attn_with_logits
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    value_spatial_shapes     index     num_levels, 2
    value_level_start_index  index     num_levels
    reference_points         floating  bs, num_queries, R, 2 or 4                                     gradient
    sampling_offsets         floating  bs, num_queries, num_heads, num_levels, num_points, 2          gradient
    attention_logits         floating  bs, num_queries, num_heads, num_levels * num_points            gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     4
    option                   reference_axis  level, point
    sharded                  bs, num_queries, num_heads
    built on                 multi_scale_deformable_attn

deformable_aggregation_with_logits
    kind                     aggregation
    feature_maps             floating  bs, num_feat, c                                                gradient
    spatial_shape            index     cam, scale, 2
    scale_start_index        index     cam, scale
    key_points               floating  bs, anchor, pts, 3                                             gradient
    projection               floating  bs, cam, 4, 4                                                  gradient
    logits                   floating  bs, anchor, cam, scale, pts, group                             gradient
    image_size               floating  bs, cam, 2                                                     optional
    pair_scale               floating  bs, anchor, cam, pts                                           optional
    output                   feature_maps  bs, anchor, c
    rows                     4
    divides                  group, c
    sharded                  bs, anchor, group
    built on                 deformable_aggregation

geometric_kernel_attention_with_logits
    kind                     attention
    value                    floating  bs, num_keys, num_heads, embed_dims                            gradient
    spatial_shapes           index     num_levels, 2
    level_start_index        index     num_levels
    reference_points         floating  bs, num_queries, num_heads, 2
    window                   index     num_points, 2
    attention_logits         floating  bs, num_queries, num_heads, num_levels * num_points            gradient
    output                   value     bs, num_queries, num_heads * embed_dims
    rows                     1
    sharded                  bs, num_queries, num_heads
    built on                 geometric_kernel_attention

bev_pool_v3
    kind                     pooling
    feat                     floating  num_feat, c                                                    gradient
    depth                    floating  num_depth                                                      gradient
    ranks_feat               index     n
    ranks_depth              index     n
    ranks_bev                index     n
    output                   feat      bs, c, d, h, w
    sizes                    bs, d, h, w
    rows                     1
    sharded                  c, n
"""

# attention: heads sample the levels of a pyramid. aggregation: groups of channels sample the maps of cameras. pooling: points
# are summed in cells.
Kind = Literal["attention", "aggregation", "pooling"]


class SamplingInputs(NamedTuple):
    """The five inputs of a bare operator that reads maps at locations, as tensors or as their names."""

    value: Any
    shapes: Any
    starts: Any
    locations: Any
    weights: Any


class Input(NamedTuple):
    name: str
    elements: str  # "floating", "index" or "number"
    axes: tuple[str, ...]
    optional: bool
    gradient: bool
    factors: tuple[str, ...]  # axes, where `a * b` is two


@dataclasses.dataclass(frozen=True, eq=False)
class Operator:
    name: str
    kind: Kind
    tensors: tuple[Input, ...]
    output: tuple[str, ...]  # axes of the output
    rows: int  # rows of value that a sample reads
    sharded: tuple[str, ...]  # axes along which the work can be split
    sizes: tuple[str, ...]  # axes of the output that no input has; given as numbers
    choices: dict[str, tuple[str, ...]]  # option -> its words, the default first
    divides: tuple[str, ...]  # (axis, axis that it divides), or empty
    bare: str  # the operator that this one is built on, or ""

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(t.name for t in self.tensors)

    @cached_property
    def tables(self) -> tuple[str, str]:
        return self.inputs[1], self.inputs[2]

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Return the indices of the differentiable inputs, value first."""
        return tuple(i for i, t in enumerate(self.tensors) if t.gradient)

    @cached_property
    def weights(self) -> int:
        """Return the index of weights or logits, which have an element for each sample and group."""
        return self.differentiable[-1]

    @property
    def options(self) -> tuple[str, ...]:
        """Return the arguments after the tensors, as a schema declares them."""
        return (*(f"SymInt {size}" for size in self.sizes), *(f"str {option}" for option in self.choices))

    @property
    def queries(self) -> str:
        """Return the axis of queries, anchors or channels: axis 1 of the output."""
        return self.output[1]

    @property
    def blocks(self) -> str:
        """Return the axis that cuts channels into blocks. The output's last dimension is this axis times channels."""
        return self.divides[0] if self.divides else self.output[-1].split(" * ")[0]

    @cached_property
    def axes(self) -> dict[str, tuple[int | None, ...]]:
        """Return axis -> its dimension in each input and in the output, for the axes `sharded`. None: the whole input is
        needed, or the output is a sum over the axis."""
        tensors = (*(t.axes for t in self.tensors), self.output)
        return {axis: tuple(self._dimension(axis, axes) for axes in tensors) for axis in self.sharded}

    def _dimension(self, axis: str, axes: tuple[str, ...]) -> int | None:
        """Return the dimension of `axis` in `axes`: the axis itself, or the axis of blocks that it counts; else None."""
        if axis in axes:
            return axes.index(axis)
        whole = self.divides[1] if self.divides[:1] == (axis,) else None
        return next((i for i, other in enumerate(axes) if other == whole or other.split(" * ")[0] == axis), None)

    @cached_property
    def shared(self) -> tuple[int, ...]:
        """Return the indices of the inputs that every process needs whole: index tables, and inputs without a batch."""
        if self.kind == "pooling":
            return tuple(i for i, t in enumerate(self.tensors) if t.elements == "index")
        return tuple(i for i, dimension in enumerate(self.axes["bs"][:-1]) if dimension is None)


def split(axes: str) -> tuple[str, ...]:
    return tuple(axes.split(", "))


def _operator(name: str, lines: list[list[str]]) -> Operator:
    keys = ("kind", "output", "sizes", "rows", "option", "divides", "sharded", "built on")
    facts = {line[0]: line[1:] for line in lines if line[0] in keys}
    tensors = tuple(
        Input(tensor, elements, split(axes), "optional" in rest, "gradient" in rest, tuple(re.split(r", | \* ", axes)))
        for tensor, elements, axes, *rest in (line for line in lines if line[0] not in keys)
    )
    return Operator(
        name,
        cast("Kind", facts["kind"][0]),
        tensors,
        split(facts["output"][1]),
        rows=int(facts["rows"][0]),
        sharded=split(facts["sharded"][0]),
        sizes=split(facts["sizes"][0]) if "sizes" in facts else (),
        choices={facts["option"][0]: split(facts["option"][1])} if "option" in facts else {},
        divides=split(facts["divides"][0]) if "divides" in facts else (),
        bare=facts.get("built on", [""])[0],
    )


def _read(text: str) -> Iterator[Operator]:
    for paragraph in text.strip().split("\n\n"):
        name, *lines = paragraph.splitlines()
        yield _operator(name, [re.split(r"\s{2,}", line.strip()) for line in lines])


OPERATORS = {operator.name: operator for operator in _read(TEXT)}
MULTI_SCALE, AGGREGATION = "multi_scale_deformable_attn", "deformable_aggregation"
GEOMETRIC, POOL = "geometric_kernel_attention", "bev_pool_v3"
# The operators that read maps at locations.
SAMPLING = {name: operator for name, operator in OPERATORS.items() if operator.kind != "pooling"}


def autocast_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype of an output under autocast: float32 if value has 16 bits."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def empty_gradients(tensors: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Return memory for the gradient of each tensor, and a tensor without elements where `mask` is False."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed else t.new_empty((0,))
        for t, needed in zip(tensors, mask, strict=True)
    ]
