"""Load an ONNX file and infer the shapes of its tensors. `_save.py` writes the model."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass, ShapeInferencePass

from .._operator.problems import Problem
from .._operator.rules import first_line
from ._forms import OURS
from ._graph import are_fixed, dims, is_node, read_constant
from ._identities import bypass_identities
from ._order import check_file, sort_nodes, walk_nodes
from ._plugins import give_shape, name_plugins
from ._pools import POOLS, give_pool_shape
from ._session import open_session

_FEW = 8192  # fold tables of at most so many elements, as onnxscript does
_Sizes = dict[str, list[int | str | None]]


def check_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return the path. Refuse an empty path, which would mean the working folder, and a name that is not UTF-8, like onnx."""
    text = os.fspath(path)
    if not text:
        raise Problem(f"{name} must be the path of a file; got ''")
    try:
        text.encode()
    except UnicodeEncodeError:
        rule = "must have a name in UTF-8, which Python reads if PYTHONUTF8=1"
        raise Problem(f"{name} {rule}; got {os.fsencode(path)!r}") from None
    return Path(text)


@contextlib.contextmanager
def silence_libraries() -> Iterator[None]:
    """Silence other libraries' warnings and tracebacks about shapes that they cannot infer."""
    loggers = [logging.getLogger(name) for name in ("onnx_ir", "onnxscript", "onnxruntime.tools.symbolic_shape_infer")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


class _Unreadable(Exception):
    """Raised for a file that breaks a rule. `fact` is what the file has instead."""

    def __init__(self, rule: str, fact: str) -> None:
        super().__init__(rule, fact)
        self.rule, self.fact = rule, fact


@dataclass
class LoadedFile:
    """The model of a file, with inferred sizes, and facts of the file that the model does not have.

    Attributes:
        shapes: name of a tensor -> its shape as in the file. The model has inferred shapes, too.
        defaults: name of an input -> its default. In the model the input is not an initializer.
        merged: names of sizes that are equal if the nodes fit each other.
    """

    path: Path
    model: ir.Model
    shapes: dict[str | None, ir.Shape | None]
    defaults: dict[str, ir.TensorProtocol]
    merged: set[str] = field(default_factory=set)


@silence_libraries()
def load(path: Path, name: str = "path_in") -> LoadedFile:
    """Read a file, and infer sizes.

    Raises:
        Problem: the file cannot be read. The message begins with `name`.
    """
    try:
        model, defaults = _read(path)
    except _Unreadable as error:
        raise Problem(f"{name} must {error.rule}; got {path}{error.fact}") from None
    shapes = {value.name: value.shape for value in list_outputs(model)}
    model = _infer_shapes(model)
    if _ask_onnxruntime(model):
        model = _infer_shapes(model)
    file = LoadedFile(path, model, shapes, defaults)
    if not _all_sizes_are_fixed(model):
        _follow_sizes(file)
    return file


def _read(path: Path) -> tuple[ir.Model, dict[str, ir.TensorProtocol]]:
    """Return the model, and the defaults of its inputs."""
    proto = _parse(path)
    for graph in _walk_graphs(proto):
        _check_tensors(graph)
    try:
        model = ir.serde.deserialize_model(proto)
        if has_changed := sort_nodes(model) | name_plugins(model):
            proto = ir.serde.serialize_model(model)
        if proto.functions:
            model = ir.serde.deserialize_model(_inline_functions(proto))
    except Exception as error:  # onnx_ir raises its own classes
        raise _Unreadable("be an ONNX file", f": {find_cause(error)}") from None
    _take_in_attributes(model, path)
    for tensor in list_external(model):
        _check_external(tensor, path)
    defaults = _take_out_defaults(model)
    _check(path, proto, model, has_changed)
    return model, defaults


def _parse(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise _Unreadable("be a file that can be read", f": {error.strerror or error}") from None
    except Exception as error:  # protobuf raises its own classes
        raise _Unreadable("be an ONNX file", f": {first_line(error)}") from None


def _infer_shapes(model: ir.Model) -> ir.Model:
    """Infer shapes with onnx. Inference stops at a plugin: set the shape of the plugin's output and repeat."""
    model = ShapeInferencePass()(model).model
    while [node for node in model.graph if (give_pool_shape if node.op_type in POOLS else give_shape)(node)]:
        model = ShapeInferencePass()(model).model
    return model


def _ask_onnxruntime(model: ir.Model) -> bool:
    """onnx cannot infer the outputs of onnxruntime's own nodes: ask onnxruntime for their dtypes and shapes, and set them.

    Return whether onnxruntime gave an answer.
    """
    nodes = (node for node in model.graph if node.domain.startswith("com.microsoft"))
    unknown = {v.name: v for node in nodes for v in node.outputs if v.shape is None or v.dtype is None}
    try:
        answers = _list_outputs_in_session(model, [*unknown.values()]) if unknown else ()
    except Exception:  # onnxruntime may lack a node. Sizes then stay unknown, and attention without sizes is not replaced.
        return False
    for answer in answers:
        kind, value = answer.type.removeprefix("tensor(").removesuffix(")").upper(), unknown[answer.name]
        if kind in ir.DataType.__members__:
            value.dtype = ir.DataType[kind]
            # [] means a scalar, or an unknown number of axes: keep the shape.
            value.shape = ir.Shape(answer.shape) if answer.shape else value.shape
    return bool(answers)


def _list_outputs_in_session(model: ir.Model, values: list[ir.Value]) -> Any:
    """Return onnxruntime's types and shapes of these values. Large weights become inputs, to create the session quickly."""
    graph = ir.convenience.extract(model.graph, model.graph.inputs, values)
    for name, value in list(graph.initializers.items()):
        if value.const_value is not None and value.const_value.size > _FEW:
            del graph.initializers[name]
            value.const_value = None
            graph.inputs.append(value)
    return open_session(ir.Model(graph, ir_version=model.ir_version), optimise=False).get_outputs()


def list_outputs(model: ir.Model) -> Iterator[ir.Value]:
    return (output for node in model.graph for output in node.outputs)


def _walk_graphs(proto: onnx.ModelProto) -> Iterator[onnx.GraphProto | onnx.FunctionProto]:
    """Yield the graph, the functions and their subgraphs."""
    todo: list[Any] = [proto.graph, *proto.functions]
    while todo:
        yield (graph := todo.pop())
        todo += [subgraph for node in graph.node for a in node.attribute for subgraph in (a.g, *a.graphs) if subgraph.node]


def _check_tensors(graph: Any) -> None:
    """Refuse tensors that onnx_ir does not read: sparse ones, and places in other files that are no whole numbers."""
    attributes = [(node, attribute) for node in graph.node for attribute in node.attribute]
    sparse = [tensor.values.name for tensor in getattr(graph, "sparse_initializer", ())]
    sparse += [node.output[0] for node, a in attributes if a.HasField("sparse_tensor") or a.sparse_tensors]
    if sparse:
        raise _Unreadable("have dense tensors", f", where {', '.join(sparse)} is sparse")
    tensors = [*getattr(graph, "initializer", ()), *(t for _, a in attributes for t in (a.t, *a.tensors))]
    for tensor in tensors:
        for entry in tensor.external_data if tensor.data_location == onnx.TensorProto.EXTERNAL else ():
            if entry.key in ("offset", "length") and not (entry.value.isascii() and entry.value.isdigit()):
                fact = f"{entry.key} of {tensor.name or 'a tensor'} is {entry.value[:50]!r}, no whole number"
                raise _Unreadable("have its weights beside it", f", where the {fact}")


def _inline_functions(proto: onnx.ModelProto) -> onnx.ModelProto:
    """Inline local functions. Return the model unchanged if onnx fails."""
    try:
        return onnx.inliner.inline_local_functions(proto, convert_version=True)
    except Exception:  # onnx cannot convert every opset. Attention in a function that is not inlined is not replaced.
        return proto


def _take_out_defaults(model: ir.Model) -> dict[str, ir.TensorProtocol]:
    """Remove the defaults of inputs from the initializers, and return them.

    From IR version 4 on, an initializer that is also a graph input is a default, no constant. Before IR version 4 every
    initializer had to be an input, and none could be overridden.
    """
    defaults = {}
    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        if model.ir_version < 4:
            model.graph.inputs.remove(value)
        else:
            defaults[str(value.name)] = value.const_value
            del model.graph.initializers[str(value.name)]
            value.const_value = None
    model.ir_version = max(model.ir_version, 4)
    return defaults


def _check(path: Path, proto: onnx.ModelProto, model: ir.Model, has_changed: bool) -> None:
    """Check the file with onnx. Drop our domain if no node uses it, and refuse any version of the domain but 1."""
    try:
        check_file(path, proto, has_changed)
    except Exception as error:  # onnx raises its own classes, and UnicodeError
        raise _Unreadable("be an ONNX file", f": {first_paragraph(error)}") from None
    # A file that onnxruntime saved imports every domain that was registered in its process. So remove our domain
    # if it has no node.
    if all(node.domain != OURS for node in walk_nodes(model)):
        model.graph.opset_imports.pop(OURS, None)
    version = model.graph.opset_imports.get(OURS, 1)
    if version != 1:
        raise _Unreadable(f"hold nodes of version 1 of {OURS}", f", of version {version}")


def find_cause(error: BaseException) -> str:
    """Return the first line of the innermost error. onnx_ir wraps an error once for each level of the file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def first_paragraph(error: Exception) -> str:
    """Return the first paragraph of an error's message in one line. onnx's messages continue with context."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


def list_external(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield the tensors that are stored in other files."""
    for graph in (*model.graphs(), *(g for function in model.functions.values() for g in function.subgraphs())):
        yield from (v.const_value for v in graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor))


def _take_in_attributes(model: ir.Model, path: Path) -> None:
    """Load attributes that are stored in other files, because we write only initializers to other files."""
    for node in walk_nodes(model):
        for name, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                _check_external(attribute.value, path)
                node.attributes[name] = ir.AttrTensor(name, ir.tensor(attribute.value.numpy(), name=attribute.value.name))


def _check_external(tensor: ir.ExternalTensor, path: Path) -> None:
    """Set the folder of an external tensor, and check that the file has all of its bytes."""
    tensor.base_dir = path.parent
    if fact := _find_fault(tensor):
        raise _Unreadable("have its weights beside it", f", and {fact}")


def _find_fault(tensor: ir.ExternalTensor) -> str | None:
    """Return the fault of a tensor's file, or None. As in onnx_ir, the file must be in the model's folder, and no hard link."""
    if "\0" in str(tensor.location):
        return f"{str(tensor.location)!r}, which no file is named"
    end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
    if not Path(os.path.realpath(tensor.path)).is_relative_to(os.path.realpath(tensor.base_dir)):
        return f"{tensor.location}, which lies in another folder"
    if not os.path.isfile(tensor.path):
        return f"no file {tensor.location}"
    if os.stat(tensor.path).st_nlink > 1:
        return f"{tensor.location}, which has other names (hard links)"
    size = os.path.getsize(tensor.path)
    return f"{tensor.location} of {size} bytes, where {tensor.name} ends at {end}" if size < end else None


def _all_sizes_are_fixed(model: ir.Model) -> bool:
    return all(value.shape is not None and are_fixed(dims(value)) for value in list_outputs(model))


def _follow_sizes(file: LoadedFile) -> None:
    """Add sizes that onnx does not infer because the file computes a shape from constants or from a named batch."""
    try:
        copy = file.model.clone()
        bypass_identities(copy)
        RemoveUnusedNodesPass()(copy)
        folded = _fold_constants(copy)
    except Exception:  # Any node may fail. Sizes then stay unknown, and attention without sizes is not replaced.
        return
    _add_sizes(file.model, {str(value.name): list(dims(value)) for value in list_outputs(folded)})
    if not _all_sizes_are_fixed(folded):
        sizes, file.merged = _infer_from_names(folded)
        _add_sizes(file.model, sizes)


def _fold_constants(model: ir.Model) -> ir.Model:
    """Fold constants twice: folded constants give sizes, and known sizes are further constants.

    Use the shapes that the file records only where inference gives none. Inference stops at a recorded shape that contradicts
    the nodes, and files of paddle2onnx have such shapes.
    """
    from onnxscript.optimizer import fold_constants

    recorded = {value.name: value.shape for value in list_outputs(model)}
    for value in list_outputs(model):
        value.shape = None
    for _ in range(2):
        fold_constants(model, should_fold=_is_small_table)
        model = ShapeInferencePass()(model).model
        for value in list_outputs(model):
            value.shape = recorded.get(value.name) if value.shape is None else value.shape
    return model


def _is_small_table(node: ir.Node) -> bool | None:
    """Return True for a table that onnxscript would not fold, such as paddings; None leaves the choice to onnxscript."""
    shape = read_constant(node.inputs[0]) if is_node(node, "ConstantOfShape") else None
    return True if shape is not None and np.prod(shape) <= _FEW else None


def _infer_from_names(model: ir.Model) -> tuple[_Sizes, set[str]]:
    """Return sizes that onnxruntime infers from symbolic sizes, and the symbols of input sizes that onnxruntime merged.

    onnxruntime may merge two symbols, but it must not replace a free size of an input by a number.
    """
    proto = ir.serde.serialize_model(LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model).model)
    del proto.graph.value_info[:]  # Drop the names that onnx's inference invented for sizes.
    names = {size for i in proto.graph.input for size in _read_sizes(i) if isinstance(size, str)}
    for merge in (True, False):
        inference = _infer_symbolically(proto, merge)
        if inference is not None and _list_free_axes(proto) <= _list_free_axes(inference.out_mp_):
            merged = {str(name) for pair in inference.suggested_merge_.items() for name in pair} if merge else set()
            return {info.name: _read_sizes(info) for info in inference.out_mp_.graph.value_info}, merged & names
    return {}, set()


def _infer_symbolically(proto: onnx.ModelProto, merge: bool) -> Any:
    """Infer shapes as onnxruntime's `infer_shapes` does, but write no file into the working folder if a size stays unknown."""
    from onnxruntime.tools.symbolic_shape_infer import SymbolicShapeInference, get_opset

    whole, inference = False, SymbolicShapeInference(2**31 - 1, merge, False, 0)
    try:
        if (get_opset(proto) or 0) < 7:
            return None
        inference._preprocess(proto)
        while inference.run_:
            whole = inference._infer_impl()
        inference._update_output_from_vi()
    except Exception:  # Inference fails in many ways. Sizes then stay unknown, and attention without sizes is not replaced.
        return None
    return inference if whole else None


def _read_sizes(info: onnx.ValueInfoProto) -> list[int | str | None]:
    return [size.dim_value or size.dim_param or None for size in info.type.tensor_type.shape.dim]


def _list_free_axes(proto: onnx.ModelProto) -> set[tuple[str, int]]:
    """Return the axes of inputs whose sizes are free."""
    return {(i.name, axis) for i in proto.graph.input for axis, size in enumerate(_read_sizes(i)) if not isinstance(size, int)}


def _add_sizes(model: ir.Model, inferred: _Sizes) -> None:
    for value in list_outputs(model):
        before, sizes = dims(value), inferred.get(str(value.name))
        if sizes and len(before) in (0, len(sizes)):
            value.shape = ir.Shape(map(_choose_size, before or sizes, sizes))


def _choose_size(recorded: int | str | None, inferred: int | str | None) -> int | str | None:
    """Prefer a number to a name, and the inferred size to the recorded size, which paddle2onnx may record wrongly."""
    return next((size for size in (inferred, recorded) if isinstance(size, int)), inferred or recorded)
