"""The vendor's node in ONNX, as its converter reads it. It imports onnxscript, so only `onnx.translations` imports it."""

from __future__ import annotations

from typing import Any

import onnx
from onnxscript import opset18
from onnxscript.values import Op, Opset

op: Any = opset18
_FLOAT, _INT = onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
_INPUTS = {"value": "T", "spatial_shapes": "I", "level_start_index": "I", "locations": "T", "weights": "T"}
_SCHEMA = onnx.defs.OpSchema(
    "MultiScaleDeformableAttn",
    "npu",
    1,
    inputs=[onnx.defs.OpSchema.FormalParameter(name, kind) for name, kind in _INPUTS.items()],
    outputs=[onnx.defs.OpSchema.FormalParameter("output", "T")],
    type_constraints=[("I", ["tensor(int32)"], ""), ("T", ["tensor(float)"], "")],  # of CANN's operator
)
_node = Op(Opset("npu", 1), "MultiScaleDeformableAttn", _SCHEMA)


def _cast(tensor: Any, dtype: int) -> Any:
    return tensor if tensor.dtype == dtype else op.Cast(tensor, to=dtype)


def multi_scale_deformable_attn(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any) -> Any:
    inputs = [_cast(value, _FLOAT), _cast(shapes, _INT), _cast(starts, _INT), _cast(locations, _FLOAT), _cast(weights, _FLOAT)]
    output = _node(*inputs)
    return output if value.dtype == _FLOAT else op.Cast(output, to=value.dtype)


NODES = {"multi_scale_deformable_attn": multi_scale_deformable_attn}
