"""The backends: the native library on a CPU, Triton on a GPU. `choose` selects the backend of a call, also for `backends()`.

If torch can call the native library from C++, `import mx_driving` loads the library. Otherwise the first call loads it.
The first call on a GPU imports Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._operator.description import OPERATORS, Operator
from . import native, triton
from .triton import from_cpp

__all__ = ["backends", "choose", "native", "triton"]


def choose(operator: Operator, device: str, inputs: Sequence[Any] = ()) -> tuple[str, str]:
    """Return (backend, reason) for a call. The reason is "" unless the backend is the reference. Without inputs, check only the
    device."""
    if device == "cpu":
        if reason := native.why_not():
            return "reference", reason
        if inputs and not native.serves(inputs[0]):
            return "reference", "value has more rows than the native kernels number"
        return "native", ""
    if device in triton.DEVICES:
        if reason := triton.why_not(device, inputs[0].device.index if inputs else None):
            return "reference", reason
        if inputs and not triton.serves(*inputs):
            return "reference", "an input is float64, or value has more rows than the Triton kernels number"
        return "triton", ""
    return "reference", "there are no kernels for this device"


def backends() -> dict[str, dict[str, str]]:
    """Return the kernel of each operator on each device type, and the reason if the kernel is the reference.

    The result has a dictionary for each device type: operator name -> a sentence. "other" stands for all other device types.
    If the vendor's distribution is also installed, every sentence ends with a warning and with advice.

    >>> sorted(backends())
    ['cpu', 'cuda', 'other']
    """
    import mx_driving_portable  # imported here, so that `import mx_driving` does not wait for importlib.metadata

    beside = mx_driving_portable.beside()
    sentences: dict[str, dict[str, str]] = {}
    for device in ("cpu", "cuda", *(["xpu"] if torch.xpu.is_available() else []), "other"):
        sentences[device] = {}
        for name, operator in OPERATORS.items():
            backend, reason = choose(operator, device)
            sentence = f"reference: {reason}"
            if backend == "native":
                by_ctypes = native.why_by_ctypes()
                way = f", called by ctypes ({by_ctypes})" if by_ctypes else ""
                isa, threads = native.isa(), native.threads()
                sentence = f"native C++, {isa}, {threads}{way}; float32, float64, float16, bfloat16"
            elif backend == "triton":
                label = ", compiled but never run on AMD" if torch.version.hip else ""
                label = ", never run on Intel's GPUs" if device == "xpu" else label
                label += from_cpp.describe() if device == "cuda" else ""
                sentence = f"Triton{label}; float32, float16, bfloat16; float64: reference"
            sentences[device][name] = f"{sentence}; {beside}" if beside else sentence
    return sentences
