"""Replace deformable attention in an ONNX file by nodes of another form.

`_file` loads the file. `_find` searches weighted sums of samples for candidates (`_search`, `_samples`). `_trial` proves that a
candidate computes the operator. `_forms` writes the new nodes, `_nodes` reads nodes of other forms, `_save` writes the file.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnx_ir as ir

from .._operator.problems import Problem
from ._file import LoadedFile, check_path, find_cause, load, silence_libraries
from ._find import find_samplings
from ._forms import WRITE, Call
from ._graph import Unfit, describe_node, dims
from ._nodes import find_nodes, is_of_form, name_unknown, rewrite
from ._save import save
from ._search import Sampling, find_tables
from ._trial import pad_points
from ._writer import Writer


@dataclass(frozen=True)
class Fused:
    """The report of `fuse`. `name` is the name of the tensor with the sum of samples.

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


def _pad_levels(write: Writer, value: ir.Value, sampling: Sampling, *last: int) -> ir.Value:
    """Return locations or weights with separate axes for levels and points. Pad all levels to the same number of points."""
    points = sampling.points
    if len(set(points)) > 1:
        indices, mask = pad_points(points)
        value = write.like(value, "Gather", write.table("places", indices), axis=3)
        if not last:
            assert value.dtype is not None
            value = write.like(value, "Mul", write.table("mask", mask, value.dtype.numpy()))
    return write.reshape(value, sampling.num_heads, len(points), max(points), *last)


def _expand(write: Writer, sampling: Sampling, ends: list[ir.Value]) -> list[ir.Value]:
    """Return value, locations and weights. The file broadcasts them: expand them to one batch size and number of queries."""
    value, locations, weights = ends
    samples = [sampling.last_sizes(tensor) for tensor in sampling.ends]
    weights = _expand_like(write, weights, locations, 2, samples[2])
    weights = _expand_like(write, weights, value, 1, samples[2])
    locations = _expand_like(write, locations, weights, 2, samples[1])
    return [_expand_like(write, value, weights, 1, samples[0]), locations, weights]


def _expand_like(write: Writer, value: ir.Value, other: ir.Value, axes: int, last: tuple[int, ...]) -> ir.Value:
    """Expand the first `axes` axes to the sizes of `other`, and the last axes to `last`."""
    first = write.op("Gather", write.op("Shape", other), write.table("axes", range(axes)), axis=0)
    shape = write.op("Concat", first, write.table("shape", [1] * (2 - axes) + list(last)), axis=0)
    new = write.like(value, "Expand", shape)
    new.shape = ir.Shape([None, *dims(value)[1 : 3 - axes], *[None] * (axes - 1), *last])
    return new


def _write_inputs(write: Writer, sampling: Sampling) -> Call:
    free = [*sampling.inputs.values()]
    ends = [end if end in free else write.copy(end) for end in sampling.ends]
    value, locations, weights = _expand(write, sampling, ends) if sampling.broadcasts else ends
    value = write.reshape(value, sampling.num_heads, sampling.channels)
    value.shape = ir.Shape([dims(value)[0], sampling.num_keys, sampling.num_heads, sampling.channels])
    locations, weights = _pad_levels(write, locations, sampling, 2), _pad_levels(write, weights, sampling)
    return Call(
        _widen(write, value, sampling), *write.tables(sampling.maps), locations, weights, sampling.dtype == ir.DataType.FLOAT
    )


def _widen(write: Writer, value: ir.Value, sampling: Sampling) -> ir.Value:
    """Cast value to the dtype of the output if that has more bits, because a node's output has the dtype of value."""
    dtype, output_dtype = value.dtype, sampling.output.dtype
    if dtype is None or output_dtype is None or dtype.itemsize >= output_dtype.itemsize:
        return value
    cast = write.cast(value, output_dtype)
    cast.shape = value.shape
    return cast


def _replace_attention(file: LoadedFile, path: Path, form: str, **options: str | None) -> Fused:
    model = file.model
    report, others = Fused(path), find_nodes(model.graph)
    for name, sampling in find_samplings(file, tables=form != "gather"):
        try:
            if not isinstance(sampling, Sampling):
                raise Unfit(sampling)
            locations = sampling.inputs.get("locations")
            with Writer(model, sampling.output) as write:
                output, dtype = WRITE[form](write, _write_inputs(write, sampling), **options), sampling.output.dtype
                write.put_in_place(output if dtype is None else write.cast(output, dtype))
            report.replaced[name], report.nodes[name] = sampling.words, sampling.nodes
            report.locations.update({name: str(locations.name)} if locations else {})
        except Unfit as unfit:
            report.left[name] = str(unfit)
    _rewrite(model, others, report, form, **options)
    return report


def _describe_attention(model: ir.Model) -> str:
    """Return the reason why a file has nothing to replace."""
    counts = Counter(describe_node(node) for node in find_nodes(model.graph))
    words = ", ".join(f"{count} of the node {name}" for name, count in counts.items())
    if gathers := len(find_tables(model.graph)):
        words += f"{', ' * bool(words)}{gathers} in the form gather"
    samples = f"it has {words} already, and no other weighted samples" if words else "it has no weighted samples"
    return samples + name_unknown(model.graph)


def _rewrite(model: ir.Model, others: list[ir.Node], report: Fused, form: str, **options: str | None) -> None:
    """Replace `others`, nodes of other forms, by nodes of this form."""
    for node in others:
        name = str(node.outputs[0].name)
        try:
            if not is_of_form(node, form):
                report.replaced[name], report.nodes[name] = rewrite(model, node, form, **options), (str(node.name),)
        except Unfit as unfit:
            report.left[name] = str(unfit)


def _fuse(path_in: Path, path_out: Path, form: str, **options: str | None) -> Fused:
    file = load(path_in)
    report = _replace_attention(file, path_out, form, **options)
    if not report.replaced:
        why = "; ".join(f"{name}: {reason}" for name, reason in report.left.items()) or _describe_attention(file.model)
        raise Problem(f"path_in must hold deformable attention made of GridSample or gathers; got {path_in} ({why})")
    problem = save(file, path_out)
    return replace(report, problem=problem) if problem and form in ("onnxruntime", "gather") else report


def fuse_file(path_in: str | os.PathLike[str], path_out: str | os.PathLike[str], form: str, **options: str | None) -> Fused:
    """Write path_in in another form to path_out. `options`: attributes of the new nodes."""
    source, target = check_path("path_in", path_in), check_path("path_out", path_out)
    if os.path.realpath(source) == os.path.realpath(target):
        raise Problem(f"path_out must be another file than path_in; got {target} for both")
    try:
        with silence_libraries():
            return _fuse(source, target, form, **options)
    except ir.serde.SerdeError as error:  # such as a text that is not UTF-8
        raise Problem(f"path_in must be an ONNX file; got {source}: {find_cause(error)}") from None
