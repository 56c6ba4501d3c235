"""BEVFormer's temporal self-attention as a module: a bird's-eye map reads itself and the previous map."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .._operator.checks import check_shapes
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from . import _layers

__all__ = ["TemporalSelfAttention"]

_QUEUE = 2  # maps: the previous and the current map


class TemporalSelfAttention(_layers.DeformableLayers):
    """Each cell of a bird's-eye map (BEV) reads a few points of the previous and of the current map.

        offset_t, logit_t = linear([previous map, query + query_pos])                  for both maps t, previous and current
        sample_t          = multi_scale_deformable_attn_with_logits(value_proj(map_t), reference_t, offset_t, logit_t)
        out               = query + dropout(output_proj(mean of sample_t over t))

    BEVFormer's checkpoints (`TemporalSelfAttention`, num_bev_queue=2) load as they are: `sampling_offsets`,
    `attention_weights`, `value_proj`, `output_proj`, each with weight and bias. As in BEVFormer, this module
    applies dropout and adds the query. Each scene of a batch has its own maps. BEVFormer's code agrees for one scene; for
    several scenes it orders the maps and the offsets differently.

    Args:
        embed_dims: channels of queries, maps and output; a multiple of num_heads.
        num_heads, num_levels, num_points: heads, levels of a map, points per head and level of each map.
        dropout: in training, the dropout rate of the projected output.

    Initially every query reads up to num_points pixels away in num_heads directions, with equal weights.

    Gradients: of query, query_pos, value, reference_points and all parameters.

    Source: Li et al., "BEVFormer", ECCV 2022; defaults of its configurations.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.TemporalSelfAttention(embed_dims=64).eval()
    >>> value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(2, 64, 5, 4)])  # the previous map and the current one
    >>> query, reference = torch.rand(1, 20, 64), torch.rand(1, 2, 20, 1, 2)
    >>> tuple(attention(query, reference, value[None], shapes, starts).shape)
    (1, 20, 64)
    """

    def __init__(
        self, embed_dims: int = 256, num_heads: int = 8, num_levels: int = 1, num_points: int = 4, dropout: float = 0.1
    ) -> None:
        super().__init__(embed_dims, num_heads, num_levels, num_points, maps=_QUEUE)
        _layers.check_dropout_rates(dropout=dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor | None,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        query_pos: Tensor | None = None,
    ) -> Tensor:
        """Return the attended features.

        Args:
            query: [bs, num_queries, embed_dims], the cells of the map. It is added to the result.
            reference_points: [bs, 2, num_queries, num_levels, 2] (x, y), or [..., 4] (x, y, w, h): the cell's place in the
                previous map, before the vehicle moved, and in the current map; 0..1 is the map.
            value: [bs, 2, num_queries, embed_dims], the previous and the current map. None if there is no previous map; then
                the query serves as both maps.
            spatial_shapes: [num_levels, 2], (H, W) of a map. int32 or int64.
            level_start_index: [num_levels]. int32 or int64.
            query_pos: [bs, num_queries, embed_dims], the positional embedding, or None.

        Returns:
            [bs, num_queries, embed_dims].

        Raises:
            TypeError, ValueError: an input breaks a rule above; the sentence names the input and the rule.
        """
        check_shapes(
            {"embed_dims": self.embed_dims, "num_levels": self.num_levels},
            query=(query, "bs, num_queries, embed_dims"),
            query_pos=(query_pos, "bs, num_queries, embed_dims or None"),
            value=(value, f"bs, {_QUEUE}, num_queries, embed_dims or None"),
            reference_points=(reference_points, f"bs, {_QUEUE}, num_queries, num_levels, 2 or 4"),
            spatial_shapes=(spatial_shapes, "num_levels, 2"),
            level_start_index=(level_start_index, "num_levels"),
        )
        _layers.check_layer_dtype(self.value_proj, query=query, **({} if value is None else {"value": value}))
        maps = query[:, None] if value is None else value
        maps = _layers.cast_once(maps, self.value_proj, self.sampling_offsets, self.attention_weights)
        positioned = _layers.add_embedding(self.sampling_offsets, query, query_pos=query_pos)
        offsets, logits = self._offsets_and_logits(maps[:, 0], positioned)
        rows = self.value_proj(maps).unflatten(3, (self.num_heads, -1)).expand(-1, _QUEUE, -1, -1, -1)
        samples = multi_scale_deformable_attn_with_logits(
            rows.flatten(0, 1),
            spatial_shapes,
            level_start_index,
            reference_points.flatten(0, 1),
            offsets.flatten(0, 1),
            logits.flatten(0, 1),
        )
        samples = samples.unflatten(0, (-1, _QUEUE))
        if samples.requires_grad or _layers.is_exported():
            mean = samples.mean(1)
        else:  # in place, to save the page faults of a new tensor; halved first, because the sum of two float16 may overflow
            mean = samples[:, 0].mul_(0.5).add_(samples[:, 1], alpha=0.5)
        return _layers.project_and_add(mean, self.output_proj, self.dropout, query)

    def _offsets_and_logits(self, previous: Tensor, query: Tensor) -> tuple[Tensor, Tensor]:
        """Return offsets [bs, 2, num_queries, num_heads, num_levels, num_points, 2], and logits, which lack the last axis."""
        layers = self.sampling_offsets, self.attention_weights
        if all(_layers.is_plain(layer) and layer.bias is not None for layer in layers):
            # Two matrix products without a concatenation of the maps; the second product adds to the first.
            weight, bias = torch.cat([layer.weight for layer in layers]), torch.cat([layer.bias for layer in layers])
            half = F.linear(query, weight[:, self.embed_dims :], bias)
            both = torch.addmm(half.flatten(0, 1), previous.flatten(0, 1), weight[:, : self.embed_dims].t()).view_as(half)
            offsets, logits = both.split([layer.weight.shape[0] for layer in layers], -1)
        else:
            offsets, logits = (layer(torch.cat([previous, query], -1)) for layer in layers)
        sizes = (self.num_heads, _QUEUE, self.num_levels, self.num_points)
        offsets = offsets.unflatten(2, (*sizes, 2)).permute(0, 3, 1, 2, 4, 5, 6)
        return offsets, logits.unflatten(2, sizes).permute(0, 3, 1, 2, 4, 5)
