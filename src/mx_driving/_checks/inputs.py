"""Checks of the operators' inputs; nn/_check.py has the modules'. rules.py has what they are made of."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._operators import LOCATIONS, OPERATORS, VALUE, Operator
from .rules import (
    FLOATING,
    FLOATING_RULE,
    INDEX,
    INDEX_RULE,
    fail,
    fail_shape,
    need_axes,
    need_dtype,
    need_dtypes,
    need_one_device,
    need_shape,
    tensors,
)

_INTEGER = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
_LOCATION = FLOATING | _INTEGER
_LOCATION_RULE = "have a floating or an integer dtype"


def attention(
    names: tuple[str, ...],
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    integer_locations: bool = False,
) -> None:
    """Check the inputs of an attention operator; both attention operators take the same shapes."""
    if _attention_agrees(value, shapes, starts, locations, weights, _LOCATION if integer_locations else FLOATING):
        return
    named = list(zip(names, (value, shapes, starts, locations, weights), strict=True))
    tensors(*named)
    need_axes(names[0], value, "bs, num_keys, num_heads, embed_dims")
    need_axes(names[1], shapes, "num_levels, 2")
    need_axes(names[3], locations, "bs, num_queries, num_heads, num_levels, num_points, 2")
    bs, _, heads, _ = value.shape
    levels, queries, points = shapes.shape[0], locations.shape[1], locations.shape[4]
    need_shape(names[1], shapes, "num_levels, 2", levels, 2)
    need_shape(names[2], starts, "num_levels", levels)
    if weights.shape == locations.shape[:-1]:
        need_batch_and_heads(names[0], value, locations)
    axes = "bs, num_queries, num_heads, num_levels, num_points"
    need_shape(names[3], locations, axes + ", 2", bs, queries, heads, levels, points, 2)
    need_shape(names[4], weights, axes, bs, queries, heads, levels, points)
    need_dtype(names[0], value, FLOATING, FLOATING_RULE)
    need_dtype(names[1], shapes, INDEX, INDEX_RULE)
    need_dtype(names[2], starts, INDEX, INDEX_RULE)
    if integer_locations:
        need_dtype(names[3], locations, _LOCATION, _LOCATION_RULE)
    else:
        need_dtype(names[3], locations, FLOATING, FLOATING_RULE)
    need_dtype(names[4], weights, FLOATING, FLOATING_RULE)
    need_one_device(*named)


def need_batch_and_heads(name: str, value: Tensor, locations: Tensor) -> None:
    """Name value if the other tensors agree with each other but not with value."""
    bs, _, heads = locations.shape[:3]
    if (value.shape[0], value.shape[2]) != (bs, heads):
        axes, sizes = "bs, num_keys, num_heads, embed_dims", (bs, None, heads, None)
        swapped = ", whose axes 1 and 2 look swapped" if value.shape[1] == heads else ""
        fail_shape(name, value, axes, sizes, swapped)


def _attention_agrees(
    value: Any, shapes: Any, starts: Any, locations: Any, weights: Any, of_locations: frozenset[torch.dtype]
) -> bool:
    """Whether all rules of `attention` hold. Every call runs this, and a call through a door runs it twice."""
    if not (_are_tensors(value, shapes, starts, locations, weights) and value.dim() == 4 and weights.dim() == 5):
        return False
    bs, _, heads, _ = value.shape
    _, queries, _, levels, points = sampled = weights.shape
    return (
        sampled == (bs, queries, heads, levels, points)
        and locations.shape == (bs, queries, heads, levels, points, 2)
        and shapes.shape == (levels, 2)
        and starts.shape == (levels,)
        and value.dtype in FLOATING
        and shapes.dtype in INDEX
        and starts.dtype in INDEX
        and locations.dtype in of_locations
        and weights.dtype in FLOATING
        and value.device == shapes.device == starts.device == locations.device == weights.device
    )


def _are_tensors(a: Any, b: Any, c: Any, d: Any, e: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and isinstance(c, Tensor)
        and isinstance(d, Tensor)
        and isinstance(e, Tensor)
    )


def aggregation(
    names: tuple[str, ...], feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor
) -> None:
    """Check the inputs of an operator whose groups of channels have weights of their own."""
    if _aggregation_agrees(feature_maps, shapes, starts, locations, weight):
        return
    named = list(zip(names, (feature_maps, shapes, starts, locations, weight), strict=True))
    tensors(*named)
    need_axes(names[0], feature_maps, "bs, num_feat, c")
    need_axes(names[2], starts, "cam, scale")
    need_axes(names[3], locations, "bs, anchor, pts, cam, 2")
    need_axes(names[4], weight, "bs, anchor, pts, cam, scale, group")
    bs, _, channels = feature_maps.shape
    (cams, scales), anchors, points, groups = starts.shape, locations.shape[1], locations.shape[2], weight.shape[5]
    need_shape(names[1], shapes, "cam, scale, 2", cams, scales, 2)
    need_shape(names[3], locations, "bs, anchor, pts, cam, 2", bs, anchors, points, cams, 2)
    need_shape(names[4], weight, "bs, anchor, pts, cam, scale, group", bs, anchors, points, cams, scales, groups)
    need_groups(names[4], groups, channels)
    need_dtypes(named)
    need_one_device(*named)


def need_groups(name: str, groups: int, channels: int) -> None:
    if groups == 0 or channels % groups != 0:
        fail(ValueError, name, f"have a group count that divides c={channels}", groups)


def _aggregation_agrees(feature_maps: Any, shapes: Any, starts: Any, locations: Any, weight: Any) -> bool:
    """Whether all rules of `aggregation` hold."""
    if not (_are_tensors(feature_maps, shapes, starts, locations, weight) and feature_maps.dim() == 3 and weight.dim() == 6):
        return False
    bs, _, channels = feature_maps.shape
    _, anchors, points, cams, scales, groups = sampled = weight.shape
    return (
        sampled == (bs, anchors, points, cams, scales, groups)
        and groups != 0
        and channels % groups == 0
        and locations.shape == (bs, anchors, points, cams, 2)
        and shapes.shape == (cams, scales, 2)
        and starts.shape == (cams, scales)
        and feature_maps.dtype in FLOATING
        and shapes.dtype in INDEX
        and starts.dtype in INDEX
        and locations.dtype in FLOATING
        and weight.dtype in FLOATING
        and feature_maps.device == shapes.device == starts.device == locations.device == weight.device
    )


def _inputs_of(operator: Operator) -> Callable[..., None]:
    if operator.grouped:
        return functools.partial(aggregation, operator.inputs)
    return functools.partial(attention, operator.inputs, integer_locations=operator.integer_locations)


# Operator -> the check of its inputs; with_logits.py adds its own. Kernels run it too, because torch.ops can be called
# without a door.
INPUTS = {operator.name: _inputs_of(operator) for operator in OPERATORS.values() if not operator.bare}


def backward(operator: str, grad: Tensor, *rest: Any) -> None:
    """Check the arguments of an operator's backward: grad_output, the inputs, output_mask."""
    *inputs, mask = rest
    INPUTS[operator](*inputs)
    value, queries = inputs[VALUE], inputs[LOCATIONS].shape[1]
    wanted = len(OPERATORS[operator].differentiable)
    if len(mask) != wanted:
        fail(ValueError, "output_mask", f"have {wanted} entries, one for each gradient", len(mask))
    size = value.shape
    sizes = (size[0], queries, size[2] if len(size) == 3 else size[2] * size[3])
    if grad.shape == sizes and grad.dtype in FLOATING and grad.device == value.device:
        return
    axes = "bs, anchor, c" if len(size) == 3 else "bs, num_queries, num_heads * embed_dims"
    need_shape("grad_output", grad, axes, *sizes)
    need_dtype("grad_output", grad, FLOATING, FLOATING_RULE)
    need_one_device((OPERATORS[operator].inputs[VALUE], value), ("grad_output", grad))


