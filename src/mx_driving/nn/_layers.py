"""What modules ask of their layers before they take a quicker way than calling one after the other."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_plain(layer: nn.Module) -> bool:
    """Whether it is torch's own, and nobody looks on: it was not replaced by another, and has no hooks."""
    return type(layer) in (nn.Linear, nn.Dropout) and not layer._forward_hooks and not layer._forward_pre_hooks


def is_exported() -> bool:
    """Whether torch.export or torch.jit.trace makes a graph of what runs."""
    exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.7 has it
    return bool(torch._C._get_tracing_state()) or (exporting is not None and exporting())


def projected(found: Tensor, output_proj: nn.Module, dropout: nn.Module, query: Tensor) -> Tensor:
    """dropout(output_proj(found)) + query. Without gradients in place, because fresh memory takes longer than the sum."""
    out = dropout(output_proj(found))
    ours = type(out) is Tensor and is_plain(output_proj) and is_plain(dropout)
    if ours and not (out.requires_grad or is_exported()) and out.dtype == torch.promote_types(out.dtype, query.dtype):
        return out.add_(query)
    return out + query
