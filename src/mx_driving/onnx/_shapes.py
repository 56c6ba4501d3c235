"""Infer the shapes of the tensors of a model: with onnx, then with onnxruntime, then from constants and from names of sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass, ShapeInferencePass

from ._graph import are_fixed, dims, is_node, list_outputs, read_constant
from ._identities import bypass_identities
from ._nodes import give_shape
from ._session import open_session

_FEW = 8192  # fold tables of at most so many elements, as onnxscript does
_Sizes = dict[str, list[int | str | None]]


def infer_shapes(model: ir.Model) -> tuple[ir.Model, set[str]]:
    """Return the model with inferred shapes, and the names of sizes that are equal if the nodes fit each other."""
    model = _infer_with_onnx(model)
    if _ask_onnxruntime(model):
        model = _infer_with_onnx(model)
    return model, set() if _all_sizes_are_fixed(model) else _follow_sizes(model)


def _infer_with_onnx(model: ir.Model) -> ir.Model:
    """Infer shapes with onnx. Inference stops at a plugin: set the shape of the plugin's output and repeat."""
    model = ShapeInferencePass()(model).model
    while [node for node in model.graph if give_shape(node)]:
        model = ShapeInferencePass()(model).model
    return model


def _ask_onnxruntime(model: ir.Model) -> bool:
    """onnx cannot infer the outputs of onnxruntime's own nodes: ask onnxruntime for their dtypes and shapes, and set them.

    Return whether onnxruntime gave an answer.
    """
    nodes = (node for node in model.graph if node.domain.startswith("com.microsoft"))
    unknown = {v.name: v for node in nodes for v in node.outputs if v.shape is None or v.dtype is None}
    if not unknown:
        return False
    try:
        graph = ir.convenience.extract(model.graph, model.graph.inputs, [*unknown.values()])
        for name, value in list(graph.initializers.items()):
            # Large weights become inputs, to create the session quickly.
            if value.const_value is not None and value.const_value.size > _FEW:
                del graph.initializers[name]
                value.const_value = None
                graph.inputs.append(value)
        answers = open_session(ir.Model(graph, ir_version=model.ir_version), optimise=False).get_outputs()
    except Exception:  # onnxruntime may lack a node. Sizes then stay unknown, and attention without sizes is not replaced.
        return False
    for answer in answers:
        kind, value = answer.type.removeprefix("tensor(").removesuffix(")").upper(), unknown[answer.name]
        if kind in ir.DataType.__members__:
            value.dtype = ir.DataType[kind]
            # [] means a scalar, or an unknown number of axes: keep the shape.
            value.shape = ir.Shape(answer.shape) if answer.shape else value.shape
    return bool(answers)


def _all_sizes_are_fixed(model: ir.Model) -> bool:
    return all(value.shape is not None and are_fixed(dims(value)) for value in list_outputs(model))


def _follow_sizes(model: ir.Model) -> set[str]:
    """Add sizes that onnx does not infer because the file computes a shape from constants or from a named batch.

    Return the names of sizes that onnxruntime merged.
    """
    from onnxscript.optimizer import fold_constants

    def is_small_table(node: ir.Node) -> bool | None:
        """Return True for a table that onnxscript would not fold, such as paddings; None leaves the choice to onnxscript."""
        shape = read_constant(node.inputs[0]) if is_node(node, "ConstantOfShape") else None
        return True if shape is not None and np.prod(shape) <= _FEW else None

    try:
        copy = model.clone()
        bypass_identities(copy)
        RemoveUnusedNodesPass()(copy)
        # Use the shapes that the file records only where inference gives none. Inference stops at a recorded shape that
        # contradicts the nodes, and files of paddle2onnx have such shapes.
        recorded = {value.name: value.shape for value in list_outputs(copy)}
        for value in list_outputs(copy):
            value.shape = None
        for _ in range(2):  # Folded constants give sizes, and known sizes are further constants.
            fold_constants(copy, should_fold=is_small_table)
            copy = ShapeInferencePass()(copy).model
            for value in list_outputs(copy):
                value.shape = recorded.get(value.name) if value.shape is None else value.shape
    except Exception:  # Any node may fail. Sizes then stay unknown, and attention without sizes is not replaced.
        return set()
    _add_sizes(model, {str(value.name): list(dims(value)) for value in list_outputs(copy)})
    if _all_sizes_are_fixed(copy):
        return set()
    sizes, merged = _infer_from_names(copy)
    _add_sizes(model, sizes)
    return merged


def _infer_from_names(model: ir.Model) -> tuple[_Sizes, set[str]]:
    """Return sizes that onnxruntime infers from symbolic sizes, and the symbols of input sizes that onnxruntime merged.

    onnx's inference, which onnx_ir's pass calls, leaves shapes unknown in files of gathers with a named batch ("masked" of
    tests/onnx/test_onnx_fuse.py).

    onnxruntime may merge two symbols, but it must not replace a free size of an input by a number. The loop is that of
    onnxruntime's `infer_shapes`, which would write a file into the working folder if a size stays unknown.
    """
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference, get_opset

    proto = ir.serde.serialize_model(LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model).model)
    del proto.graph.value_info[:]  # Drop the names that onnx's inference invented for sizes.
    names = {size for i in proto.graph.input for size in _read_sizes(i) if isinstance(size, str)}
    for merge in (True, False):
        whole, inference = False, SymbolicShapeInference(2**31 - 1, merge, False, 0)
        try:
            if (get_opset(proto) or 0) >= 7:
                inference._preprocess(proto)
                while inference.run_:
                    whole = inference._infer_impl()
                inference._update_output_from_vi()
        except Exception:  # Inference fails in many ways. Sizes then stay unknown, and attention without sizes is not replaced.
            continue
        if whole and _list_free_axes(proto) <= _list_free_axes(inference.out_mp_):
            merged = {str(name) for pair in inference.suggested_merge_.items() for name in pair} if merge else set()
            return {info.name: _read_sizes(info) for info in inference.out_mp_.graph.value_info}, merged & names
    return {}, set()


def _read_sizes(info: onnx.ValueInfoProto) -> list[int | str | None]:
    return [size.dim_value or size.dim_param or None for size in info.type.tensor_type.shape.dim]


def _list_free_axes(proto: Any) -> set[tuple[str, int]]:
    """Return the axes of inputs whose sizes are free."""
    return {(i.name, axis) for i in proto.graph.input for axis, size in enumerate(_read_sizes(i)) if not isinstance(size, int)}


def _add_sizes(model: ir.Model, inferred: _Sizes) -> None:
    """Prefer a number to a name, and the inferred size to the recorded size, which paddle2onnx may record wrongly."""
    for value in list_outputs(model):
        before, sizes = dims(value), inferred.get(str(value.name))
        if sizes and len(before) in (0, len(sizes)):
            pairs = zip(before or sizes, sizes, strict=True)
            new = (next((s for s in (size, old) if isinstance(s, int)), size or old) for old, size in pairs)
            value.shape = ir.Shape(new)
