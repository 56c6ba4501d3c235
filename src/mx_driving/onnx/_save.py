"""Write a model to a temporary file, check that onnxruntime loads it, and rename it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .. import config
from .._operator.problems import Problem
from .._operator.rules import first_line
from ._file import LoadedFile, first_paragraph, list_external, list_outputs
from ._forms import NODES, OURS
from ._graph import dims
from ._nodes import use_our_nodes
from ._order import check_file, walk_nodes
from ._plugins import restore_plugins
from ._session import is_missing_kernel, open_session


def save(file: LoadedFile, path_out: Path) -> str | None:
    """Write the model. If onnxruntime lacks a kernel for another node of the file, return its error.

    Weights stay in the model's file or in a file beside it. Sizes are those of the original file. Outputs of new nodes have no
    sizes in the original file, and get their fixed sizes.
    """
    model, path_in = file.model, file.path
    _restore_defaults(file)
    read = {path_in, *(Path(tensor.path) for tensor in list_external(model))}
    _restore_sizes(file)
    RemoveUnusedNodesPass()(model)
    _import_domains(model)
    weights = f"{path_out.name}.data" if list(list_external(model)) else None
    files = [weights, path_out.name] if weights else [path_out.name]  # the model last, so that its weights exist first
    _check_targets(read, path_in, [path_out.with_name(name) for name in reversed(files)])
    with tempfile.TemporaryDirectory(prefix=f".{path_out.name}.", dir=path_out.parent) as folder:
        ir.save(model, Path(folder, path_out.name), format="protobuf", external_data=weights)
        reason, lacks_kernel = _find_refusal(model, Path(folder, path_out.name))
        if reason and not lacks_kernel:
            raise Problem(f"path_in must be a file that can be run with our node in it; got {path_in}: {reason}")
        if restore_plugins(model):
            ir.save(model, Path(folder, path_out.name), format="protobuf", external_data=weights)
        for name in files:
            os.replace(Path(folder, name), path_out.with_name(name))
    return reason


def _find_refusal(model: ir.Model, path: Path) -> tuple[str | None, bool]:
    """Return the error of onnx's checker or of onnxruntime, or None, and whether onnxruntime lacks a kernel.

    Do not load a file with nodes of other libraries. Load nodes of other forms as our nodes.
    """
    try:
        check_file(path, onnx.load(path, format="protobuf", load_external_data=False))
    except Exception as error:  # onnx raises its own classes, and UnicodeError
        return first_paragraph(error), False
    nodes = list(walk_nodes(model))
    used = {node.domain for node in nodes if node.op_type != NODES.get(node.domain)}
    if used - {"", "ai.onnx", "ai.onnx.ml", "com.microsoft", OURS} - {name[0] for name in model.functions}:
        return None, False
    used = {node.domain for node in nodes} & NODES.keys()
    tried = path if used <= {OURS} else with_ours(path)
    try:
        open_session(tried, library=str(config.library_path()) if used else "", optimise=False)
    except Exception as error:  # onnxruntime raises a dozen classes
        return first_line(error), is_missing_kernel(error)
    return None, False


def with_ours(path: Path) -> Path:
    """Write a copy of the file with our node in place of each node of another form."""
    model = ir.load(path)
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    use_our_nodes(model, [node for node in nodes if node.domain in NODES and node.domain != OURS])
    ir.save(model, tried := path.with_name(f"tried.{path.name}"), format="protobuf")
    return tried


def _import_domains(model: ir.Model) -> None:
    """Make the model import the domains of its nodes, and no other domains of our forms."""
    for domain in NODES:
        if any(node.domain == domain for node in ir.traversal.RecursiveGraphIterator(model.graph)):
            model.graph.opset_imports.setdefault(domain, 1)
        elif not model.functions:
            model.graph.opset_imports.pop(domain, None)


def _restore_defaults(file: LoadedFile) -> None:
    for value in file.model.graph.inputs:
        if value.name in file.defaults:
            value.const_value = file.defaults[value.name]
            file.model.graph.register_initializer(value)


def _restore_sizes(file: LoadedFile) -> None:
    for value in list_outputs(file.model):
        before, node = file.shapes.get(value.name), value.producer()
        if before is None and value.shape is not None and node is not None and node.domain in NODES:
            before = ir.Shape([size if isinstance(size, int) else None for size in dims(value)])
        value.shape = before


def _check_targets(read: set[Path], path_in: Path, targets: list[Path]) -> None:
    """Refuse to overwrite a file that path_in reads, also under another name of the file."""
    for old in targets:
        if old.exists() and any(old.samefile(path) for path in read):
            raise Problem(f"path_out must leave the files of path_in alone; got {targets[0]}, and {path_in} reads {old}")
        if old.exists() and not old.is_file():
            raise Problem(f"path_out must be a file; got {old}")
