"""Replace deformable attention in an ONNX file by nodes of another form.

`_file` loads the file. `_find` searches weighted sums of samples for candidates (`_samples`). `_trial` proves that a
candidate computes the operator. `_forms` writes the new nodes, `_nodes` reads nodes of other forms.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from .. import config
from .._operator.rules import Problem, first_line
from ._file import LoadedFile, check_file, check_path, find_cause, first_paragraph, list_external, load, silence_libraries
from ._find import find_samplings
from ._forms import DOMAIN, NODES, OURS, Call, Writer, write_attention
from ._graph import Unfit, describe_node, dims, list_outputs, walk_nodes
from ._nodes import find_nodes, name_unknown, restore_plugins, rewrite, use_our_nodes
from ._runtimes import is_missing_kernel, open_session
from ._samples import Sampling, find_tables, pad_points


@dataclass(frozen=True)
class Fused:
    """The report of `fuse`. `name`, the key of each dictionary, is the name of the tensor that has the sum of samples.

    Attributes:
        path: the file that was written.
        replaced: name -> the replaced nodes in words.
        left: name -> reason why samples were not replaced, also for GridSample nodes outside weighted sums.
        nodes: name -> names of the replaced nodes in the input file.
        problem: the error of onnxruntime's CPU provider if it lacks a kernel for another node; else "".
        locations: name -> name of the tensor of locations in the input file.
    """

    path: Path
    replaced: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    nodes: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problem: str = ""
    locations: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.replaced)} replaced, {len(self.left)} left"]
        lines += [f"  replaced {name}: {words}" for name, words in self.replaced.items()]
        lines += [f"  left {name}: {why}" for name, why in self.left.items()]
        return "\n".join(lines + [f"  onnxruntime does not run it on a CPU: {self.problem}"] * bool(self.problem))

    def facts(self) -> dict[str, Any]:
        """Return the facts that `--json` prints."""
        replaced = [{"name": n, "words": words, "nodes": list(self.nodes[n])} for n, words in self.replaced.items()]
        return {
            "right": True,
            "path": str(self.path),
            "replaced": replaced,
            "left": [{"name": name, "why": why} for name, why in self.left.items()],
            "problem": self.problem,
        }


@silence_libraries()
def fuse_file(
    path_in: str | os.PathLike[str], path_out: str | os.PathLike[str], form: str, plugin_version: str | None = None
) -> Fused:
    """Write path_in in another form to path_out: replace samplings, and nodes of other forms, by nodes of this form."""
    source, target = check_path("path_in", path_in), check_path("path_out", path_out)
    if os.path.realpath(source) == os.path.realpath(target):
        raise Problem(f"path_out must be another file than path_in; got {target} for both")
    try:
        file = load(source)
        model, report = file.model, Fused(target)
        others = find_nodes(model.graph)
        for name, sampling in find_samplings(file, tables=form != "gather"):
            try:
                if not isinstance(sampling, Sampling):
                    raise Unfit(sampling)
                locations = sampling.inputs.get("locations")
                with Writer(model, sampling.output) as write:
                    output = write_attention(write, _write_inputs(write, sampling), form, plugin_version)
                    dtype = sampling.output.dtype
                    write.put_in_place(output if dtype is None else write.cast(output, dtype))
                report.replaced[name], report.nodes[name] = sampling.words, sampling.nodes
                report.locations.update({name: str(locations.name)} if locations else {})
            except Unfit as unfit:
                report.left[name] = str(unfit)
        for node in others:
            name = str(node.outputs[0].name)
            # Skip a node that has the wanted form. Every node of our domain has the form onnxruntime. Each other form has one
            # kind of node, for attention.
            if node.domain == DOMAIN.get(form) and (form == "onnxruntime" or node.op_type == NODES[node.domain]):
                continue
            try:
                report.replaced[name], report.nodes[name] = rewrite(model, node, form, plugin_version), (str(node.name),)
            except Unfit as unfit:
                report.left[name] = str(unfit)
        if not report.replaced:
            why = "; ".join(f"{name}: {reason}" for name, reason in report.left.items())
            counts = Counter(describe_node(node) for node in find_nodes(model.graph))
            words = [f"{count} of the node {name}" for name, count in counts.items()]
            if gathers := len(find_tables(model.graph)):
                words.append(f"{gathers} in the form gather")
            nodes = f"{', '.join(words)} already, and no other weighted samples" if words else "no weighted samples"
            why = why or f"it has {nodes}{name_unknown(model.graph)}"
            raise Problem(f"path_in must hold deformable attention made of GridSample or gathers; got {source} ({why})")
        problem = save(file, target)
    except ir.serde.SerdeError as error:  # such as a text that is not UTF-8
        raise Problem(f"path_in must be an ONNX file; got {source}: {find_cause(error)}") from None
    return replace(report, problem=problem) if problem and form in ("onnxruntime", "gather") else report


def _write_inputs(write: Writer, sampling: Sampling) -> Call:
    """Write the operator's inputs from the sampling's tensors and constants."""
    free, heads, channels = [*sampling.inputs.values()], sampling.num_heads, sampling.channels
    value, locations, weights = (end if end in free else write.copy(end) for end in sampling.ends)
    if sampling.broadcasts:  # The file broadcasts tensors: expand all to one batch size and one number of queries.
        samples = [sampling.last_sizes(tensor) for tensor in sampling.ends]
        weights = _expand_like(write, weights, locations, 2, samples[2])
        weights = _expand_like(write, weights, value, 1, samples[2])
        locations = _expand_like(write, locations, weights, 2, samples[1])
        value = _expand_like(write, value, weights, 1, samples[0])
    value = write.reshape(value, heads, channels)
    value.shape = ir.Shape([dims(value)[0], sampling.num_keys, heads, channels])
    # Separate the axes of levels and points. Pad all levels to the same number of points, with weights of 0.
    points, levels = sampling.points, (heads, len(sampling.points), max(sampling.points))
    if len(set(points)) > 1:
        indices, mask = pad_points(points)
        locations, weights = (write.like(v, "Gather", write.table("places", indices), axis=3) for v in (locations, weights))
        assert weights.dtype is not None
        weights = write.like(weights, "Mul", write.table("mask", mask, weights.dtype.numpy()))
    locations, weights = write.reshape(locations, *levels, 2), write.reshape(weights, *levels)
    # A node's output has the dtype of value: cast value if the file's output has more bits.
    dtype, output_dtype = value.dtype, sampling.output.dtype
    if dtype is not None and output_dtype is not None and dtype.itemsize < output_dtype.itemsize:
        shape, value = value.shape, write.cast(value, output_dtype)
        value.shape = shape
    return Call(value, *write.tables(sampling.maps), locations, weights, sampling.dtype == ir.DataType.FLOAT)


def _expand_like(write: Writer, value: ir.Value, other: ir.Value, axes: int, last: tuple[int, ...]) -> ir.Value:
    """Expand the first `axes` axes to the sizes of `other`, and the last axes to `last`."""
    first = write.op("Gather", write.op("Shape", other), write.table("axes", range(axes)), axis=0)
    shape = write.op("Concat", first, write.table("shape", [1] * (2 - axes) + list(last)), axis=0)
    new = write.like(value, "Expand", shape)
    new.shape = ir.Shape([None, *dims(value)[1 : 3 - axes], *[None] * (axes - 1), *last])
    return new


# Writing the file


def save(file: LoadedFile, path_out: Path) -> str | None:
    """Write the model to a temporary file, check that onnxruntime loads this file, and move it to path_out.

    Weights stay in the model's file or in a file beside it. Tensors get the sizes that path_in gives them; outputs of new nodes
    get their fixed sizes. If onnxruntime lacks a kernel for another node, return its error.
    """
    model, path_in = file.model, file.path
    for value in model.graph.inputs:
        if value.name in file.defaults:
            value.const_value = file.defaults[value.name]
            model.graph.register_initializer(value)
    read = {path_in, *(Path(tensor.path) for tensor in list_external(model))}
    for value in list_outputs(model):
        shape, node = file.shapes.get(value.name), value.producer()
        if shape is None and value.shape is not None and node is not None and node.domain in NODES:
            shape = ir.Shape([size if isinstance(size, int) else None for size in dims(value)])
        value.shape = shape
    RemoveUnusedNodesPass()(model)
    # Import the domains of the model's nodes, and no other domains of our forms.
    for domain in NODES:
        if any(node.domain == domain for node in ir.traversal.RecursiveGraphIterator(model.graph)):
            model.graph.opset_imports.setdefault(domain, 1)
        elif not model.functions:
            model.graph.opset_imports.pop(domain, None)
    weights = f"{path_out.name}.data" if list(list_external(model)) else None
    files = [weights, path_out.name] if weights else [path_out.name]  # the model last, so that its weights exist first
    for old in (path_out.with_name(name) for name in reversed(files)):
        if old.exists() and any(old.samefile(path) for path in read):  # also under another name of the file
            raise Problem(f"path_out must leave the files of path_in alone; got {path_out}, and {path_in} reads {old}")
        if old.exists() and not old.is_file():
            raise Problem(f"path_out must be a file; got {old}")
    with tempfile.TemporaryDirectory(prefix=f".{path_out.name}.", dir=path_out.parent) as folder:
        path = Path(folder, path_out.name)
        ir.save(model, path, format="protobuf", external_data=weights)
        reason, lacks_kernel = None, False
        try:
            check_file(path, onnx.load(path, format="protobuf", load_external_data=False))
        except Exception as error:  # onnx raises its own classes, and UnicodeError
            reason = first_paragraph(error)
        nodes = list(walk_nodes(model))
        others = {node.domain for node in nodes if node.op_type != NODES.get(node.domain)}
        others -= {"", "ai.onnx", "ai.onnx.ml", "com.microsoft", OURS, *(name[0] for name in model.functions)}
        if not reason and not others:  # onnxruntime loads nodes of other forms as our nodes, but no nodes of other libraries
            ours = {node.domain for node in nodes} & NODES.keys()
            tried = path if ours <= {OURS} else with_ours(path)
            try:
                open_session(tried, library=str(config.library_path()) if ours else "", optimise=False)
            except Exception as error:  # onnxruntime raises a dozen classes
                reason, lacks_kernel = first_line(error), is_missing_kernel(error)
        if reason and not lacks_kernel:
            raise Problem(f"path_in must be a file that can be run with our node in it; got {path_in}: {reason}")
        if restore_plugins(model):
            ir.save(model, path, format="protobuf", external_data=weights)
        for name in files:
            os.replace(Path(folder, name), path_out.with_name(name))
    return reason


def with_ours(path: Path) -> Path:
    """Write a copy of the file with our node in place of each node of another form."""
    model = ir.load(path)
    nodes = ir.traversal.RecursiveGraphIterator(model.graph)
    use_our_nodes(model, [node for node in nodes if node.domain in NODES and node.domain != OURS])
    ir.save(model, tried := path.with_name(f"tried.{path.name}"), format="protobuf")
    return tried
