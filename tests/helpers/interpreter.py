"""Triton's interpreter in place of a GPU. Import this before anything that imports Triton."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any

import numpy as np
import torch

os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined


def round_to_nearest() -> None:
    """Make the interpreter round float32 to bfloat16, as every GPU does. That of Triton 3.6 truncates."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    convert = interpreter._convert_float

    def rounded(data, source, target, mode):
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        return torch.from_numpy(np.array(data)).bfloat16().view(torch.uint16).numpy()

    interpreter._convert_float = rounded


def patch_the_language_once() -> None:
    """Each function that a kernel calls would patch Triton's language again, which takes a third of the time."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    patch, nothing = interpreter._patch_lang, getattr(interpreter, "_LangPatchScope", None)

    @functools.cache
    def seen_by(function: Any) -> list[Any]:
        return [m for m in function.__globals__.values() if m is tl or m is tl.core]

    def once(function: Any) -> Any:
        return patch(function) if any(tl.core.is_builtin(m.load) for m in seen_by(function)) else nothing()

    if nothing is not None:
        interpreter._patch_lang = once


def skip_unread_checks() -> None:
    """The interpreter works out whether each sum overflows, and drops the answer."""
    try:
        from triton.runtime import interpreter
    except ImportError:
        return
    options = getattr(interpreter.interpreter_builder, "options", None)
    if hasattr(options, "sanitize_overflow"):
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)
