"""The operators as nodes of our own for onnxruntime, domain `mx_driving`. It imports onnxscript, so only `onnx.translations`
imports it. native/src/onnxruntime/operators.cpp has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnxscript import opset18
from onnxscript.values import Op, Opset

from .._operator.description import OPERATORS, Operator

VERSION = 1  # of the nodes: a number for each set of inputs and attributes that a file may hold
op: Any = opset18
_FLOATING = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_INTEGER = ["tensor(int32)", "tensor(int64)"]
_Parameter = onnx.defs.OpSchema.FormalParameter
_Attribute = onnx.defs.OpSchema.Attribute


_TYPES = {"floating": _FLOATING, "index": _INTEGER, "number": _FLOATING + _INTEGER}  # by an input's elements


def _schema(row: Operator) -> onnx.defs.OpSchema:
    options = onnx.defs.OpSchema.FormalParameterOption
    inputs, constraints = [], []
    for place, name in enumerate(row.inputs):
        kind = f"T{place}"
        needed = options.Optional if row.tensors[place].optional else options.Single
        inputs.append(_Parameter(name, kind, param_option=needed))
        constraints.append((kind, _TYPES[row.tensors[place].elements], ""))
    types = onnx.defs.OpSchema.AttrType
    if row.sizes:
        inputs.append(_Parameter("sizes", "S", param_option=options.Optional))
        constraints.append(("S", ["tensor(int64)"], ""))
    attributes = [_Attribute(size, types.INT, required=False) for size in row.sizes]
    attributes += [_Attribute(option, types.STRING) for option in row.choices]
    outputs = [_Parameter("output", "T0")]
    return onnx.defs.OpSchema(
        row.name, "mx_driving", VERSION, inputs=inputs, outputs=outputs, type_constraints=constraints, attributes=attributes
    )


def _node(row: Operator) -> Callable[..., Any]:
    node = Op(Opset("mx_driving", VERSION), row.name, _schema(row))

    def write(*arguments: Any) -> Any:
        inputs, numbers = list(arguments[: len(row.inputs)]), arguments[len(row.inputs) :]
        inputs = [_known(t) if of.elements == "number" else t for t, of in zip(inputs, row.tensors, strict=True)]
        if not all(isinstance(number, (int, str)) for number in numbers):
            return node(*inputs, op.Concat(*map(_element, numbers), axis=0))
        return node(*inputs, **dict(zip((*row.sizes, *row.choices), numbers, strict=True)))

    return write


def _element(size: Any) -> Any:
    """A size, which is a number or free, as a tensor of one element."""
    one = op.Constant(value_ints=[size if isinstance(size, int) else 1])
    return one if isinstance(size, int) else op.Reshape(op.Cast(size, to=onnx.TensorProto.INT64), one)


def _known(locations: Any) -> Any:
    """Integer locations of a dtype that the kernel does not know become int64."""
    small = (onnx.TensorProto.INT16, onnx.TensorProto.INT8, onnx.TensorProto.UINT8)
    return op.Cast(locations, to=onnx.TensorProto.INT64) if locations.dtype in small else locations


NODES = {name: _node(row) for name, row in OPERATORS.items()}
