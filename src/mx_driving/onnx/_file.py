"""An ONNX file with the shapes of its tensors, and written again."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from ._graph import dims


def load(path: Path) -> ir.Model:
    try:
        model = ir.load(path)
    except OSError as error:
        raise ValueError(f"path_in must be a file that can be read; got {path}: {error.strerror or error}") from None
    except Exception as error:  # protobuf's and onnx_ir's own
        fact = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"path_in must be an ONNX file; got {path}: {fact}") from None
    if not model.graph.opset_imports:
        raise ValueError(f"path_in must be an ONNX file; got {path}, which names no opset")
    model = ShapeInferencePass()(model).model
    outputs = [output for node in model.graph for output in node.outputs]
    if any(value.shape is None or not all(isinstance(size, int) for size in dims(value)) for value in outputs):
        _follow_names(model, path)
    return model


def _follow_names(model: ir.Model, path: Path) -> None:
    """Add sizes that onnx's own inference loses where a file computes a shape, from a named batch or from numbers alone."""
    import onnx
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference

    try:
        found = SymbolicShapeInference.infer_shapes(onnx.load(path), auto_merge=True)
    except Exception:  # it fails in many ways, and then sizes stay unknown: what needs them is reported as left
        return
    assert found is not None
    known = {info.name: info.type.tensor_type.shape.dim for info in found.graph.value_info}
    for value in (output for node in model.graph for output in node.outputs):
        sizes = [size.dim_value or size.dim_param or None for size in known.get(str(value.name), ())]
        if sizes and len(dims(value)) in (0, len(sizes)):
            before = dims(value) or sizes
            value.shape = ir.Shape([b if isinstance(b, int) else s or b for b, s in zip(before, sizes, strict=True)])


def save(model: ir.Model, path: Path) -> None:
    """Weights stay where they are: in the file, or in a file beside it."""
    model.graph.opset_imports["mx_driving"] = 1
    RemoveUnusedNodesPass()(model)
    outside = any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
    ir.save(model, path, external_data=f"{path.name}.data" if outside else None)
