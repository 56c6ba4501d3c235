"""The nodes that `torch.onnx.export(..., dynamo=True)` writes for the operators, our library for onnxruntime, and `fuse`.

By default the exporter writes gathers of standard operators (`_dispatch/decompositions.py`). For another form, pass its table:

    torch.onnx.export(module, inputs, dynamo=True, opset_version=20,
                      custom_translation_table=mx_driving.onnx.translations("grid_sample"))
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from .._operator.rules import Problem

if TYPE_CHECKING:
    from ._fuse import Fused

__all__ = ["FORMS", "fuse", "library", "register_library", "translations"]

FORMS = ("gather", "grid_sample", "npu", "onnxruntime", "tensorrt")
FUSED_FORMS = tuple(form for form in FORMS if form != "grid_sample")


def translations(form: str = "gather") -> dict[Any, Callable[..., Any]]:
    """Return the `custom_translation_table` of torch.onnx.export for one form.

    An operator without a node in the form becomes gathers. Except with "onnxruntime", an operator with logits becomes standard
    operators that compute locations and weights, and then the bare operator in the form.

    Args:
        form:
            "gather": Gather and sums, as without a table. It has no GridSample, which TensorRT is known to miscompile.
                Samples that are not on the map contribute exactly 0, even where weights or values are NaN.
            "grid_sample": GridSample per level, for runtimes that have a fast one (opset_version 16 or later; TensorRT has
                miscompiled such graphs of opset 20). geometric_kernel_attention does not interpolate and stays a gather.
            "npu": multi_scale_deformable_attn is one node `npu::MultiScaleDeformableAttn` for the vendor's converter. Its
                floating inputs are cast to float32, and its two index tables to int32. The vendor has no node for the other
                operators, which stay gathers.
            "onnxruntime": each operator is one node `mx_driving::<operator>`, which onnxruntime runs with our CPU kernels after
                `options.register_custom_ops_library(mx_driving.onnx.library())`.
            "tensorrt": multi_scale_deformable_attn is one node `trt.plugins::MultiscaleDeformableAttnPlugin_TRT`, NVIDIA's
                plugin that TensorRT brings. Its two index tables are cast to int32. The plugin computes in float32, or in
                float16 if all three floating inputs are float16. No plugin computes the other operators, which stay gathers.

    Returns:
        A dictionary from operator to function, which you can merge with your own. It is empty for "gather".

    Raises:
        ValueError: form is none of these.
        ImportError: onnxscript, which torch.onnx.export itself requires, is not installed.

    >>> import mx_driving.onnx
    >>> mx_driving.onnx.translations("gather")
    {}
    """
    if form not in FORMS:
        raise Problem(f"form must be one of {', '.join(FORMS)}; got {form!r}")
    if form == "gather":
        return {}
    from ._translations import NODES

    return {getattr(torch.ops.mx_driving, operator).default: node for operator, node in NODES[form].items()}


def library() -> str:
    """Return the path of the library with our operators for onnxruntime 1.16 or later, on a CPU.

        options = onnxruntime.SessionOptions()
        options.register_custom_ops_library(mx_driving.onnx.library())
        session = onnxruntime.InferenceSession("detector.onnx", options)

    The library needs neither Python nor PyTorch: programs in C++, C# and Java register the same file by its path.

    Raises:
        RuntimeError: the package has no native library, or its native library cannot be used here.
    """
    from .. import _backends, config

    if reason := _backends.native.why_not():
        raise RuntimeError(reason)
    return str(config.library_path())


@contextmanager
def register_library() -> Iterator[None]:
    """Register our library in every session of onnxruntime that is created in the block, such as a quantiser's.

        with mx_driving.onnx.register_library():
            quantize_static("fused.onnx", "int8.onnx", reader, op_types_to_quantize=["Conv", "MatMul", "Gemm"])

    Raises:
        RuntimeError: the package has no native library, or its native library cannot be used here.
        ImportError: onnxruntime is not installed.
    """
    onnxruntime: Any = importlib.import_module("onnxruntime")
    path, make = library(), onnxruntime.InferenceSession.__init__

    def make_with_library(session: Any, model: Any, sess_options: Any = None, *args: Any, **options: Any) -> None:
        sess_options = onnxruntime.SessionOptions() if sess_options is None else sess_options
        sess_options.register_custom_ops_library(path)
        make(session, model, sess_options, *args, **options)

    onnxruntime.InferenceSession.__init__ = make_with_library
    try:
        yield
    finally:
        onnxruntime.InferenceSession.__init__ = make


def fuse(
    path_in: str | os.PathLike[str],
    path_out: str | os.PathLike[str],
    form: str = "onnxruntime",
    plugin_version: str | None = None,
) -> Fused:
    """Write an ONNX file with its deformable attention as one node, or in another form.

        print(mx_driving.onnx.fuse("detector.onnx", "fused.onnx"))

    The attention may be made of GridSample, or of gathers that interpolate. Before attention is replaced, its nodes run in
    onnxruntime on random inputs, and the result must equal the operator's within rounding. If it does not, the nodes stay, and
    the report has the reason. Nodes of another form, and nodes of other libraries for the operators, are converted. Unused
    nodes are removed.

    Args:
        path_in: an ONNX file whose levels have fixed sizes; batch and queries may be free.
        path_out: the file to write. Weights that path_in keeps in other files go to a file beside it, path_out + ".data".
        form:
            "onnxruntime": our node, which onnxruntime runs with the library that `library` names.
            "tensorrt": NVIDIA's plugin, as in `translations`. A file in float64 is refused: a cast would lose digits.
            "npu": the vendor's node, as in `translations`. A file in float64 is refused, too.
            "gather": standard operators without GridSample, for runtimes that lack it or have a wrong one.
        plugin_version: with "tensorrt", the attribute `plugin_version` of each node, for example "2"; none by default.

    Returns:
        A report: `replaced` and `left`, by the name of a tensor. It prints as lines.

    Raises:
        ValueError: path_in is not an ONNX file or has nothing to replace, or path_out is a file that path_in reads. Nothing
            is written.
        ImportError: onnx, onnxscript (the extra `onnx`) or onnxruntime is not installed.
    """
    if form not in FUSED_FORMS:
        raise Problem(f"form must be one of {', '.join(FUSED_FORMS)}; got {form!r}")
    if plugin_version is not None and form != "tensorrt":
        raise Problem(f"plugin_version must come with form 'tensorrt'; got {plugin_version!r} with {form!r}")
    importlib.import_module("onnxruntime")
    from ._fuse import fuse_file

    return fuse_file(path_in, path_out, form, plugin_version)
