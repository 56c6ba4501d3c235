"""The operators in ONNX for `onnx.translations`: as one GridSample per map, and as single nodes. Needs onnxscript.

With g = 2 * location - 1, GridSample's coordinate ((g + 1) * W - 1) / 2 is the operators' location * W - 0.5. Map sizes are
read from the index tables when the graph runs: Slice and Reshape take tensors.

The single nodes are our own for onnxruntime (native/src/onnxruntime/operators.cpp), NVIDIA's plugin for TensorRT, and the
vendor's for its converter. TensorRT's parser reads an unknown node as the plugin of the same name. The plugin's node gets the
domain that onnxruntime's TensorRT provider uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnxscript import opset18
from onnxscript.values import Op, Opset

from .._operator.description import AGGREGATION, OPERATORS, Operator
from ._forms import NODES as NAMES
from ._forms import NPU, OURS, TENSORRT

# The oldest opset that torch.onnx.export writes. torch converts nodes to newer opsets: the mode "bilinear" becomes "linear".
op: Any = opset18  # Any: opset18's annotations require one tensor type per call, but our constants have several
_TYPE, _SCHEMA = onnx.TensorProto, onnx.defs.OpSchema
_OUTSIDE = -3.0  # a normalised location whose four corners are off any map
_VERSION = 1  # version of the nodes: increase it when inputs or attributes change
_FLOATING = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_INTEGER = ["tensor(int32)", "tensor(int64)"]
_TYPES = {"floating": _FLOATING, "index": _INTEGER, "number": _FLOATING + _INTEGER}  # key: Tensor.elements in description.py
_ATTENTION = OPERATORS[NAMES[OURS]]


def _size_of(tensor: Any, axis: int) -> Any:
    return op.Shape(tensor, start=axis, end=axis + 1)


def _make_shape(*parts: Any) -> Any:
    """Return a shape for Reshape from numbers (0: keep, -1: the rest) and one-element tensors."""
    return op.Concat(*(op.Constant(value_ints=[p]) if isinstance(p, int) else p for p in parts), axis=0)


def _pick(tensor: Any, index: int | list[int], axis: int = 0) -> Any:
    """Return an entry of an axis. A list of one index keeps the axis."""
    constant = op.Constant(value_int=index) if isinstance(index, int) else op.Constant(value_ints=index)
    return op.Gather(tensor, constant, axis=axis)


def _hold_in_both(condition: Any) -> Any:
    """Return whether the condition holds for both x and y."""
    return op.And(_pick(condition, 0, -1), _pick(condition, 1, -1))


def _write_number(number: float, like: Any) -> Any:
    return op.CastLike(op.Constant(value_float=number), like)


def _compute_type(*tensors: Any) -> int:
    double = any(t.dtype == _TYPE.DOUBLE for t in tensors)
    return _TYPE.DOUBLE if double else _TYPE.FLOAT


def _sample(value: Any, size: Any, start: Any, locations: Any, valid: Any) -> Any:
    """Sample one map: value [n, c, num_keys], locations [n, i, j, 2], valid [n, i, j] -> [n, c, i, j]."""
    size, start = op.Cast(size, to=_TYPE.INT64), op.Cast(start, to=_TYPE.INT64)
    start = op.Reshape(start, _make_shape(1))
    end = op.Add(start, op.Mul(_pick(size, [0]), _pick(size, [1])))  # ReduceProd cannot be converted to opset 17
    image = op.Reshape(op.Slice(value, start, end, _make_shape(2)), op.Concat(_make_shape(0, 0), size, axis=0))
    outside = _write_number(_OUTSIDE, locations)
    locations = op.Where(op.Unsqueeze(valid, _make_shape(-1)), locations, outside)
    two, one = (_write_number(x, locations) for x in (2.0, 1.0))
    grid = op.Sub(op.Mul(locations, two), one)
    return op.GridSample(image, grid, align_corners=0, mode="bilinear", padding_mode="zeros")


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
        # -1 < location * size - 0.5 < size, in x and in y
        sides = op.CastLike(op.Concat(_pick(size, [1]), _pick(size, [0]), axis=0), location)
        half, minus_one = (_write_number(x, location) for x in (0.5, -1.0))
        pixels = op.Sub(op.Mul(location, sides), half)
        valid = _hold_in_both(op.And(op.Greater(pixels, minus_one), op.Less(pixels, sides)))
        sampled = _sample(v, size, _pick(starts, level), location, valid)
        share = op.Unsqueeze(op.Where(valid, weight, _write_number(0.0, weight)), _make_shape(1))
        part = op.ReduceSum(op.Mul(sampled, share), _make_shape(-1), keepdims=0)  # [bs * heads, c, num_queries]
        out = part if out is None else op.Add(out, part)
    # [bs, heads * c, num_queries] -> [bs, num_queries, heads * c]
    out = op.Reshape(out, _make_shape(_size_of(value, 0), -1, _size_of(weights, 3)))
    return op.CastLike(op.Transpose(out, perm=[0, 2, 1]), value)


def deformable_aggregation(feature_maps: Any, shapes: Any, starts: Any, locations: Any, weight: Any) -> Any:
    dtype = _compute_type(feature_maps, locations, weight)
    v = op.Transpose(op.Cast(feature_maps, to=dtype), perm=[0, 2, 1])
    locations, weights = op.Cast(locations, to=dtype), op.Cast(weight, to=dtype)
    zero, one = (_write_number(x, locations) for x in (0.0, 1.0))
    out = None
    for cam in range(starts.shape[0]):
        location = _pick(locations, cam, axis=3)
        seen = _hold_in_both(op.And(op.Greater(location, zero), op.Less(location, one)))  # [bs, anchor, pts]
        for scale in range(starts.shape[1]):
            size, start = _pick(_pick(shapes, cam), scale), _pick(_pick(starts, cam), scale)
            sampled = _sample(v, size, start, location, seen)
            groups = op.Reshape(sampled, _make_shape(0, _size_of(weight, 5), -1, _size_of(weight, 1), _size_of(weight, 2)))
            share = op.Transpose(_pick(_pick(weights, cam, axis=3), scale, axis=3), perm=[0, 3, 1, 2])
            share = op.Where(op.Unsqueeze(seen, _make_shape(1)), share, _write_number(0.0, share))
            share = op.Unsqueeze(share, _make_shape(2))
            part = op.ReduceSum(op.Mul(groups, share), _make_shape(-1), keepdims=0)  # [bs, group, c / group, anchor]
            out = part if out is None else op.Add(out, part)
    # [bs, c, anchor] -> [bs, anchor, c]
    out = op.Reshape(out, _make_shape(0, _size_of(feature_maps, 2), _size_of(weight, 1)))
    return op.CastLike(op.Transpose(out, perm=[0, 2, 1]), feature_maps)


def _make_node(
    domain: str, name: str, inputs: list[tuple[str, list[str], bool]], attributes: list[onnx.defs.OpSchema.Attribute]
) -> Op:
    """Return a function that writes the node. `inputs`: (name, types, optional). The output has the first input's type."""
    option, parameter = _SCHEMA.FormalParameterOption, _SCHEMA.FormalParameter
    schema = _SCHEMA(
        name,
        domain,
        _VERSION,
        inputs=[
            parameter(role, f"T{index}", param_option=option.Optional if optional else option.Single)
            for index, (role, _, optional) in enumerate(inputs)
        ],
        outputs=[parameter("output", "T0")],
        type_constraints=[(f"T{index}", types, "") for index, (_, types, _) in enumerate(inputs)],
        attributes=attributes,
    )
    return Op(Opset(domain, _VERSION), name, schema)


