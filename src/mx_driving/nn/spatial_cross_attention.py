"""BEVFormer's spatial cross-attention as a module: the cells of a bird's-eye map read the cameras that see them."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Callable, Sequence

from torch import SymInt, Tensor, nn

from .._operator.checks import check_shapes
from .._operator.rules import fail, need_dtype
from .._torch_private import is_batched, skip_in_compile
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from . import _layers

__all__ = ["MSDeformableAttention3D", "SpatialCrossAttention"]

_attend: Callable[..., Tensor] = functools.partial(multi_scale_deformable_attn_with_logits, reference_axis="point")
_TOGETHER = 2**22  # most offsets and logits that are computed together for several cameras: 16 MB in float32


def _check_heights(num_Z_anchors: int, num_points: int) -> None:
    if num_Z_anchors == 0 or num_points % num_Z_anchors != 0:
        rule = f"have a num_Z_anchors count that divides num_points={num_points}"
        fail(ValueError, "reference_points", rule, num_Z_anchors)


class MSDeformableAttention3D(_layers.DeformableLayers):
    """Deformable attention of pillars: a query has a reference point for each height of its pillar, in one camera's picture.

        location = reference of height (p mod num_Z_anchors) + offset_p(query) / (W_l, H_l)      for each of num_points points
        out      = multi_scale_deformable_attn_with_logits(value_proj(value), location, logit(query))

    `SpatialCrossAttention` samples with this module and adds the output projection.

    Args:
        embed_dims: channels of queries, values and output; a multiple of num_heads.
        num_heads, num_levels, num_points: heads, levels of a camera's pyramid, points per head and level. Each height has the
            same number of points.

    Source: Li et al., "BEVFormer", ECCV 2022; its module's parameter names.
    """

    _samples_cameras_in_turn = True  # viz.recording() gives the looks of one call one number

    def __init__(self, embed_dims: int = 256, num_heads: int = 8, num_levels: int = 4, num_points: int = 8) -> None:
        super().__init__(embed_dims, num_heads, num_levels, num_points, output=False)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        counts: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """Return the attended features.

        Args:
            query: [bs, num_queries, embed_dims], the positional embedding added.
            reference_points: [bs, num_queries, num_Z_anchors, 2] (x, y); 0..1 is the picture. num_Z_anchors divides
                num_points.
            value: [bs, num_keys, embed_dims], as `flatten_levels` makes it.
            spatial_shapes: [num_levels, 2], (H, W). int32 or int64.
            level_start_index: [num_levels]. int32 or int64.
            counts: number of queries of each picture, if these numbers differ. Then query and reference_points are
                [1, sum(counts), ...]: the queries of the first picture, then those of the second, and so on.

        Returns:
            [bs, num_queries, embed_dims]; with counts, a tuple with [1, count, embed_dims] for each picture.

        Raises:
            TypeError, ValueError: an input breaks a rule above; the sentence names the input and the rule.
        """
        sizes, axes = {"embed_dims": self.embed_dims, "num_levels": self.num_levels}, "bs, num_queries"
        if counts is not None:
            if not isinstance(counts, Sequence) or not all(isinstance(n, (numbers.Integral, SymInt)) for n in counts):
                fail(TypeError, "counts", "be a list of whole numbers", repr(counts)[:80])
            sizes["sum(counts)"], axes = sum(counts), "1, sum(counts)"
        sizes = check_shapes(
            sizes,
            value=(value, "bs, num_keys, embed_dims"),
            query=(query, f"{axes}, embed_dims"),
            reference_points=(reference_points, f"{axes}, num_Z_anchors, 2"),
            spatial_shapes=(spatial_shapes, "num_levels, 2"),
            level_start_index=(level_start_index, "num_levels"),
        )
        if counts is not None and (len(counts) != sizes["bs"] or any(n < 0 for n in counts)):
            fail(ValueError, "counts", f"hold a number from 0 on for each of {sizes['bs']} pictures", list(counts))
        _check_heights(sizes["num_Z_anchors"], self.num_points)
        _layers.check_layer_dtype(self.sampling_offsets, query=query)
        _layers.check_layer_dtype(self.value_proj, value=value)
        rows, maps = self._rows(value), (spatial_shapes, level_start_index)
        samples = (reference_points, *self._offsets_and_logits(query))
        if counts is None:
            return _attend(rows, *maps, *samples)
        pictures = zip(rows.split(1), *(t.split(list(counts), 1) for t in samples), strict=True)
        return tuple(_attend(rows, *maps, *picture) for rows, *picture in pictures)

    def _rows(self, value: Tensor) -> Tensor:
        return self.value_proj(_layers.cast_once(value, self.value_proj)).unflatten(2, (self.num_heads, -1))


class SpatialCrossAttention(nn.Module):
    """Each cell of a bird's-eye map (BEV) reads the cameras that see its pillar, and takes the mean of their features.

        feature_cam = deformable_attention(query + query_pos, pillar in cam, value of cam)       for cameras that see the pillar
        out         = query + dropout(output_proj(sum of feature_cam / number of these cameras))

    A camera sees a pillar if it sees a point of the pillar. A cell that no camera sees gets the projection of zero. Only the
    cells that a camera sees sample this camera, without padding. Each scene of a batch has its own cameras. BEVFormer's code
    uses the cells of the first scene for all scenes; for a single scene both agree.

    BEVFormer's checkpoints (`SpatialCrossAttention` around `MSDeformableAttention3D`) load as they are:
    `deformable_attention.sampling_offsets`, `deformable_attention.attention_weights`, `deformable_attention.value_proj`,
    `output_proj`, each with weight and bias. As in BEVFormer, this module applies dropout and adds the query.

    Args:
        embed_dims: channels of queries, values and output; a multiple of num_heads.
        num_heads, num_levels, num_points: as for `MSDeformableAttention3D`.
        dropout: in training, the dropout rate of the projected output.

    Gradients: of query, query_pos, value, reference_points and all parameters.

    The number of cells that a camera sees depends on the data. `torch.compile` therefore runs the loop over cameras without
    compiling it, between two graphs, and refuses the module with `fullgraph=True`. With export, tracing, the device meta, fake
    tensors, other subclasses, or a mask that torch.vmap maps over, all cells sample every camera, and features of
    unseen cells are dropped: the same result with more work.

    Source: Li et al., "BEVFormer", ECCV 2022; defaults of its configurations.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.SpatialCrossAttention(embed_dims=64, num_levels=1).eval()
    >>> value, shapes, starts = mx_driving.nn.flatten_levels([torch.rand(6, 64, 9, 16)])  # six cameras of one scene
    >>> query, pillars = torch.rand(1, 20, 64), torch.rand(1, 6, 20, 4, 2) * 4 - 2
    >>> mask = ((pillars > 0) & (pillars < 1)).all(-1)
    >>> tuple(attention(query, pillars, value[None], shapes, starts, mask).shape)
    (1, 20, 64)
    """

    _samples_cameras_in_turn = True

    def __init__(
        self, embed_dims: int = 256, num_heads: int = 8, num_levels: int = 4, num_points: int = 8, dropout: float = 0.1
    ) -> None:
        super().__init__()
        _layers.check_counts(embed_dims=embed_dims)
        _layers.check_dropout_rates(dropout=dropout)
        self.embed_dims = embed_dims
        self.deformable_attention = MSDeformableAttention3D(embed_dims, num_heads, num_levels, num_points)
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.dropout = nn.Dropout(dropout)
        _layers.initialise(nn.init.xavier_uniform_, self.output_proj)

    def reset_parameters(self) -> None:
        """Initialise as BEVFormer does."""
        self.deformable_attention.reset_parameters()
        _layers.initialise(nn.init.xavier_uniform_, self.output_proj)

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
        """Return the attended features.

        Args:
            query: [bs, num_queries, embed_dims], the cells of the map. It is added to the result.
            reference_points: [bs, cam, num_queries, num_Z_anchors, 2], (x, y) of each pillar's points in each camera; 0..1 is
                the picture. num_Z_anchors divides num_points. BEVFormer's tensor has the cameras first.
            value: [bs, cam, num_keys, embed_dims], the cameras' pyramids, each as `flatten_levels` makes it.
            spatial_shapes: [num_levels, 2], (H, W). int32 or int64.
            level_start_index: [num_levels]. int32 or int64.
            bev_mask: [bs, cam, num_queries, num_Z_anchors], bool; True means that the camera sees the point.
            query_pos: [bs, num_queries, embed_dims], the positional embedding, or None.

        Returns:
            [bs, num_queries, embed_dims].

        Raises:
            TypeError, ValueError: an input breaks a rule above; the sentence names the input and the rule.
        """
        inner = self.deformable_attention
        sizes = check_shapes(
            {"embed_dims": self.embed_dims, "num_levels": inner.num_levels},
            query=(query, "bs, num_queries, embed_dims"),
            query_pos=(query_pos, "bs, num_queries, embed_dims or None"),
            value=(value, "bs, cam, num_keys, embed_dims"),
            reference_points=(reference_points, "bs, cam, num_queries, num_Z_anchors, 2"),
            spatial_shapes=(spatial_shapes, "num_levels, 2"),
            level_start_index=(level_start_index, "num_levels"),
            bev_mask=(bev_mask, "bs, cam, num_queries, num_Z_anchors"),
        )
        _check_heights(sizes["num_Z_anchors"], inner.num_points)
        need_dtype("bev_mask", bev_mask, *_layers.BOOL)
        _layers.check_layer_dtype(inner.sampling_offsets, query=query)
        _layers.check_layer_dtype(inner.value_proj, value=value)
        positioned = _layers.add_embedding(inner.sampling_offsets, query, query_pos=query_pos)
        countable = type(bev_mask) is Tensor and not (_layers.is_exported() or query.is_meta or is_batched(bev_mask))
        mean_over_cameras = self._mean_over_cameras if countable else self._mean_of_all
        mean = mean_over_cameras(positioned, reference_points, value, spatial_shapes, level_start_index, bev_mask.any(-1))
        return _layers.project_and_add(mean, self.output_proj, self.dropout, query)

    def _mean_over_cameras(
        self, query: Tensor, reference_points: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, seen: Tensor
    ) -> Tensor:
        """Return the mean over the cameras that see a query, [bs, num_queries, embed_dims]. Sample no other cameras for it."""
        bs, cams, queries = seen.shape
        if bs * cams == 0:  # in _mean_of_all, the layers still get gradients, of zero
            return self._mean_of_all(query, reference_points, value, shapes, starts, seen)
        inner = self.deformable_attention
        pairs = seen.flatten().nonzero()[:, 0]  # indices in [bs, cam, num_queries]
        rows = pairs // (cams * queries) * queries + pairs % queries  # indices in [bs, num_queries]
        counts = seen.flatten(0, 1).sum(1).tolist()
        samples = 3 * inner.num_heads * inner.num_levels * inner.num_points
        together = max(1, _TOGETHER // max(1, samples * max(counts)))
        groups = [counts[i : i + together] for i in range(0, len(counts), together)]
        sizes = [sum(group) for group in groups]
        # Select the queries of all cameras at once: the backward of a selection fills a gradient as large as all queries.
        query = _layers.cast_once(query, inner.sampling_offsets, inner.attention_weights)
        positioned = query.flatten(0, 1).index_select(0, rows).split(sizes)
        pillars = reference_points.flatten(0, 2).index_select(0, pairs).split(sizes)
        pyramids = value.flatten(0, 1).split([len(group) for group in groups])
        places = iter(rows.split(counts))
        summed = query.new_zeros(0)
        for group, group_query, group_pillars, group_value in zip(groups, positioned, pillars, pyramids, strict=True):
            for features in inner(group_query[None], group_pillars[None], group_value, shapes, starts, group):
                summed = summed if summed.dim() == 2 else features.new_zeros(bs * queries, self.embed_dims)
                summed.index_add_(0, next(places), features[0])
        return summed.div_(seen.sum(1).clamp(min=1).view(-1, 1)).view(bs, queries, self.embed_dims)

    def _mean_of_all(
        self, query: Tensor, reference_points: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, seen: Tensor
    ) -> Tensor:
        """Return the same mean, but with sizes that do not depend on the data: all queries sample all cameras."""
        inner, cams = self.deformable_attention, seen.shape[1]
        rows, pillars = value.flatten(0, 1), reference_points.flatten(0, 1)
        # If `inner` is modified, call it as a whole, although its layers then compute the same offsets for each camera.
        plain = _layers.is_plain(inner, MSDeformableAttention3D)
        by_query = inner._offsets_and_logits(query) if plain else [query]
        in_each = [t[:, None].expand(-1, cams, *t.shape[1:]).flatten(0, 1) for t in by_query]
        if plain:
            features = _attend(inner._rows(rows), shapes, starts, pillars, *in_each)
        else:
            features = inner(*in_each, pillars, rows, shapes, starts)
        seen = seen[..., None]
        return features.view(*seen.shape[:3], self.embed_dims).where(seen, 0).sum(1) / seen.sum(1).clamp(min=1)

    skip_in_compile(_mean_over_cameras)
