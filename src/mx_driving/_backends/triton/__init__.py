"""The GPU kernels, in Triton. The first call of an operator on a GPU imports Triton."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ... import _needs
from ..._operator import rules

_ON = rules.flag("MX_DRIVING_TRITON", default=True)
# AMD GPUs that the kernels compile for. benchmarks/machine_code.py reads the machine code for gfx942, gfx950 and gfx1100.
AMD = {
    "gfx942": "CDNA 3", "gfx950": "CDNA 4", "gfx90a": "CDNA 2", "gfx1100": "RDNA 3", "gfx1101": "RDNA 3", "gfx1102": "RDNA 3",
    "gfx1200": "RDNA 4", "gfx1201": "RDNA 4",
}  # fmt: skip
DEVICES = ("cuda", "xpu")  # PyTorch's device types that Triton compiles for; "cuda" includes AMD's GPUs
_MOST_ROWS = 1 << 30  # most rows of value: an index of a row, or of its neighbour, fits into 32 bits
_OLDEST = (8, 0)


@functools.cache
def why_not(device: str = "cuda", index: int | None = None) -> str | None:
    """Return why these kernels cannot run on a GPU, and what to do; None if they can.

    Without an index, return None if the kernels can run on any of this machine's GPUs. If an old GPU is beside a new GPU, only
    calls on the old GPU go to the reference.
    """
    if not _ON:
        return "MX_DRIVING_TRITON=0 is set; unset it to use the GPU kernels"
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; pip install {'triton-windows' if sys.platform == 'win32' else 'triton'} brings it"
    if too_old := _needs.lacks("Sampling by Triton"):
        return too_old
    gpus = getattr(torch, device)
    if not gpus.is_available():
        return None  # without a GPU, allow the kernels: tests execute their PTX on the CPU
    reasons = [_why_not_gpu(device, i) for i in (range(gpus.device_count()) if index is None else [index])]
    if all(reasons):
        return reasons[0]
    # At a kernel's first call, Triton compiles a launcher from C. Triton for Windows includes a compiler.
    if sys.platform == "win32" or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return None
    return "Triton finds no C compiler; install gcc or clang, or name one in CC"


def _why_not_gpu(device: str, index: int) -> str | None:
    if device == "xpu":
        from triton.backends import backends

        return None if "intel" in backends else "this Triton compiles nothing for Intel's GPUs; pytorch-triton-xpu does"
    if torch.version.hip:
        name = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        return None if name in AMD else f"the GPU is a {name}, and the GPU kernels are compiled for {', '.join(AMD)}"
    major, minor = torch.cuda.get_device_capability(index)
    if (major, minor) >= _OLDEST:
        return None
    return f"compute capability {major}.{minor}, and the GPU kernels need {_OLDEST[0]}.{_OLDEST[1]}"


def serves(value: Tensor, *others: Tensor | None) -> bool:
    """Return whether these kernels serve a call. float64, and a value of more than 2**30 rows, go to the reference."""
    return torch.float64 not in [t.dtype for t in (value, *others) if t is not None] and value.shape[1] <= _MOST_ROWS


@functools.cache
def kernel(operator: str, backward: bool) -> Callable[..., Any]:
    """Return the operator's forward or backward function. The first call imports Triton."""
    module = importlib.import_module(f"{__name__}.{operator}")
    return module.backward if backward else module.forward