def _translate_to_ours(operator: Operator) -> Callable[..., Any]:
    """Return a function that writes our node. The operator's sizes are attributes, or an input if one of them is free."""
    inputs = [(name, _TYPES[t.elements], t.optional) for name, t in zip(operator.inputs, operator.tensors, strict=True)]
    inputs += [("sizes", ["tensor(int64)"], True)] if operator.sizes else []
    attributes = [_SCHEMA.Attribute(size, _SCHEMA.AttrType.INT, required=False) for size in operator.sizes]
    attributes += [_SCHEMA.Attribute(option, _SCHEMA.AttrType.STRING) for option in operator.choices]
    node = _make_node(OURS, operator.name, inputs, attributes)

    def write(*arguments: Any) -> Any:
        tensors, numbers = arguments[: len(operator.inputs)], arguments[len(operator.inputs) :]
        inputs = []
        for tensor, described in zip(tensors, operator.tensors, strict=True):  # the kernel reads no narrower integers
            is_narrow = described.elements == "number" and tensor.dtype in (_TYPE.INT16, _TYPE.INT8, _TYPE.UINT8)
            inputs.append(_cast(tensor, _TYPE.INT64) if is_narrow else tensor)
        if all(isinstance(number, (int, str)) for number in numbers):
            return node(*inputs, **dict(zip((*operator.sizes, *operator.choices), numbers, strict=True)))
        elements = []
        for size in numbers:
            one = op.Constant(value_ints=[size if isinstance(size, int) else 1])
            elements.append(one if isinstance(size, int) else op.Reshape(op.Cast(size, to=_TYPE.INT64), one))
        return node(*inputs, op.Concat(*elements, axis=0))

    return write


def _cast(tensor: Any, dtype: int) -> Any:
    return tensor if tensor.dtype == dtype else op.Cast(tensor, to=dtype)


def _translate_to_theirs(domain: str) -> Callable[..., Any]:
    """Return a function that writes a domain's node in float32; NVIDIA's in float16 if all floating inputs are float16."""
    halves = ["tensor(float16)"] if domain == TENSORRT else []
    types = {"floating": ["tensor(float)", *halves], "index": ["tensor(int32)"]}
    inputs = [(name, types[t.elements], False) for name, t in zip(_ATTENTION.inputs, _ATTENTION.tensors, strict=True)]
    node = _make_node(domain, NAMES[domain], inputs, [])

    def write(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any) -> Any:
        is_half = halves and all(t.dtype == _TYPE.FLOAT16 for t in (value, locations, weights))
        dtype = _TYPE.FLOAT16 if is_half else _TYPE.FLOAT
        tables = _cast(shapes, _TYPE.INT32), _cast(starts, _TYPE.INT32)
        output = node(_cast(value, dtype), *tables, _cast(locations, dtype), _cast(weights, dtype))
        if domain == TENSORRT:  # [bs, queries, heads, channels of a head]
            output = op.Reshape(output, op.Constant(value_ints=[0, 0, -1]))
        return output if dtype == value.dtype else op.Cast(output, to=value.dtype)

    return write


NODES = {
    "grid_sample": {_ATTENTION.name: multi_scale_deformable_attn, AGGREGATION: deformable_aggregation},
    "npu": {_ATTENTION.name: _translate_to_theirs(NPU)},
    "onnxruntime": {name: _translate_to_ours(operator) for name, operator in OPERATORS.items()},
    "tensorrt": {_ATTENTION.name: _translate_to_theirs(TENSORRT)},
}
