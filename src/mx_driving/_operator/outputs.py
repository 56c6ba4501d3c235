"""The dtype of an output under autocast, and memory for gradients."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def autocast_dtype(value: Tensor) -> torch.dtype:
    """Return the dtype of an output under autocast: float32 if value has 16 bits."""
    return torch.float32 if value.dtype in (torch.float16, torch.bfloat16) else value.dtype


def empty_gradients(tensors: Sequence[Tensor], mask: Sequence[bool]) -> list[Tensor]:
    """Return uninitialised memory for the gradients of tensors; an empty tensor where `mask` is False."""
    return [
        torch.empty_like(t, memory_format=torch.contiguous_format) if needed else t.new_empty((0,))
        for t, needed in zip(tensors, mask, strict=True)
    ]
