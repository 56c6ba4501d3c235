"""Others' nodes for multi_scale_deformable_attn in ONNX: NVIDIA's plugin for TensorRT, and the vendor's node for its converter.

It imports onnxscript, so only `onnx.translations` imports it. TensorRT's parser takes a node that it does not know for a plugin
of that name. The domain is the one under which onnxruntime's TensorRT provider has the plugins.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import onnx
from onnxscript import opset18
from onnxscript.values import Op, Opset

from ._forms import NODES as NAMES
from ._forms import NPU, TENSORRT

op: Any = opset18
_HALF, _FLOAT, _INT32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT, onnx.TensorProto.INT32
_INPUTS = {"value": "T", "spatial_shapes": "I", "level_start_index": "I", "sampling_locations": "T", "attention_weights": "T"}
_Parameter = onnx.defs.OpSchema.FormalParameter


def _node(domain: str, *floats: str) -> Op:
    schema = onnx.defs.OpSchema(
        NAMES[domain],
        domain,
        1,
        inputs=[_Parameter(name, kind) for name, kind in _INPUTS.items()],
        outputs=[_Parameter("output", "T")],
        type_constraints=[("I", ["tensor(int32)"], ""), ("T", list(floats), "")],
    )
    return Op(Opset(domain, 1), NAMES[domain], schema)


def _cast(tensor: Any, dtype: int) -> Any:
    return tensor if tensor.dtype == dtype else op.Cast(tensor, to=dtype)


def _translation(node: Op, takes_halves: bool, splits_heads: bool) -> Callable[..., Any]:
    """Return the function that writes the node, in float16 if it takes that and all tensors have it, else in float32."""

    def write(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any) -> Any:
        dtype = _HALF if takes_halves and all(t.dtype == _HALF for t in (value, locations, weights)) else _FLOAT
        tables = _cast(shapes, _INT32), _cast(starts, _INT32)
        output = node(_cast(value, dtype), *tables, _cast(locations, dtype), _cast(weights, dtype))
        if splits_heads:  # [bs, queries, heads, channels of a head]
            output = op.Reshape(output, op.Constant(value_ints=[0, 0, -1]))
        return output if dtype == value.dtype else op.Cast(output, to=value.dtype)

    return write


_NPU = _node(NPU, "tensor(float)")
_TENSORRT = _node(TENSORRT, "tensor(float)", "tensor(float16)")
NODES = {
    "npu": {"multi_scale_deformable_attn": _translation(_NPU, False, False)},
    "tensorrt": {"multi_scale_deformable_attn": _translation(_TENSORRT, True, True)},
}
