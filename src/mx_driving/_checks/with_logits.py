"""Checks of the operators with logits, named as their bare ones. What they are made of: rules.py."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .._operators import OPERATORS
from .inputs import INPUTS, need_batch_and_heads, need_groups
from .rules import FLOATING, INDEX, fail, need_axes, need_dtypes, need_one_device, need_shape, tensors


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
    need_dtypes(named)
    need_one_device(*named)


def need_logits(name: str, logits: Tensor, bs: int, queries: int, heads: int, levels: int, points: int) -> None:
    """Logits over levels and points together, on one axis or on two."""
    if logits.dim() == 5:
        axes = "bs, num_queries, num_heads, num_levels, num_points"
        need_shape(name, logits, axes, bs, queries, heads, levels, points)
    else:
        axes = "bs, num_queries, num_heads, num_levels * num_points"
        need_shape(name, logits, axes, bs, queries, heads, levels * points)


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
    need_dtypes(named, integers=(1, 2, 4))
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
        and window.dtype in INDEX
        and logits.dtype in FLOATING
        and value.device == shapes.device == starts.device == reference_points.device == window.device == logits.device
    )


def deformable_aggregation(
    names: tuple[str, ...],
    feature_maps: Tensor,
    shapes: Tensor,
    starts: Tensor,
    key_points: Tensor,
    projection: Tensor,
    logits: Tensor,
    image_size: Tensor | None = None,
    pair_scale: Tensor | None = None,
) -> None:
    """Check the inputs of deformable_aggregation_with_logits."""
    given = (feature_maps, shapes, starts, key_points, projection, logits, image_size, pair_scale)
    if _aggregation_agrees(*given):
        return
    named = [(name, t) for place, (name, t) in enumerate(zip(names, given, strict=True)) if place < 6 or t is not None]
    tensors(*named)
    need_axes(names[0], feature_maps, "bs, num_feat, c")
    need_axes(names[2], starts, "cam, scale")
    need_axes(names[3], key_points, "bs, anchor, pts, 3")
    need_axes(names[5], logits, "bs, anchor, cam, scale, pts, group")
    bs, _, channels = feature_maps.shape
    (cams, scales), anchors, points, groups = starts.shape, key_points.shape[1], key_points.shape[2], logits.shape[5]
    need_shape(names[1], shapes, "cam, scale, 2", cams, scales, 2)
    need_shape(names[3], key_points, "bs, anchor, pts, 3", bs, anchors, points, 3)
    need_shape(names[4], projection, "bs, cam, 4, 4", bs, cams, 4, 4)
    need_shape(names[5], logits, "bs, anchor, cam, scale, pts, group", bs, anchors, cams, scales, points, groups)
    need_groups(names[5], groups, channels)
    if image_size is not None:
        need_shape(names[6], image_size, "bs, cam, 2", bs, cams, 2)
    if pair_scale is not None:
        need_shape(names[7], pair_scale, "bs, anchor, cam, pts", bs, anchors, cams, points)
    need_dtypes(named)
    need_one_device(*named)


def _aggregation_agrees(
    feature_maps: Any,
    shapes: Any,
    starts: Any,
    key_points: Any,
    projection: Any,
    logits: Any,
    image_size: Any,
    pair_scale: Any,
) -> bool:
    """Whether all rules of `deformable_aggregation` hold."""
    given = (feature_maps, shapes, starts, key_points, projection, logits)
    if not (all(isinstance(t, Tensor) for t in given) and feature_maps.dim() == 3 and logits.dim() == 6):
        return False
    bs, _, channels = feature_maps.shape
    _, anchors, cams, scales, points, groups = sampled = logits.shape
    return (
        sampled == (bs, anchors, cams, scales, points, groups)
        and groups != 0
        and channels % groups == 0
        and key_points.shape == (bs, anchors, points, 3)
        and projection.shape == (bs, cams, 4, 4)
        and shapes.shape == (cams, scales, 2)
        and starts.shape == (cams, scales)
        and feature_maps.dtype in FLOATING
        and shapes.dtype in INDEX
        and starts.dtype in INDEX
        and key_points.dtype in FLOATING
        and projection.dtype in FLOATING
        and logits.dtype in FLOATING
        and feature_maps.device == shapes.device == starts.device == key_points.device == projection.device == logits.device
        and _none_or(image_size, (bs, cams, 2), feature_maps.device)
        and _none_or(pair_scale, (bs, anchors, cams, points), feature_maps.device)
    )


def _none_or(t: Any, shape: tuple[int, ...], device: torch.device) -> bool:
    """Whether an optional input is None, or a floating tensor of this shape on this device."""
    return t is None or (isinstance(t, Tensor) and t.shape == shape and t.dtype in FLOATING and t.device == device)


_CHECKS = {
    "multi_scale_deformable_attn": multi_scale_deformable_attn,
    "deformable_aggregation": deformable_aggregation,
    "geometric_kernel_attention": geometric_kernel_attention,
}
INPUTS.update({o.name: functools.partial(_CHECKS[o.bare], o.inputs) for o in OPERATORS.values() if o.bare})
