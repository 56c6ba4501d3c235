"""Checks of the operators with logits, named as their bare ones. The form of a sentence, and the pieces, are _check.py's."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from ._check import (
    FLOATING,
    FLOATING_RULE,
    INDEX,
    INDEX_RULE,
    INPUTS,
    LOCATION,
    LOCATION_RULE,
    Named,
    fail,
    need_axes,
    need_batch_and_heads,
    need_dtype,
    need_one_device,
    need_shape,
    tensors,
)
from ._operators import OPERATORS


def multi_scale_deformable_attn(
    names: tuple[str, ...],
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    reference_points: Tensor,
    offsets: Tensor,
    logits: Tensor,
    reference_axis: str = "level",
) -> None:
    """Check the inputs of multi_scale_deformable_attn_with_logits."""
    if reference_axis not in ("level", "point"):
        fail(ValueError, "reference_axis", "be 'level' or 'point'", repr(reference_axis))
    given = (value, shapes, starts, reference_points, offsets, logits)
    if _multi_scale_agrees(*given, reference_axis):
        return
    named = list(zip(names, given, strict=True))
    tensors(*named)
    need_axes(names[0], value, "bs, num_keys, num_heads, embed_dims")
    need_axes(names[1], shapes, "num_levels, 2")
    axes = "bs, num_queries, num_heads, num_levels, num_points, 2"
    need_axes(names[4], offsets, axes)
    bs, _, heads, _ = value.shape
    levels, queries, points = shapes.shape[0], offsets.shape[1], offsets.shape[4]
    need_shape(names[1], shapes, "num_levels, 2", levels, 2)
    need_shape(names[2], starts, "num_levels", levels)
    if logits.shape[:3] == offsets.shape[:3]:
        need_batch_and_heads(names[0], value, offsets)
    need_shape(names[4], offsets, axes, bs, queries, heads, levels, points, 2)
    need_logits(names[5], logits, bs, queries, heads, levels, points)
    references = f"num_levels={levels} or 1" if reference_axis == "level" else f"a divisor of num_points={points}"
    if not _has_references(reference_points, bs, queries, levels, points, reference_axis):
        rule = f"have shape (bs={bs}, num_queries={queries}, {references}, 2 or 4)"
        fail(ValueError, names[3], rule, tuple(reference_points.shape))
    _need_dtypes(named)
    need_one_device(*named)


def need_logits(name: str, logits: Tensor, bs: int, queries: int, heads: int, levels: int, points: int) -> None:
    """Logits over levels and points together, on one axis or on two."""
    if logits.dim() == 5:
        axes = "bs, num_queries, num_heads, num_levels, num_points"
        need_shape(name, logits, axes, bs, queries, heads, levels, points)
    else:
        axes = "bs, num_queries, num_heads, num_levels * num_points"
        need_shape(name, logits, axes, bs, queries, heads, levels * points)


def _need_dtypes(named: list[Named]) -> None:
    """Value floating, the index tables integers, all others floating."""
    for place, (name, t) in enumerate(named):
        if place in (1, 2):
            need_dtype(name, t, INDEX, INDEX_RULE)
        else:
            need_dtype(name, t, FLOATING, FLOATING_RULE)


def _has_references(t: Tensor, bs: int, queries: int, levels: int, points: int, axis: str) -> bool:
    if t.dim() != 4 or t.shape[0] != bs or t.shape[1] != queries or t.shape[3] not in (2, 4):
        return False
    count = t.shape[2]
    return count in (levels, 1) if axis == "level" else count > 0 and points % count == 0


def _multi_scale_agrees(
    value: Any, shapes: Any, starts: Any, reference_points: Any, offsets: Any, logits: Any, axis: str
) -> bool:
    """Whether all rules of `multi_scale_deformable_attn` hold."""
    given = (value, shapes, starts, reference_points, offsets, logits)
    if not (all(isinstance(t, Tensor) for t in given) and value.dim() == 4 and offsets.dim() == 6):
        return False
    bs, _, heads, _ = value.shape
    _, queries, _, levels, points, _ = sampled = offsets.shape
    return (
        sampled == (bs, queries, heads, levels, points, 2)
        and _are_logits(logits, bs, queries, heads, levels, points)
        and _has_references(reference_points, bs, queries, levels, points, axis)
        and shapes.shape == (levels, 2)
        and starts.shape == (levels,)
        and value.dtype in FLOATING
        and shapes.dtype in INDEX
        and starts.dtype in INDEX
        and reference_points.dtype in FLOATING
        and offsets.dtype in FLOATING
        and logits.dtype in FLOATING
        and value.device == shapes.device == starts.device == reference_points.device == offsets.device == logits.device
    )


def _are_logits(t: Tensor, bs: int, queries: int, heads: int, levels: int, points: int) -> bool:
    return t.shape == (bs, queries, heads, levels * points) or t.shape == (bs, queries, heads, levels, points)


def geometric_kernel_attention(
    names: tuple[str, ...],
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    reference_points: Tensor,
    window: Tensor,
    logits: Tensor,
) -> None:
    """Check the inputs of geometric_kernel_attention_with_logits."""
    given = (value, shapes, starts, reference_points, window, logits)
    if _geometric_agrees(*given):
        return
    named = list(zip(names, given, strict=True))
    tensors(*named)
    need_axes(names[0], value, "bs, num_keys, num_heads, embed_dims")
    need_axes(names[1], shapes, "num_levels, 2")
    need_axes(names[3], reference_points, "bs, num_queries, num_heads, 2")
    need_axes(names[4], window, "num_points, 2")
    bs, _, heads, _ = value.shape
    levels, queries, points = shapes.shape[0], reference_points.shape[1], window.shape[0]
    need_shape(names[1], shapes, "num_levels, 2", levels, 2)
    need_shape(names[2], starts, "num_levels", levels)
    if logits.shape[:3] == reference_points.shape[:3]:
        need_batch_and_heads(names[0], value, reference_points)
    need_shape(names[3], reference_points, "bs, num_queries, num_heads, 2", bs, queries, heads, 2)
    need_shape(names[4], window, "num_points, 2", points, 2)
    need_logits(names[5], logits, bs, queries, heads, levels, points)
    need_dtype(names[4], window, LOCATION, LOCATION_RULE)
    _need_dtypes([pair for pair in named if pair[0] != names[4]])
    need_one_device(*named)


def _geometric_agrees(value: Any, shapes: Any, starts: Any, reference_points: Any, window: Any, logits: Any) -> bool:
    """Whether all rules of `geometric_kernel_attention` hold."""
    given = (value, shapes, starts, reference_points, window, logits)
    if not (all(isinstance(t, Tensor) for t in given) and value.dim() == reference_points.dim() == 4 and window.dim() == 2):
        return False
    bs, _, heads, _ = value.shape
    levels, queries, points = starts.numel(), reference_points.shape[1], window.shape[0]
    return (
        reference_points.shape == (bs, queries, heads, 2)
        and window.shape == (points, 2)
        and _are_logits(logits, bs, queries, heads, levels, points)
        and shapes.shape == (levels, 2)
        and starts.shape == (levels,)
        and value.dtype in FLOATING
        and shapes.dtype in INDEX
        and starts.dtype in INDEX
        and reference_points.dtype in FLOATING
        and window.dtype in LOCATION
        and logits.dtype in FLOATING
        and value.device == shapes.device == starts.device == reference_points.device == window.device == logits.device
    )


_CHECKS = {
    "multi_scale_deformable_attn": multi_scale_deformable_attn,
    "geometric_kernel_attention": geometric_kernel_attention,
}
INPUTS.update({o.name: functools.partial(_CHECKS[o.bare], o.inputs) for o in OPERATORS.values() if o.bare})
