"""The layers of all deformable attention modules, and fast paths that replace calls of unmodified layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._operator.composition import autocasts
from . import _check, _initial


def list_settings(module: nn.Module, *names: str) -> str:
    """Return attributes of a module for its `extra_repr`."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)


class DeformableLayers(nn.Module):
    """Layers that compute the offsets and logits of queries, and project values.

    Args:
        maps: number of maps that a query reads. The input of the offset and weight layers joins a row of each map.
        output: whether there is an output projection.
    """

    def __init__(
        self, embed_dims: int, num_heads: int, num_levels: int, num_points: int, maps: int = 1, output: bool = True
    ) -> None:
        super().__init__()
        _check.divisors(embed_dims, num_heads=num_heads)
        _check.positive(num_levels=num_levels, num_points=num_points)
        self.embed_dims, self.num_heads, self.num_levels, self.num_points = embed_dims, num_heads, num_levels, num_points
        samples = num_heads * maps * num_levels * num_points
        self.sampling_offsets = nn.Linear(maps * embed_dims, samples * 2)
        self.attention_weights = nn.Linear(maps * embed_dims, samples)
        self.value_proj = nn.Linear(embed_dims, embed_dims)
        if output:
            self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as Deformable-DETR and BEVFormer do."""
        _initial.look_around(self.sampling_offsets, self.num_heads, self.num_points)
        _initial.equal_weights(self.attention_weights)
        _initial.xavier(self.value_proj)
        if hasattr(self, "output_proj"):
            _initial.xavier(self.output_proj)

    def _offsets_and_logits(self, query: Tensor) -> tuple[Tensor, Tensor]:
        heads, levels, points = self.num_heads, self.num_levels, self.num_points
        query = cast_once(query, self.sampling_offsets, self.attention_weights)
        offsets = self.sampling_offsets(query).unflatten(2, (heads, levels, points, 2))
        return offsets, self.attention_weights(query).unflatten(2, (heads, levels * points))

    def extra_repr(self) -> str:
        return list_settings(self, "embed_dims", "num_heads", "num_levels", "num_points")


def is_exported() -> bool:
    """Return whether torch.export, torch.jit.trace or make_fx is tracing."""
    exporting = getattr(torch.compiler, "is_exporting", bool)  # torch before 2.7 has no is_exporting
    if _torch_private.is_tracing() or exporting():
        return True
    return not torch.compiler.is_compiling() and _torch_private.is_traced_by_make_fx()


def cast_once(x: Tensor, *layers: nn.Module) -> Tensor:
    """Convert x to autocast's dtype, contiguous, once for all layers that read x. If a layer is modified, return x.

    Compiled graphs convert x once anyway.
    """
    if is_exported() or torch.compiler.is_compiling() or x.dtype != torch.float32:
        return x
    if not (autocasts(x.device.type) and all(map(_check.is_plain, layers))):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)).contiguous()


def project_and_add(samples: Tensor, output_proj: nn.Module, dropout: nn.Module, query: Tensor) -> Tensor:
    """Return dropout(output_proj(samples)) + query.

    Without gradients the sum is in place, because the page faults of a new tensor take longer than the sum.
    """
    out = dropout(output_proj(samples))
    ours = type(out) is Tensor and _check.is_plain(output_proj) and _check.is_plain(dropout, nn.Dropout)
    if ours and not (out.requires_grad or is_exported()):
        return out.to(torch.promote_types(out.dtype, query.dtype)).add_(query)
    return out + query
