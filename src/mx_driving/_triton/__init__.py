"""The GPU kernels, in Triton. Nothing here imports Triton until an operator is called on a GPU."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MOST_ROWS = 1 << 30  # rows are numbered in 32 bits, with room for a neighbour on each side
_OLDEST = (8, 0)


@functools.cache
def why_not() -> str | None:
    """Why these kernels cannot be used on this machine's GPUs, or None when they can."""
    if torch.version.hip:
        return "the GPU kernels are for NVIDIA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if torch.cuda.is_available():
        oldest = min(torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count()))
        if oldest < _OLDEST:
            return f"compute capability {oldest[0]}.{oldest[1]}; the GPU kernels need {_OLDEST[0]}.{_OLDEST[1]}"
    return None


def serves(value: Tensor, locations: Tensor, weights: Tensor) -> bool:
    """Whether these kernels take such a call. float64, and a value of more rows than they can number, go to the reference."""
    wide = torch.float64 in (value.dtype, locations.dtype, weights.dtype)
    return not wide and value.shape[1] <= _MOST_ROWS


@functools.cache
def kernel(operator: str, backward: bool) -> Callable[..., Any]:
    """The operator's forward or backward function. The first call imports Triton."""
    module = importlib.import_module(f"{__name__}.{operator}")
    return module.backward if backward else module.forward
