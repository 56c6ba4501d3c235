"""An ONNX file with the shapes of its tensors, and written again."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, ShapeInferencePass

from ._graph import constant, dims, is_node

# What free sizes of inputs become in two copies of the file, by axis. Pictures can be halved six times, and have other sizes in
# each copy even then.
_TRIED = (5, 640, 768, 896), (7, 832, 960, 1088)
_NAMES: dict[Any, str] = {pair: f"free size {axis}" for axis, pair in enumerate(zip(*_TRIED, strict=True))}
_FEW = 8192  # numbers of a table that a copy computes, as in onnxscript
_Sizes = tuple[int | str | None, ...]


def load(path: Path) -> ir.Model:
    """The model, with all sizes that can be found. `save` leaves out those that the file does not say."""
    model = _read(path)
    said = {value.name: value.shape for value in _values(model)}
    model = ShapeInferencePass()(model).model
    model.meta["said"] = said
    if any(value.shape is None or not all(isinstance(size, int) for size in dims(value)) for value in _values(model)):
        _add_sizes(model, path)
    return model


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    for node in model.graph:
        yield from node.outputs


def _read(path: Path) -> ir.Model:
    try:
        model = ir.load(path)
    except OSError as error:
        raise ValueError(f"path_in must be a file that can be read; got {path}: {error.strerror or error}") from None
    except Exception as error:  # protobuf's and onnx_ir's own
        fact = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(f"path_in must be an ONNX file; got {path}: {fact}") from None
    if not model.graph.opset_imports:
        raise ValueError(f"path_in must be an ONNX file; got {path}, which names no opset")
    return model


def _add_sizes(model: ir.Model, path: Path) -> None:
    """Add sizes that onnx's own inference loses where a file computes a shape, from a free batch or from constants.

    Two copies have numbers for free sizes. A size that is the same in both is fixed. Free sizes at the same axis of inputs have
    the same numbers, because exporters give one batch several names.
    """
    first, second = (_sizes_in_a_copy(path, numbers) for numbers in _TRIED)
    for value in _values(model):
        pair = first.get(str(value.name), ()), second.get(str(value.name), ())
        sizes = [a if a == b else _NAMES.get((a, b)) for a, b in zip(*pair, strict=False)]
        before = dims(value) or sizes
        if len(before) == len(pair[0]) == len(pair[1]):
            value.shape = ir.Shape([b if isinstance(b, int) else size or b for b, size in zip(before, sizes, strict=True)])


def _sizes_in_a_copy(path: Path, numbers: tuple[int, ...]) -> dict[str, _Sizes]:
    """The copy computes what depends on constants and sizes alone."""
    from onnxscript.optimizer import fold_constants

    copy = _read(path)
    for given in copy.graph.inputs:
        pairs = itertools.zip_longest(dims(given), numbers[: len(dims(given))])
        sizes = [number if number and not isinstance(size, int) else size for size, number in pairs]
        given.shape = given.shape and ir.Shape(sizes)
    try:
        fold_constants(copy, onnx_shape_inference=True, should_fold=_is_small_table)
    except Exception:  # of any node that it computes, and then sizes stay unknown: what needs them is reported as left
        return {}
    copy = ShapeInferencePass()(copy).model  # it also knows nodes that are functions of others, such as GreaterOrEqual
    return {str(value.name): dims(value) for value in _values(copy)}


def _is_small_table(node: ir.Node) -> bool | None:
    """True for a table that onnxscript would not compute; paddings are made of them. None leaves it to onnxscript."""
    shape = constant(node.inputs[0]) if is_node(node, "ConstantOfShape") else None
    return True if shape is not None and np.prod(shape) <= _FEW else None


def save(model: ir.Model, path: Path) -> None:
    """Weights stay where they are: in the file, or in a file beside it. Sizes are those of the file, and of our nodes the fixed
    ones."""
    said = model.meta.pop("said")
    for value in _values(model):
        before, node = said.get(value.name), value.producer()
        if before is None and node is not None and node.domain == "mx_driving":
            before = ir.Shape([size if isinstance(size, int) else None for size in dims(value)])
        value.shape = before
    model.graph.opset_imports["mx_driving"] = 1
    RemoveUnusedNodesPass()(model)
    outside = any(isinstance(v.const_value, ir.ExternalTensor) for v in model.graph.initializers.values())
    ir.save(model, path, external_data=f"{path.name}.data" if outside else None)
