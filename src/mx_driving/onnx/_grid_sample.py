"""The operators as one GridSample per map, in ONNX. Only `onnx.translations` imports this module: it needs onnxscript.

GridSample's coordinate ((g + 1) * W - 1) / 2 of g = 2 * location - 1 is the operators' location * W - 0.5. Map sizes are
read from the index tables when the graph runs: Slice and Reshape take tensors.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnxscript import opset18

# The oldest opset that torch.onnx.export writes. torch converts nodes to newer opsets: the mode "bilinear" becomes "linear".
op: Any = opset18  # Any: opset18's annotations require one tensor type per call, but our constants have several
_OUTSIDE = -3.0  # a normalised location whose four corners are off any map


def _size_of(tensor: Any, axis: int) -> Any:
    return op.Shape(tensor, start=axis, end=axis + 1)


def _make_shape(*parts: Any) -> Any:
    """Return a shape for Reshape from numbers (0: keep, -1: the rest) and one-element tensors."""
    return op.Concat(*(op.Constant(value_ints=[p]) if isinstance(p, int) else p for p in parts), axis=0)


def _pick(tensor: Any, index: int, axis: int = 0) -> Any:
    return op.Gather(tensor, op.Constant(value_int=index), axis=axis)


def _hold_in_both(condition: Any) -> Any:
    """Return whether the condition holds for both x and y."""
    return op.And(_pick(condition, 0, -1), _pick(condition, 1, -1))


def _compute_type(*tensors: Any) -> int:
    double = any(t.dtype == onnx.TensorProto.DOUBLE for t in tensors)
    return onnx.TensorProto.DOUBLE if double else onnx.TensorProto.FLOAT


def _sample(value: Any, size: Any, start: Any, locations: Any, valid: Any) -> Any:
    """Sample one map: value [n, c, num_keys], locations [n, i, j, 2], valid [n, i, j] -> [n, c, i, j]."""
    size, start = op.Cast(size, to=onnx.TensorProto.INT64), op.Cast(start, to=onnx.TensorProto.INT64)
    start = op.Reshape(start, _make_shape(1))
    end = op.Add(start, op.Mul(_pick_element(size, 0), _pick_element(size, 1)))  # ReduceProd cannot be converted to opset 17
    image = op.Reshape(op.Slice(value, start, end, _make_shape(2)), op.Concat(_make_shape(0, 0), size, axis=0))
    outside = op.CastLike(op.Constant(value_float=_OUTSIDE), locations)
    locations = op.Where(op.Unsqueeze(valid, _make_shape(-1)), locations, outside)
    two, one = (op.CastLike(op.Constant(value_float=x), locations) for x in (2.0, 1.0))
    grid = op.Sub(op.Mul(locations, two), one)
    return op.GridSample(image, grid, align_corners=0, mode="bilinear", padding_mode="zeros")


def _zero_where_not(valid: Any, weights: Any) -> Any:
    return op.Where(valid, weights, op.CastLike(op.Constant(value_float=0.0), weights))


def _is_on_map(locations: Any, size: Any) -> Any:
    """Return -1 < location * size - 0.5 < size, in x and in y."""
    size = op.CastLike(op.Concat(_pick_element(size, 1), _pick_element(size, 0), axis=0), locations)
    half, minus_one = (op.CastLike(op.Constant(value_float=x), locations) for x in (0.5, -1.0))
    pixels = op.Sub(op.Mul(locations, size), half)
    return _hold_in_both(op.And(op.Greater(pixels, minus_one), op.Less(pixels, size)))


def _pick_element(tensor: Any, index: int) -> Any:
    return op.Gather(tensor, op.Constant(value_ints=[index]), axis=0)


def multi_scale_deformable_attn(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any) -> Any:
    dtype = _compute_type(value, locations, weights)
    channels = _size_of(value, 3)
    v = op.Transpose(op.Cast(value, to=dtype), perm=[0, 2, 3, 1])
    v = op.Reshape(v, _make_shape(-1, channels, _size_of(value, 1)))  # [bs * heads, c, num_keys]
    locations = op.Transpose(op.Cast(locations, to=dtype), perm=[3, 0, 2, 1, 4, 5])  # levels first, queries next to points
    weights = op.Transpose(op.Cast(weights, to=dtype), perm=[3, 0, 2, 1, 4])
    out = None
    for level in range(starts.shape[0]):
        size = _pick(shapes, level)
        location = op.Reshape(_pick(locations, level), _make_shape(-1, _size_of(locations, 3), _size_of(locations, 4), 2))
        weight = op.Reshape(_pick(weights, level), _make_shape(-1, _size_of(weights, 3), _size_of(weights, 4)))
        valid = _is_on_map(location, size)
        sampled = _sample(v, size, _pick(starts, level), location, valid)
        share = op.Unsqueeze(_zero_where_not(valid, weight), _make_shape(1))
        part = op.ReduceSum(op.Mul(sampled, share), _make_shape(-1), keepdims=0)  # [bs * heads, c, num_queries]
        out = part if out is None else op.Add(out, part)
    # [bs, heads * c, num_queries] -> [bs, num_queries, heads * c]
    out = op.Reshape(out, _make_shape(_size_of(value, 0), -1, _size_of(weights, 3)))
    return op.CastLike(op.Transpose(out, perm=[0, 2, 1]), value)


def deformable_aggregation(feature_maps: Any, shapes: Any, starts: Any, locations: Any, weight: Any) -> Any:
    dtype = _compute_type(feature_maps, locations, weight)
    v = op.Transpose(op.Cast(feature_maps, to=dtype), perm=[0, 2, 1])
    locations, weights = op.Cast(locations, to=dtype), op.Cast(weight, to=dtype)
    zero, one = (op.CastLike(op.Constant(value_float=x), locations) for x in (0.0, 1.0))
    out = None
    for cam in range(starts.shape[0]):
        location = _pick(locations, cam, axis=3)
        seen = _hold_in_both(op.And(op.Greater(location, zero), op.Less(location, one)))  # [bs, anchor, pts]
        for scale in range(starts.shape[1]):
            size, start = _pick(_pick(shapes, cam), scale), _pick(_pick(starts, cam), scale)
            sampled = _sample(v, size, start, location, seen)
            groups = op.Reshape(sampled, _make_shape(0, _size_of(weight, 5), -1, _size_of(weight, 1), _size_of(weight, 2)))
            share = op.Transpose(_pick(_pick(weights, cam, axis=3), scale, axis=3), perm=[0, 3, 1, 2])
            share = op.Unsqueeze(_zero_where_not(op.Unsqueeze(seen, _make_shape(1)), share), _make_shape(2))
            part = op.ReduceSum(op.Mul(groups, share), _make_shape(-1), keepdims=0)  # [bs, group, c / group, anchor]
            out = part if out is None else op.Add(out, part)
    # [bs, c, anchor] -> [bs, anchor, c]
    out = op.Reshape(out, _make_shape(0, _size_of(feature_maps, 2), _size_of(weight, 1)))
    return op.CastLike(op.Transpose(out, perm=[0, 2, 1]), feature_maps)


NODES = {
    "grid_sample": {
        "multi_scale_deformable_attn": multi_scale_deformable_attn,
        "deformable_aggregation": deformable_aggregation,
    }
}
