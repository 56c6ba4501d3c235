"""Triton's interpreter in place of a GPU. Import this before anything that imports Triton."""

from __future__ import annotations

import os

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
