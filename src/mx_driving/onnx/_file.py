"""Load an ONNX file: read it, sort its nodes, check it, and infer the shapes of its tensors.

onnx's checker has rules that onnxruntime lacks: sorted nodes, shapes of inputs and outputs, a name of the graph. Files that
break these rules are loaded, too. onnx_ir's CheckerPass refuses them (`EASED` of tests/helpers/onnx_graphs.py), and its
TopologicalSortPass names no node of a cycle.
"""

from __future__ import annotations

import contextlib
import graphlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.inliner
import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
    ShapeInferencePass,
    TopologicalSortPass,
)

from .._operator.rules import Problem, first_line
from ._forms import OURS
from ._graph import are_fixed, bypass_identities, dims, is_node, list_outputs, read_constant, walk_nodes
from ._nodes import give_shape, name_plugins
from ._runtimes import open_session

_FEW = 8192  # fold tables of at most so many elements, as onnxscript does
_Sizes = dict[str, list[int | str | None]]


def check_path(name: str, path: str | os.PathLike[str]) -> Path:
    """Return the path. Refuse a name that is not UTF-8, as onnx does, and an empty path, which would be the working folder."""
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


@dataclass
class LoadedFile:
    """The model of a file, with inferred sizes, and facts of the file that the model does not have.

    Attributes:
        shapes: name of a tensor -> its shape as in the file. The model has inferred shapes, too.
        defaults: name of an input -> its default. In the model the input is not an initializer.
        merged: names of the sizes that onnxruntime takes for equal, because a node would refuse unequal sizes.
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

    def refuse(rule: str, fact: str) -> Problem:
        return Problem(f"{name} must {rule}; got {path}{fact}")

    try:
        proto = onnx.load(path, format="protobuf", load_external_data=False)
    except OSError as error:
        raise refuse("be a file that can be read", f": {error.strerror or error}") from None
    except Exception as error:  # protobuf raises its own classes
        raise refuse("be an ONNX file", f": {first_line(error)}") from None
    _check_tensors(proto, refuse)
    try:
        model = ir.serde.deserialize_model(proto)
        if has_changed := sort_nodes(model) | name_plugins(model):
            proto = ir.serde.serialize_model(model)
        if proto.functions:
            inlined = proto
            # onnx cannot convert every opset. Attention in a function that is not inlined is not replaced.
            with contextlib.suppress(Exception):
                inlined = onnx.inliner.inline_local_functions(proto, convert_version=True)
            model = ir.serde.deserialize_model(inlined)
    except Exception as error:  # onnx_ir raises its own classes
        raise refuse("be an ONNX file", f": {find_cause(error)}") from None
    # Load attributes that are stored in other files, because we write only initializers to other files.
    for node in walk_nodes(model):
        for key, attribute in list(node.attributes.items()):
            if attribute.type == ir.AttributeType.TENSOR and isinstance(attribute.value, ir.ExternalTensor):
                _check_external(attribute.value, path, refuse)
                node.attributes[key] = ir.AttrTensor(key, ir.tensor(attribute.value.numpy(), name=attribute.value.name))
    for tensor in list_external(model):
        _check_external(tensor, path, refuse)
    # From IR version 4 on, an initializer that is also a graph input is a default, no constant: take it out. Before IR version
    # 4 every initializer had to be an input, and none could be overridden.
    defaults = {}
    for value in [value for value in model.graph.inputs if value.is_initializer()]:
        if model.ir_version < 4:
            model.graph.inputs.remove(value)
        else:
            defaults[str(value.name)] = value.const_value
            del model.graph.initializers[str(value.name)]
            value.const_value = None
    model.ir_version = max(model.ir_version, 4)
    try:
        check_file(path, proto, has_changed)
    except Exception as error:  # onnx raises its own classes, and UnicodeError
        raise refuse("be an ONNX file", f": {first_paragraph(error)}") from None
    # A file that onnxruntime saved imports every domain that was registered in its process. So remove our domain
    # if it has no node.
    if all(node.domain != OURS for node in walk_nodes(model)):
        model.graph.opset_imports.pop(OURS, None)
    version = model.graph.opset_imports.get(OURS, 1)
    if version != 1:
        raise refuse(f"hold nodes of version 1 of {OURS}", f", of version {version}")
    shapes = {value.name: value.shape for value in list_outputs(model)}
    model, merged = infer_shapes(model)
    return LoadedFile(path, model, shapes, defaults, merged)


def _walk_graphs(proto: onnx.ModelProto) -> Iterator[tuple[Any, list[Any], list[onnx.TensorProto]]]:
    """Yield each graph, subgraph and function, with its pairs (node, attribute) and its tensors that are in other files."""
    todo: list[Any] = [proto.graph, *proto.functions]
    while todo:
        graph = todo.pop()
        attributes = [(node, attribute) for node in graph.node for attribute in node.attribute]
        todo += [subgraph for _, a in attributes for subgraph in (a.g, *a.graphs) if subgraph.node]
        tensors = [*getattr(graph, "initializer", ()), *(t for _, a in attributes for t in (a.t, *a.tensors))]
        yield graph, attributes, [t for t in tensors if t.data_location == onnx.TensorProto.EXTERNAL]


def _check_tensors(proto: onnx.ModelProto, refuse: Callable[[str, str], Problem]) -> None:
    """Refuse tensors that onnx_ir does not read: sparse ones, and those in other files whose offset or length is no number."""
    for graph, attributes, external in _walk_graphs(proto):
        sparse = [tensor.values.name for tensor in getattr(graph, "sparse_initializer", ())]
        sparse += [node.output[0] for node, a in attributes if a.HasField("sparse_tensor") or a.sparse_tensors]
        if sparse:
            raise refuse("have dense tensors", f", where {', '.join(sparse)} is sparse")
        for tensor in external:
            for entry in tensor.external_data:
                if entry.key in ("offset", "length") and not (entry.value.isascii() and entry.value.isdigit()):
                    fact = f"{entry.key} of {tensor.name or 'a tensor'} is {entry.value[:50]!r}, no whole number"
                    raise refuse("have its weights beside it", f", where the {fact}")


def list_external(model: ir.Model) -> Iterator[ir.ExternalTensor]:
    """Yield the tensors that are stored in other files."""
    for graph in (*model.graphs(), *(g for function in model.functions.values() for g in function.subgraphs())):
        yield from (v.const_value for v in graph.initializers.values() if isinstance(v.const_value, ir.ExternalTensor))


def _check_external(tensor: ir.ExternalTensor, path: Path, refuse: Callable[[str, str], Problem]) -> None:
    """Set the folder of an external tensor, and check that the file has all of its bytes.

    As in onnx_ir, the file must be in the model's folder, and no hard link.
    """
    tensor.base_dir = path.parent
    end = (tensor.offset or 0) + (tensor.nbytes if tensor.length is None else tensor.length)
    if "\0" in str(tensor.location):
        fact = f"{str(tensor.location)!r}, which no file is named"
    elif not Path(os.path.realpath(tensor.path)).is_relative_to(os.path.realpath(tensor.base_dir)):
        fact = f"{tensor.location}, which lies in another folder"
    elif not os.path.isfile(tensor.path):
        fact = f"no file {tensor.location}"
    elif os.stat(tensor.path).st_nlink > 1:
        fact = f"{tensor.location}, which has other names (hard links)"
    elif (size := os.path.getsize(tensor.path)) < end:
        fact = f"{tensor.location} of {size} bytes, where {tensor.name} ends at {end}"
    else:
        return
    raise refuse("have its weights beside it", f", and {fact}")


def find_cause(error: BaseException) -> str:
    """Return the first line of the innermost error. onnx_ir wraps an error once for each level of the file."""
    while error.__cause__ is not None:
        error = error.__cause__
    return first_line(error)


def first_paragraph(error: Exception) -> str:
    """Return the first paragraph of an error's message in one line. onnx's messages continue with context."""
    return " ".join(str(error).strip().split("\n\n")[0].split())


def sort_nodes(model: ir.Model) -> bool:
    """Sort the nodes of all graphs topologically. Return whether a node has moved.

    Raises:
        ValueError: a node reads a tensor that nothing computes, or nodes read each other in a cycle.
    """
    nodes = list(walk_nodes(model))
    for node in nodes:
        for value in node.inputs:
            if value is not None and value.producer() is None and not value.is_graph_input() and not value.is_initializer():
                name = node.name or node.outputs[0].name
                raise ValueError(f"no node or input gives {value.name}, which {node.op_type} ({name}) reads")
    try:
        TopologicalSortPass()(model)
    except ValueError:  # onnx_ir's pass names no node
        names = []
        try:
            graphlib.TopologicalSorter({node: node.predecessors() for node in nodes}).prepare()
        except graphlib.CycleError as error:
            names = [str(node.outputs[0].name) for node in error.args[1][1:]]
        raise ValueError(f"its nodes have a cycle, {', '.join(names)}") from None
    return nodes != list(walk_nodes(model))


def check_file(path: Path, proto: onnx.ModelProto, has_changed: bool = False) -> None:
    """Check the file with onnx. If proto differs from the file, or lacks what the checker needs, check a completed copy."""
    for value in (*proto.graph.input, *proto.graph.output):
        if value.type.WhichOneof("value") == "tensor_type" and not value.type.tensor_type.elem_type:
            raise ValueError(f"{value.name} has no dtype")
    if untyped := [value.name for value in proto.graph.input if value.type.WhichOneof("value") is None]:
        raise ValueError(f"the input {untyped[0]} has no type")
    if not (has_changed or any(map(_lacks_shape, (*proto.graph.input, *proto.graph.output))) or not proto.graph.name):
        onnx.checker.check_model(path)
        return
    # Give a copy a name and shapes. Empty its tensors in other files, which the checker would open.
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    graph = copy.graph
    graph.name = graph.name or "graph"
    for value in filter(_lacks_shape, (*graph.input, *graph.output)):
        dtype = value.type.tensor_type.elem_type or onnx.TensorProto.FLOAT
        value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, dtype, []))
    for tensor in (tensor for *_, external in _walk_graphs(copy) for tensor in external):
        tensor.CopyFrom(onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=[0]))
    onnx.checker.check_model(copy)


def _lacks_shape(value: onnx.ValueInfoProto) -> bool:
    kind = value.type.WhichOneof("value")
    return kind is None or (kind == "tensor_type" and not value.type.tensor_type.HasField("shape"))


# Shapes of tensors


def infer_shapes(model: ir.Model) -> tuple[ir.Model, set[str]]:
    """Infer shapes with onnx, then with onnxruntime, then from constants and from names of sizes.

    Return the model, and the names of sizes that onnxruntime merged: they are equal if the nodes fit each other.
    """
    from onnxscript.optimizer import fold_constants

    model = _infer_with_onnx(model)
    nodes = (node for node in model.graph if node.domain.startswith("com.microsoft"))
    if unknown := {v.name: v for node in nodes for v in node.outputs if v.shape is None or v.dtype is None}:
        # onnx cannot infer the outputs of onnxruntime's own nodes: ask onnxruntime for their dtypes and shapes.
        with contextlib.suppress(Exception):  # onnxruntime may lack a node. Then attention without sizes is not replaced.
            graph = ir.convenience.extract(model.graph, model.graph.inputs, [*unknown.values()])
            for name, value in list(graph.initializers.items()):
                # Large weights become inputs, to create the session quickly.
                if value.const_value is not None and value.const_value.size > _FEW:
                    del graph.initializers[name]
                    value.const_value = None
                    graph.inputs.append(value)
            for answer in open_session(ir.Model(graph, ir_version=model.ir_version), optimise=False).get_outputs():
                kind, value = answer.type.removeprefix("tensor(").removesuffix(")").upper(), unknown[answer.name]
                if kind in ir.DataType.__members__:
                    value.dtype = ir.DataType[kind]
                    # [] means a scalar, or an unknown number of axes: keep the shape.
                    value.shape = ir.Shape(answer.shape) if answer.shape else value.shape
            model = _infer_with_onnx(model)
    if _all_sizes_are_fixed(model):
        return model, set()
    # Add sizes that onnx does not infer because the file computes a shape from constants or from a named batch.

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
        return model, set()
    _add_sizes(model, {str(value.name): list(dims(value)) for value in list_outputs(copy)})
    sizes, merged = ({}, set()) if _all_sizes_are_fixed(copy) else _infer_from_names(copy)
    _add_sizes(model, sizes)
    return model, merged


def _infer_with_onnx(model: ir.Model) -> ir.Model:
    """Infer shapes with onnx. Inference stops at a plugin: set the shape of the plugin's output and repeat."""
    model = ShapeInferencePass()(model).model
    while [node for node in model.graph if give_shape(node)]:
        model = ShapeInferencePass()(model).model
    return model


def _all_sizes_are_fixed(model: ir.Model) -> bool:
    return all(value.shape is not None and are_fixed(dims(value)) for value in list_outputs(model))


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
    """Set inferred sizes. Prefer numbers to names, and inferred sizes to the file's, which paddle2onnx may write wrongly."""
    for value in list_outputs(model):
        before, sizes = dims(value), inferred.get(str(value.name))
        if sizes and len(before) in (0, len(sizes)):
            pairs = zip(before or sizes, sizes, strict=True)
            new = (next((s for s in (size, old) if isinstance(s, int)), size or old) for old, size in pairs)
            value.shape = ir.Shape(new)
