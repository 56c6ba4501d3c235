"""The GPU kernels, in Triton. Nothing here imports Triton until an operator is called on a GPU."""

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

from ... import _checks

_ON = _checks.flags.flag("MX_DRIVING_TRITON", default=True)
# AMD's GPUs that the kernels are compiled for in tests/helpers/machine_code.py.
AMD = {"gfx942": "CDNA 3", "gfx950": "CDNA 4", "gfx1100": "RDNA 3"}
_MOST_ROWS = 1 << 30  # rows are numbered in 32 bits, with room for a neighbour on each side
_OLDEST = (8, 0)


@functools.cache
def why_not() -> str | None:
    """Why these kernels cannot be used on this machine's GPUs, and what to do; None when they can."""
    if not _ON:
        return "MX_DRIVING_TRITON=0 is set; unset it to use the GPU kernels"
    if importlib.util.find_spec("triton") is None:
        return f"Triton is not installed; pip install {'triton-windows' if sys.platform == 'win32' else 'triton'} brings it"
    if too_old := _checks.needs.lacks("Sampling by Triton"):
        return too_old
    if not torch.cuda.is_available():
        return None  # an interpreter, or a machine without a GPU
    return _of_amd() if torch.version.hip else _of_nvidia()


def _of_nvidia() -> str | None:
    oldest = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
    if oldest < _OLDEST:
        return (
            f"compute capability {oldest[0]}.{oldest[1]}, and the GPU kernels need {_OLDEST[0]}.{_OLDEST[1]}; "
            "where a newer GPU is there, CUDA_VISIBLE_DEVICES can hide the old one"
        )
    return _no_compiler()


def _of_amd() -> str | None:
    names = [torch.cuda.get_device_properties(i).gcnArchName.split(":")[0] for i in range(torch.cuda.device_count())]
    others = sorted(set(names) - set(AMD))
    if others:
        return (
            f"the GPU is a {others[0]}, and the GPU kernels are compiled for {', '.join(AMD)}; "
            "where one of these is there, HIP_VISIBLE_DEVICES can hide the other"
        )
    return _no_compiler()


def _no_compiler() -> str | None:
    """Triton builds its launcher with a C compiler at a kernel's first call, and fails there without one."""
    if sys.platform == "win32" or os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"):
        return None  # Windows' Triton brings a compiler along
    return "Triton finds no C compiler; install gcc or clang, or name one in CC"


def serves(value: Tensor, *others: Tensor) -> bool:
    """Whether these kernels take such a call. float64, and a value of more rows than they can number, go to the reference."""
    return torch.float64 not in (value.dtype, *(t.dtype for t in others)) and value.shape[1] <= _MOST_ROWS


@functools.cache
def kernel(operator: str, backward: bool) -> Callable[..., Any]:
    """The operator's forward or backward function. The first call imports Triton."""
    module = importlib.import_module(f"{__name__}.{operator}")
    return module.backward if backward else module.forward
