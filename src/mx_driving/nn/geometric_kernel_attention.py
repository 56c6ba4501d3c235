"""Geometric kernel attention as a module: MapTR's attention around the projections of a bird's-eye cell."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .._operator import composition
from .._operator.checks import check_shapes
from .._operator.rules import FLOATING, FLOATING_RULE, INDEX, INDEX_RULE, fail, need_dtype
from ..ops.geometric_kernel_attention_with_logits import geometric_kernel_attention_with_logits
from . import _layers

__all__ = ["GeometricKernelAttention"]


class GeometricKernelAttention(nn.Module):
    """Each query weighs the pixels of a small window around its reference points: fixed places, learned weights.

        pixel = round(reference * (W_l, H_l) + offset_k)        offset_k: a kernel_size window, `dilation` pixels apart
        out   = geometric_kernel_attention(value_proj(value), pixel, softmax over levels and window of weight(query))

    Head h reads around reference point h: MapTR gives each cell num_heads points above the ground.
    MapTR's checkpoints (`GeometryKernelAttention`) load as they are: `attention_weights` and `value_proj`, each with weight
    and bias. There is no output projection: in MapTR the spatial cross-attention around this module has one.

    Args:
        embed_dims: channels of queries, values and output; a multiple of num_heads.
        num_heads: heads, and reference points per query.
        num_levels: levels of the pyramid.
        kernel_size: (height, width) of the window in pixels. Its points are ordered column by column, as in MapTR.
        dilation: pixels between neighbours in the window.

    Gradients: of query and value; none for reference_points.

    Source: Liao et al., "MapTR", ICLR 2023; defaults of its tiny configuration.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.GeometricKernelAttention(embed_dims=64)
    >>> value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(1, 64, 15, 25)])
    >>> tuple(attention(torch.rand(1, 10, 64), torch.rand(1, 10, 4, 2), value, shapes, starts).shape)
    (1, 10, 64)
    """

    grid_offsets: Tensor

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 4,
        num_levels: int = 1,
        kernel_size: tuple[int, int] = (3, 5),
        dilation: int = 1,
    ) -> None:
        super().__init__()
        _layers.check_counts(embed_dims=embed_dims, num_levels=num_levels, dilation=dilation)
        _layers.check_divides("num_heads", num_heads, "embed_dims", embed_dims)
        if not isinstance(kernel_size, (list, tuple)) or len(kernel_size) != 2:
            fail(ValueError, "kernel_size", "be (height, width)", repr(kernel_size))
        _layers.check_counts(**{f"kernel_size[{i}]": size for i, size in enumerate(kernel_size)})
        self.embed_dims, self.num_heads, self.num_levels = embed_dims, num_heads, num_levels
        self.kernel_size, self.dilation = tuple(kernel_size), dilation
        self.num_points = math.prod(kernel_size)
        self.register_buffer("grid_offsets", torch.empty(self.num_points, 2, dtype=torch.int64), persistent=False)
        self.attention_weights = nn.Linear(embed_dims, num_heads * num_levels * self.num_points)
        self.value_proj = nn.Linear(embed_dims, embed_dims)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as MapTR does: all weights are equal. Also set the window: a module built on the device meta has none."""
        x, y = ((torch.arange(n) - n // 2) * self.dilation for n in reversed(self.kernel_size))
        _layers.fill(self.grid_offsets, torch.cartesian_prod(x, y).view(-1, 2))
        _layers.initialise(nn.init.zeros_, self.attention_weights)
        _layers.initialise(nn.init.xavier_uniform_, self.value_proj)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the attended features.

        Args:
            query: [bs, num_queries, embed_dims], the positional embedding added.
            reference_points: [bs, num_queries, num_heads, 2] (x, y); 0..1 is the map.
            value: [bs, num_keys, embed_dims], as `flatten_levels` makes it.
            spatial_shapes: [num_levels, 2], (H, W). int32 or int64.
            level_start_index: [num_levels]. int32 or int64.
            padding_mask: [bs, num_keys], bool; True means padding, read as zero.

        Returns:
            [bs, num_queries, embed_dims].

        Raises:
            TypeError, ValueError: an input breaks a rule above; the sentence names the input and the rule.
        """
        heads, levels = self.num_heads, self.num_levels
        check_shapes(
            {"embed_dims": self.embed_dims, "num_heads": heads, "num_levels": levels},
            query=(query, "bs, num_queries, embed_dims"),
            reference_points=(reference_points, "bs, num_queries, num_heads, 2"),
            spatial_shapes=(spatial_shapes, "num_levels, 2"),
            value=(value, "bs, num_keys, embed_dims"),
            level_start_index=(level_start_index, "num_levels"),
            padding_mask=(padding_mask, "bs, num_keys or None"),
        )
        _layers.check_layer_dtype(self.attention_weights, query=query)
        logits = self.attention_weights(query).unflatten(2, (heads, levels * self.num_points))
        rows = _layers.project_values(self.value_proj, value, padding_mask, heads)
        return geometric_kernel_attention_with_logits(
            rows, spatial_shapes, level_start_index, reference_points, self.grid_offsets, logits
        )

    @torch.no_grad()
    def pixels(self, reference_points: Tensor, spatial_shapes: Tensor) -> Tensor:
        """Return the pixels that each query reads, [bs, num_queries, num_heads, num_levels, num_points, 2], as floats.

        `forward` does not call this method: its operator computes the pixels.
        """
        check_shapes(
            {"num_heads": self.num_heads, "num_levels": self.num_levels},
            reference_points=(reference_points, "bs, num_queries, num_heads, 2"),
            spatial_shapes=(spatial_shapes, "num_levels, 2"),
        )
        need_dtype("reference_points", reference_points, FLOATING, FLOATING_RULE)
        need_dtype("spatial_shapes", spatial_shapes, INDEX, INDEX_RULE)
        return composition.Geometric.pixels(spatial_shapes, reference_points, self.grid_offsets)

    def extra_repr(self) -> str:
        return _layers.list_settings(self, "embed_dims", "num_heads", "num_levels", "kernel_size", "dilation")
