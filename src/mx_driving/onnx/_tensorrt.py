"""NVIDIA's plugin for TensorRT in ONNX. It imports onnxscript, so only `onnx.translations` imports it.

TensorRT's parser takes a node that it does not know for a plugin of that name. The domain is the one under which onnxruntime's
TensorRT provider has the plugins.
"""

from __future__ import annotations

from typing import Any

import onnx
from onnxscript import opset18
from onnxscript.values import Op, Opset

op: Any = opset18
_HALF, _FLOAT = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
_INPUTS = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights")
_TABLES = ("spatial_shapes", "level_start_index")
_Parameter = onnx.defs.OpSchema.FormalParameter
_SCHEMA = onnx.defs.OpSchema(
    "MultiscaleDeformableAttnPlugin_TRT",
    "trt.plugins",
    1,
    inputs=[_Parameter(name, "I" if name in _TABLES else "T") for name in _INPUTS],
    outputs=[_Parameter("output", "T")],
    type_constraints=[("I", ["tensor(int32)"], ""), ("T", ["tensor(float)", "tensor(float16)"], "")],
)
_node = Op(Opset("trt.plugins", 1), "MultiscaleDeformableAttnPlugin_TRT", _SCHEMA)


def _cast(tensor: Any, dtype: int) -> Any:
    return tensor if tensor.dtype == dtype else op.Cast(tensor, to=dtype)


def multi_scale_deformable_attn(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any) -> Any:
    int32, given = onnx.TensorProto.INT32, value.dtype
    dtype = _HALF if all(t.dtype == _HALF for t in (value, locations, weights)) else _FLOAT
    inputs = [_cast(value, dtype), _cast(shapes, int32), _cast(starts, int32), _cast(locations, dtype), _cast(weights, dtype)]
    blocks = op.Reshape(_node(*inputs), op.Constant(value_ints=[0, 0, -1]))  # [bs, queries, heads, channels of a head]
    return blocks if dtype == given else op.Cast(blocks, to=given)


NODES = {"multi_scale_deformable_attn": multi_scale_deformable_attn}
