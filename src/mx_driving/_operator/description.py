"""What each operator takes and gives: one text, and its rows as `OPERATORS`.

native/src/call/description.cpp has the same as a table; a test compares them. A bare operator reads its first input, value, at
the samples that two index tables, locations and weights describe. An operator with logits takes what linear layers give, and is
built on a bare operator.

A line that begins an operator is its name. Below it stand its kind (attention, aggregation or pooling) and its tensors in
order: name, elements, axes, and what else holds, with two spaces or more between. `floating` is float32, float64, float16 or
bfloat16, `index` is int32 or int64, `number` is either. The elements of the output are those of the input that is named there.
Axes of one name have one size; `a * b` is one axis, which an input may also have as two, `2 or 4` is an axis of either size.
`R` is the number of reference points, which depends on an option. After the output come sizes that no input has, which are
given as numbers; options with what each may
be; an axis that divides another; the axes along which processes may share the work; and the operator that this one is built on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
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
