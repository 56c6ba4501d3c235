"""Conditions for a fast path around the layers of a module, and the end that modules have in common."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def is_plain(layer: nn.Module) -> bool:
    """Return whether a layer is torch's own, without hooks: neither replaced nor observed."""
    return type(layer) in (nn.Linear, nn.Dropout) and not layer._forward_hooks and not layer._forward_pre_hooks


def is_exported() -> bool:
    """Return whether torch.export or torch.jit.trace is tracing."""
    exporting = getattr(torch.compiler, "is_exporting", None)  # torch 2.7 has it
    return bool(torch._C._get_tracing_state()) or (exporting is not None and exporting())


def project_and_add(samples: Tensor, output_proj: nn.Module, dropout: nn.Module, query: Tensor) -> Tensor:
    """Return dropout(output_proj(samples)) + query. Without gradients in place: page faults take longer than the sum."""
    out = dropout(output_proj(samples))
    ours = type(out) is Tensor and is_plain(output_proj) and is_plain(dropout)
    if ours and not (out.requires_grad or is_exported()) and out.dtype == torch.promote_types(out.dtype, query.dtype):
        return out.add_(query)
    return out + query
