"""Which backend serves a call: one list, best first, that kernels and `backends()` ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .. import _backends
from .._backends.triton import from_cpp
from .._operator.description import OPERATORS, Operator


def choose(operator: Operator, device: str, inputs: Sequence[Any] = ()) -> tuple[str, str]:
    """Return the backend that serves a call, and why it is the reference. Without inputs: the backend of usual calls."""
    if device == "cpu":
        if reason := _backends.native.why_not():
            return "reference", reason
        if inputs and not _backends.native.serves(inputs[0]):
            return "reference", "value has more rows than the native kernels number"
        return "native", ""
    if device in _backends.triton.DEVICES:
        if reason := _backends.triton.why_not(device, inputs[0].device.index if inputs else None):
            return "reference", reason
        if inputs and not _backends.triton.serves(*inputs):
            return "reference", "an input is float64, or value has more rows than the Triton kernels number"
        return "triton", ""
    return "reference", "there are no kernels for this device"


def backends() -> dict[str, dict[str, str]]:
    """Which kernel serves which device, and why if it is the reference.

    Returns a dictionary per device type: operator name -> a sentence. "other" is every device not named. Where the vendor's
    distribution is installed beside this one, every sentence ends with that, and with what to do.

    >>> sorted(backends())
    ['cpu', 'cuda', 'other']
    """
    import mx_driving_portable  # it imports importlib.metadata

    beside = mx_driving_portable.beside()
    end = f"; {beside}" if beside else ""
    return {
        device: {name: _describe(device, *choose(operator, device)) + end for name, operator in OPERATORS.items()}
        for device in ("cpu", "cuda", *(["xpu"] if torch.xpu.is_available() else []), "other")
    }


def _describe(device: str, backend: str, reason: str) -> str:
    if backend == "reference":
        return f"reference: {reason}"
    if backend == "native":
        by_ctypes = _backends.native.why_by_ctypes()
        way = f", called by ctypes ({by_ctypes})" if by_ctypes else ""
        isa, threads = _backends.native.isa(), _backends.native.threads()
        return f"native C++, {isa}, {threads}{way}; float32, float64, float16, bfloat16"
    label = ", compiled but never run on AMD" if torch.version.hip else ", never run on Intel's GPUs" if device == "xpu" else ""
    label += from_cpp.describe() if device == "cuda" else ""
    return f"Triton{label}; float32, float16, bfloat16; float64: reference"
