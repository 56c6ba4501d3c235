"""`mx-driving fuse`: our node in an ONNX file that somebody else exported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .._programs.problems import Problem, need


def fuse(
    path_in: Annotated[Path, typer.Argument(help="The ONNX file to read.")],
    path_out: Annotated[Path, typer.Argument(help="The ONNX file to write.")],
) -> None:
    """Put our node in place of deformable attention made of GridSample, in an ONNX file that somebody else exported.

    Each place is tried in onnxruntime before it is replaced. Prints what was replaced, and what was left and why.

    Example: `mx-driving fuse detector.onnx fused.onnx`
    """
    need("mx-driving fuse", "mx-driving-portable[onnx] onnxruntime", "onnx", "onnxscript", "onnxruntime")
    from .. import onnx

    try:
        print(onnx.fuse(path_in, path_out))
    except ValueError as error:
        raise Problem(str(error)) from None
    except OSError as error:
        raise Problem(f"path_out must be a file that can be written; got {path_out}: {error.strerror or error}") from None
