"""Multi-scale deformable attention as one module for Deformable-DETR's, mmcv's and transformers' checkpoints."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .._operator import composition
from .._operator.checks import check_shapes
from .._operator.rules import FLOATING, FLOATING_RULE, INDEX, INDEX_RULE, need_dtype
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from ._layers import DeformableLayers, check_layer_dtype, project_values

__all__ = ["MultiScaleDeformableAttention"]


class MultiScaleDeformableAttention(DeformableLayers):
    """Each query reads a few points of its choice, near its reference point, on every level of a feature pyramid.

        location = reference + offset(query) / (W_l, H_l)                        reference points (x, y)
        location = centre + offset(query) / num_points * (w, h) / 2              reference boxes (x, y, w, h)
        out      = output_proj(multi_scale_deformable_attn(value_proj(value), location, softmax(weight(query))))

    Checkpoints of Deformable-DETR (`MSDeformAttn`), mmcv (`MultiScaleDeformableAttention`) and transformers load as they
    are: `sampling_offsets`, `attention_weights`, `value_proj`, `output_proj`, each with weight and bias. mmcv's module also
    adds the query and applies dropout to the result; this module, like Deformable-DETR's, leaves both to its caller.

    Args:
        embed_dims: channels of queries, values and output; a multiple of num_heads.
        num_heads, num_levels, num_points: heads, levels of the pyramid, points per head and level.

    Initially every query reads up to num_points pixels away in num_heads directions, with equal weights (Deformable-DETR's
    initialisation).

    Source: Zhu et al., "Deformable DETR", ICLR 2021.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.MultiScaleDeformableAttention(embed_dims=64, num_levels=2)
    >>> value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(1, 64, 8, 8), torch.rand(1, 64, 4, 4)])
    >>> tuple(attention(torch.rand(1, 10, 64), torch.rand(1, 10, 2, 2), value, shapes, starts).shape)
    (1, 10, 64)
    """

    def __init__(self, embed_dims: int = 256, num_heads: int = 8, num_levels: int = 4, num_points: int = 4) -> None:
        super().__init__(embed_dims, num_heads, num_levels, num_points)

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
            reference_points: [bs, num_queries, num_levels, 2] (x, y), or [..., 4] (x, y, w, h); 0..1 is the map.
            value: [bs, num_keys, embed_dims], as `flatten_levels` makes it.
            spatial_shapes: [num_levels, 2], (H, W). int32 or int64.
            level_start_index: [num_levels]. int32 or int64.
            padding_mask: [bs, num_keys], bool; True means padding, read as zero.

        Returns:
            [bs, num_queries, embed_dims].

        Raises:
            TypeError, ValueError: an input breaks a rule above; the sentence names the input and the rule.
        """
        self._check_inputs(
            query,
            reference_points,
            spatial_shapes,
            value=(value, "bs, num_keys, embed_dims"),
            level_start_index=(level_start_index, "num_levels"),
            padding_mask=(padding_mask, "bs, num_keys or None"),
        )
        offsets, logits = self._offsets_and_logits(query)
        rows = project_values(self.value_proj, value, padding_mask, self.num_heads)
        out = multi_scale_deformable_attn_with_logits(
            rows, spatial_shapes, level_start_index, reference_points, offsets, logits
        )
        return self.output_proj(out)

    def sampling(self, query: Tensor, reference_points: Tensor, spatial_shapes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sampling locations and weights of each query, for inspection.

        `forward` does not call this method: its operator computes locations and weights.

        Returns:
            locations [bs, num_queries, num_heads, num_levels, num_points, 2] and
            weights [bs, num_queries, num_heads, num_levels, num_points], as `multi_scale_deformable_attn` takes them.
        """
        self._check_inputs(query, reference_points, spatial_shapes)
        need_dtype("reference_points", reference_points, FLOATING, FLOATING_RULE)
        need_dtype("spatial_shapes", spatial_shapes, INDEX, INDEX_RULE)
        offsets, logits = self._offsets_and_logits(query)
        inputs = None, spatial_shapes, None, reference_points, offsets, logits
        *_, locations, weights = composition.bare_inputs("multi_scale_deformable_attn_with_logits", *inputs)
        return locations, weights

    def _check_inputs(self, query: Tensor, reference_points: Tensor, spatial_shapes: Tensor, **pyramid: Any) -> None:
        check_shapes(
            {"embed_dims": self.embed_dims, "num_levels": self.num_levels},
            query=(query, "bs, num_queries, embed_dims"),
            reference_points=(reference_points, "bs, num_queries, num_levels, 2 or 4"),
            spatial_shapes=(spatial_shapes, "num_levels, 2"),
            **pyramid,
        )
        check_layer_dtype(self.sampling_offsets, query=query)
