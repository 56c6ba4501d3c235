"""BEVFormer's spatial cross-attention as a module: a bird's-eye map looks into the cameras that see it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from . import _check, _initial

__all__ = ["MSDeformableAttention3D", "SpatialCrossAttention"]


class MSDeformableAttention3D(nn.Module):
    """Deformable attention of pillars: a query has a reference point for each height of its pillar, in one camera's picture.

        location = reference of height (p mod num_Z_anchors) + offset_p(query) / (W_l, H_l)      for each of num_points points
        out      = multi_scale_deformable_attn_with_logits(value_proj(value), location, logit(query))

    It is the sampling of `SpatialCrossAttention`, which has the output projection.

    Args:
        embed_dims: channels of queries, values and output; a multiple of num_heads.
        num_heads, num_levels, num_points: heads, levels of a camera's pyramid, points per head and level, shared out evenly
            over the heights.

    Source: Li et al., "BEVFormer", ECCV 2022; its module's parameter names.
    """

    def __init__(self, embed_dims: int = 256, num_heads: int = 8, num_levels: int = 4, num_points: int = 8) -> None:
        super().__init__()
        _check.divides("num_heads", num_heads, "embed_dims", embed_dims)
        _check.at_least_one(num_levels=num_levels, num_points=num_points)
        self.embed_dims, self.num_heads, self.num_levels, self.num_points = embed_dims, num_heads, num_levels, num_points
        samples = num_heads * num_levels * num_points
        self.sampling_offsets = nn.Linear(embed_dims, samples * 2)
        self.attention_weights = nn.Linear(embed_dims, samples)
        self.value_proj = nn.Linear(embed_dims, embed_dims)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """BEVFormer's initialisation, which is Deformable-DETR's."""
        _initial.look_around(self.sampling_offsets, self.num_heads, self.num_points)
        _initial.equal_weights(self.attention_weights)
        _initial.xavier(self.value_proj)

    def forward(
        self, query: Tensor, reference_points: Tensor, value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor
    ) -> Tensor:
        """Attend.

        Args:
            query: [bs, num_queries, embed_dims], the positional embedding added.
            reference_points: [bs, num_queries, num_Z_anchors, 2] (x, y); 0..1 is the picture. num_Z_anchors divides
                num_points.
            value: [bs, num_keys, embed_dims], as `flatten_levels` makes it.
            spatial_shapes: [num_levels, 2], (H, W). int32 or int64.
            level_start_index: [num_levels]. int32 or int64.

        Returns:
            [bs, num_queries, embed_dims].
        """
        heads, levels, points = self.num_heads, self.num_levels, self.num_points
        return multi_scale_deformable_attn_with_logits(
            self.value_proj(value).unflatten(2, (heads, -1)),
            spatial_shapes,
            level_start_index,
            reference_points,
            self.sampling_offsets(query).unflatten(2, (heads, levels, points, 2)),
            self.attention_weights(query).unflatten(2, (heads, levels * points)),
            reference_axis="point",
        )

    def extra_repr(self) -> str:
        return (
            f"embed_dims={self.embed_dims}, num_heads={self.num_heads}, "
            f"num_levels={self.num_levels}, num_points={self.num_points}"
        )


class SpatialCrossAttention(nn.Module):
    """Each cell of a bird's-eye map (BEV) reads the cameras that see its pillar, and takes the mean of what it finds.

        found_cam = deformable_attention(query + query_pos, pillar in cam, value of cam)         for cameras that see the pillar
        out       = query + dropout(output_proj(sum of found_cam / number of these cameras))

    A camera sees a pillar if it sees one of its points; a cell that no camera sees gets the projection of zero. Each camera is
    asked by the cells that it sees and by no others: nothing is padded, and each scene of a batch has cameras of its own.
    BEVFormer's code takes the cells of the first scene for all of them; for one scene it agrees.

    BEVFormer's checkpoints (`SpatialCrossAttention` around `MSDeformableAttention3D`) load as they are:
    `deformable_attention.sampling_offsets`, `deformable_attention.attention_weights`, `deformable_attention.value_proj`,
    `output_proj`, each with weight and bias. Query and dropout are added here, as there.

    Args:
        embed_dims: channels of queries, values and output; a multiple of num_heads.
        num_heads, num_levels, num_points: of `MSDeformableAttention3D`.
        dropout: of the projected output, in training.

    Gradients: of query, query_pos, value, reference_points and all parameters.

    How many cells a camera sees is known only when they are counted. `torch.compile` therefore runs the loop over cameras as
    it is, between two graphs, and refuses the module with `fullgraph=True`.

    Source: Li et al., "BEVFormer", ECCV 2022; defaults of its configurations.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.SpatialCrossAttention(embed_dims=64, num_levels=1).eval()
    >>> value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(6, 64, 9, 16)])  # six cameras of one scene
    >>> query, pillars = torch.rand(1, 20, 64), torch.rand(1, 6, 20, 4, 2) * 4 - 2
    >>> mask = ((pillars > 0) & (pillars < 1)).all(-1)
    >>> tuple(attention(query, pillars, value[None], shapes, starts, mask).shape)
    (1, 20, 64)
    """

    def __init__(
        self, embed_dims: int = 256, num_heads: int = 8, num_levels: int = 4, num_points: int = 8, dropout: float = 0.1
    ) -> None:
        super().__init__()
        _check.share("dropout", dropout)
        self.embed_dims = embed_dims
        self.deformable_attention = MSDeformableAttention3D(embed_dims, num_heads, num_levels, num_points)
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.dropout = nn.Dropout(dropout)
        _initial.xavier(self.output_proj)

    def reset_parameters(self) -> None:
        """BEVFormer's initialisation."""
        self.deformable_attention.reset_parameters()
        _initial.xavier(self.output_proj)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        bev_mask: Tensor,
        query_pos: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: [bs, num_queries, embed_dims], the cells of the map. It is added to the result.
            reference_points: [bs, cam, num_queries, num_Z_anchors, 2], (x, y) of each pillar's points in each camera; 0..1 is
                the picture. num_Z_anchors divides num_points. BEVFormer's has the axes of cameras and scenes exchanged.
            value: [bs, cam, num_keys, embed_dims], the cameras' pyramids, each as `flatten_levels` makes it.
            spatial_shapes: [num_levels, 2], (H, W). int32 or int64.
            level_start_index: [num_levels]. int32 or int64.
            bev_mask: [bs, cam, num_queries, num_Z_anchors], bool; True is a point that the camera sees.
            query_pos: [bs, num_queries, embed_dims], the positional embedding, or None.

        Returns:
            [bs, num_queries, embed_dims].

        Raises:
            TypeError, ValueError: an input is not as above; the sentence says which one and what it must be.
        """
        inner = self.deformable_attention
        _check.cells(query, query_pos, spatial_shapes, level_start_index, self.embed_dims, inner.num_levels)
        _check.pillars(reference_points, value, bev_mask, query, inner.num_points)
        seen = bev_mask.any(-1)
        asked = query if query_pos is None else query + query_pos
        found = self._sum_over_cameras(asked, reference_points, value, spatial_shapes, level_start_index, seen)
        mean = found / seen.sum(1).clamp(min=1)[..., None]
        return self.dropout(self.output_proj(mean)) + query

    def _sum_over_cameras(
        self, query: Tensor, reference_points: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, seen: Tensor
    ) -> Tensor:
        """[bs, num_queries, embed_dims]. One call for each camera of each scene, with the queries that it sees."""
        bs, cams, queries = seen.shape
        pairs = seen.flatten().nonzero()[:, 0]  # over [bs, cam, num_queries]
        rows = pairs // (cams * queries) * queries + pairs % queries  # over [bs, num_queries]
        counts = seen.flatten(0, 1).sum(1).tolist()
        # selected once for all cameras: backward, every selection fills a gradient of all queries
        asked = query.flatten(0, 1).index_select(0, rows).split(counts)
        pillars = reference_points.flatten(0, 2).index_select(0, pairs).split(counts)
        pyramids = value.flatten(0, 1).unbind()
        summed = None
        for places, *inputs in zip(rows.split(counts), asked, pillars, pyramids, strict=True):
            found = self.deformable_attention(*(t[None] for t in inputs), shapes, starts)[0]
            summed = found.new_zeros(bs * queries, self.embed_dims) if summed is None else summed
            summed.index_add_(0, places, found)
        return torch.zeros_like(query) if summed is None else summed.view(bs, queries, -1)

    # torch.compile does not look inside. torch.compiler.disable sets the same, and imports the compiler for it.
    _sum_over_cameras._torchdynamo_disable = True