def levels(shapes_name: str, starts_name: str, shapes: Tensor, starts: Tensor, num_keys: int) -> None:
    """Every map lies inside num_keys rows. This reads the index tables, which costs nothing only on a CPU."""
    axes = starts.dim()
    for flat, ((height, width), start) in enumerate(
        zip(shapes.reshape(-1, 2).tolist(), starts.reshape(-1).tolist(), strict=True)
    ):
        where = f"[{flat}]" if axes == 1 else f"[{flat // starts.shape[1]}, {flat % starts.shape[1]}]"
        if height <= 0 or width <= 0:
            fail(ValueError, shapes_name + where, "be positive (H, W)", (height, width))
        if start < 0:
            fail(ValueError, starts_name + where, "not be negative", start)
        if start + height * width > num_keys:
            rule = f"leave room for {height} x {width} rows among {num_keys}"
            fail(ValueError, starts_name + where, rule, f"{start} (needs {start + height * width} rows)")


def host_memory(name: str, t: Any) -> None:
    """t is in memory that a C function can read and write."""
    tensors((name, t))
    if t.device.type != "cpu" or t.layout != torch.strided or t.is_neg() or t.is_conj():
        fail(ValueError, name, "be a plain strided tensor on the CPU", f"{t.layout} on {t.device}")


def workspace(t: Tensor, size: int) -> None:
    """t has at least `size` contiguous bytes, for phase two."""
    host_memory("workspace", t)
    if not t.is_contiguous() or t.nbytes < size:
        fail(ValueError, "workspace", f"have workspace_size={size} bytes in a row", f"{t.nbytes} of strides {t.stride()}")


def rows_of_levels(rows: int, keys: int) -> None:
    """The levels of an attention module take all of its keys."""
    if rows != keys:
        fail(ValueError, "spatial_shapes", f"hold the num_keys={keys} rows of value", f"{rows} in all levels")


def same_samples(locations: Tensor, weights: Tensor) -> None:
    """Every location to draw has a weight."""
    if locations.dim() < 3 or locations.shape[-1] != 2:
        fail(ValueError, "locations", "have shape (..., num_levels, num_points, 2)", tuple(locations.shape))
    if weights.shape != locations.shape[:-1]:
        fail(ValueError, "weights", f"have shape {tuple(locations.shape[:-1])}", tuple(weights.shape))
