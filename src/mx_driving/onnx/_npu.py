"""The vendor's node in ONNX, as its converter reads it. It imports onnxscript, so only `onnx.translations` imports it."""

from __future__ import annotations

from typing import Any

import onnx
from onnxscript import opset20
from onnxscript.values import Op, Opset

op: Any = opset20
_INPUTS = {"value": "T", "spatial_shapes": "I", "level_start_index": "I", "locations": "L", "weights": "W"}
_FLOATING = ["tensor(float)", "tensor(float16)", "tensor(bfloat16)", "tensor(double)"]
_SCHEMA = onnx.defs.OpSchema(
    "MultiScaleDeformableAttn",
    "npu",
    1,
    inputs=[onnx.defs.OpSchema.FormalParameter(name, kind) for name, kind in _INPUTS.items()],
    outputs=[onnx.defs.OpSchema.FormalParameter("output", "T")],
    type_constraints=[("I", ["tensor(int32)"], ""), *((kind, _FLOATING, "") for kind in "TLW")],
)
_node = Op(Opset("npu", 1), "MultiScaleDeformableAttn", _SCHEMA)


def multi_scale_deformable_attn(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any) -> Any:
    int32 = onnx.TensorProto.INT32
    return _node(value, op.Cast(shapes, to=int32), op.Cast(starts, to=int32), locations, weights)


NODES = {"multi_scale_deformable_attn": multi_scale_deformable_attn}
