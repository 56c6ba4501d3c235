"""`mx-driving fuse`: write the deformable attention of an ONNX file in another form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._io import print_json, writable
from .._operator.rules import Problem, first_line, need
from .start import Inputs, Json, Seconds, Threads, arrays, use_threads

_SECONDS = 20.0


def fuse(
    path_in: Annotated[str, typer.Argument(help="The ONNX file to read.")],
    path_out: Annotated[str, typer.Argument(help="The ONNX file to write.")],
    form: Annotated[str, typer.Option(help="What is written: onnxruntime, tensorrt, npu or gather.")] = "onnxruntime",
    plugin_version: Annotated[str | None, typer.Option(help="With tensorrt: the attribute plugin_version, such as 2.")] = None,
    time: Annotated[bool, typer.Option("--time", help="Run both files on the inputs, compare and time them.")] = False,
    inputs: Inputs = None,
    seconds: Seconds = _SECONDS,
    threads: Threads = 0,
    as_json: Json = False,
) -> None:
    """Replace deformable attention made of GridSample or gathers in an ONNX file by one node.

    Each match is tested in onnxruntime before it is replaced. The report lists replaced matches, and skipped matches with the
    reason; `--json` has the nodes, too. `--form` selects the target. Nodes of one form can be converted to another,
    and so can nodes of mmdeploy, TensorRT's plugins and Autoware.

    Example: `mx-driving fuse detector.onnx fused.onnx --time`
    """
    need("mx-driving fuse", "[onnx] onnxruntime", "onnx", "onnxscript", "onnxruntime")
    from .. import onnx

    if time and form in ("npu", "tensorrt"):
        raise Problem(f"--time must come with a form that onnxruntime runs; got {form}")
    if not time and (inputs or seconds != _SECONDS):
        option = "--inputs" if inputs else "--seconds"
        raise Problem(f"{option} must come with --time, which runs both files; got {option} alone")
    if inputs:
        writable("path_out", Path(path_out), [inputs])
    use_threads(threads)
    fed = arrays(inputs)
    try:
        report = onnx.fuse(path_in, path_out, form, plugin_version)
    except OSError as error:
        raise Problem(f"path_out must be a file that can be written; got {path_out}: {error.strerror or error}") from None
    if not as_json:
        print(report)
    compared = None
    if time:
        from ..onnx import _outputs

        try:
            compared = _outputs.compare(Path(path_in), report.path, seconds, fed, list(report.locations.values()))
        except Problem:
            raise
        except Exception as error:  # onnxruntime raises a dozen kinds of exceptions
            fact = f"{path_in}, {report.path}: {first_line(error)}"
            raise Problem(f"both files must run in onnxruntime; got {fact}") from None
    if as_json:
        print_json({**report.facts(), **({"time": vars(compared)} if compared else {})})
    elif compared:
        print(compared)
