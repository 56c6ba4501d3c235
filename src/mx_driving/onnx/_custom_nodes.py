"""The operators as single nodes in ONNX: ours for onnxruntime, NVIDIA's plugin for TensorRT, the vendor's for its converter.

Only `onnx.translations` imports this module: it needs onnxscript. Our kernels are in native/src/onnxruntime/operators.cpp.
TensorRT's parser reads an unknown node as the plugin of the same name. The plugin's node gets the domain that onnxruntime's
TensorRT provider uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnxscript import opset18
from onnxscript.values import Op, Opset

from .._operator.description import OPERATORS, Operator
from ._forms import NODES as NAMES
from ._forms import NPU, OURS, TENSORRT

op: Any = opset18
_TYPE, _SCHEMA = onnx.TensorProto, onnx.defs.OpSchema
_VERSION = 1  # version of the nodes: increase it when inputs or attributes change
_FLOATING = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_INTEGER = ["tensor(int32)", "tensor(int64)"]
_TYPES = {"floating": _FLOATING, "index": _INTEGER, "number": _FLOATING + _INTEGER}  # key: Tensor.elements in description.py
_ATTENTION = OPERATORS[NAMES[OURS]]


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
        inputs, numbers = arguments[: len(operator.inputs)], arguments[len(operator.inputs) :]
        pairs = zip(inputs, operator.tensors, strict=True)
        inputs = [_widen(t) if described.elements == "number" else t for t, described in pairs]
        if not all(isinstance(number, (int, str)) for number in numbers):
            return node(*inputs, op.Concat(*map(_to_element, numbers), axis=0))
        return node(*inputs, **dict(zip((*operator.sizes, *operator.choices), numbers, strict=True)))

    return write


def _to_element(size: Any) -> Any:
    """Return a size, fixed or free, as a tensor of one element."""
    one = op.Constant(value_ints=[size if isinstance(size, int) else 1])
    return one if isinstance(size, int) else op.Reshape(op.Cast(size, to=_TYPE.INT64), one)


def _widen(locations: Any) -> Any:
    """Cast int8, int16 and uint8 locations to int64, because the kernel does not read them."""
    return _cast(locations, _TYPE.INT64) if locations.dtype in (_TYPE.INT16, _TYPE.INT8, _TYPE.UINT8) else locations


def _cast(tensor: Any, dtype: int) -> Any:
    return tensor if tensor.dtype == dtype else op.Cast(tensor, to=dtype)


def _translate_to_theirs(domain: str, takes_halves: bool, splits_heads: bool) -> Callable[..., Any]:
    """Return a function that writes the node of a domain: in float16 if it takes float16 and all tensors are float16, else in
    float32."""
    types = {"floating": ["tensor(float)"] + ["tensor(float16)"] * takes_halves, "index": ["tensor(int32)"]}
    inputs = [(name, types[t.elements], False) for name, t in zip(_ATTENTION.inputs, _ATTENTION.tensors, strict=True)]
    node = _make_node(domain, NAMES[domain], inputs, [])

    def write(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any) -> Any:
        halves = takes_halves and all(t.dtype == _TYPE.FLOAT16 for t in (value, locations, weights))
        dtype = _TYPE.FLOAT16 if halves else _TYPE.FLOAT
        tables = _cast(shapes, _TYPE.INT32), _cast(starts, _TYPE.INT32)
        output = node(_cast(value, dtype), *tables, _cast(locations, dtype), _cast(weights, dtype))
        if splits_heads:  # [bs, queries, heads, channels of a head]
            output = op.Reshape(output, op.Constant(value_ints=[0, 0, -1]))
        return output if dtype == value.dtype else op.Cast(output, to=value.dtype)

    return write


NODES = {
    "npu": {_ATTENTION.name: _translate_to_theirs(NPU, False, False)},
    "onnxruntime": {name: _translate_to_ours(operator) for name, operator in OPERATORS.items()},
    "tensorrt": {_ATTENTION.name: _translate_to_theirs(TENSORRT, True, True)},
}
