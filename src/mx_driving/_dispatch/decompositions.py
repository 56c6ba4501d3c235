"""The operators for exporters: gathers and sums of standard torch operations, without loops over levels.

Rows are read with `index_select` alone, which every runtime does right: no `grid_sample`, no data-dependent shapes. Batch,
queries and map sizes stay free. The geometry is the reference's, and so are the numbers and the rule for samples that are
not on the map.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, _decomp

from .. import _composition, _geometry, reference
from .._operators import OPERATORS
from .._replacing import when_imported


def _weighted_rows(value: Tensor, parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Sum of coefficient * value[index - 1] over parts (index, coefficient) [..., samples] -> [..., c]; 0: the zero row."""
    value = torch.cat([value.new_zeros(1, value.shape[1]), value])
    total = None
    for index, coefficient in parts:
        rows = value.index_select(0, index.flatten()).unflatten(0, index.shape)
        part = (coefficient[..., None] * rows).sum(-2)
        total = part if total is None else total + part
    assert total is not None
    return total


def _by_head(corners: reference.Corners, weight: Tensor, num_keys: int) -> list[tuple[Tensor, Tensor]]:
    """Corners [bs, num_queries, num_heads, num_levels, num_points] as parts over value.flatten(0, 2), one for each corner."""
    return [
        (_row_of_head(corners.row[k], corners.inside[k], num_keys), (corners.coefficient(k) * weight).flatten(-2))
        for k in range(4)
    ]


def _row_of_head(row: Tensor, inside: Tensor, num_keys: int) -> Tensor:
    bs, _, heads = row.shape[:3]
    batch = torch.arange(bs, device=row.device).view(-1, 1, 1, 1, 1)
    head = torch.arange(heads, device=row.device).view(-1, 1, 1)
    return torch.where(inside, (batch * num_keys + row) * heads + head + 1, 0).flatten(-2)


def _columns(shapes: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """The index tables with (H, W) as first axis and an axis of 1 for points at the end."""
    return shapes.transpose(0, 1)[..., None], starts[:, None]


def multi_scale_deformable_attn(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    dtype = reference._compute_dtype(value, locations, weights)
    shape, start = _columns(shapes, starts)
    corners = reference._corners(*reference._pixels(locations.to(dtype), shape), shape, start, value.shape[1])
    weight = torch.where(corners.valid, weights.to(dtype), 0)
    out = _weighted_rows(value.to(dtype).flatten(0, 2), _by_head(corners, weight, value.shape[1]))
    return out.flatten(2).to(value.dtype)


def geometric_kernel_attention(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    dtype = reference._compute_dtype(value, locations, weights)
    row, inside = reference._nearest(locations, *_columns(shapes, starts), value.shape[1])
    parts = [(_row_of_head(row, inside, value.shape[1]), weights.to(dtype).flatten(-2))]
    return _weighted_rows(value.to(dtype).flatten(0, 2), parts).flatten(2).to(value.dtype)


def deformable_aggregation(feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor) -> Tensor:
    dtype = reference._compute_dtype(feature_maps, locations, weight)
    bs, num_feat, channels = feature_maps.shape
    groups = weight.shape[-1]
    location = locations.to(dtype)[..., None, :]  # [bs, anchor, pts, cam, 1, 2]
    seen = _geometry.inside(location)
    corners = reference._aggregation_corners(location, seen, shapes.movedim(-1, 0), starts, num_feat)
    weights = torch.where(seen[..., None], weight.to(dtype), 0)
    batch = torch.arange(bs, device=weight.device).view(-1, 1, 1, 1, 1)
    group = torch.arange(groups, device=weight.device)
    parts = []
    for k in range(4):
        row = (batch * num_feat + corners.row[k])[..., None] * groups + group + 1
        index = torch.where(corners.inside[k][..., None], row, 0)
        coefficient = corners.coefficient(k)[..., None] * weights
        parts.append(tuple(t.flatten(2, 4).transpose(2, 3) for t in (index, coefficient)))  # [bs, anchor, group, samples]
    v = feature_maps.to(dtype).unflatten(-1, (groups, channels // groups)).flatten(0, 2)
    return _weighted_rows(v, parts).flatten(2).to(feature_maps.dtype)


def bev_pool_v3(
    feat: Tensor, depth: Tensor, ranks_feat: Tensor, ranks_depth: Tensor, ranks_bev: Tensor, bs: int, d: int, h: int, w: int
) -> Tensor:
    dtype = reference._compute_dtype(feat, depth)
    coefficient = depth.to(dtype).index_select(0, ranks_depth)
    rows = coefficient[:, None] * feat.to(dtype).index_select(0, ranks_feat)
    sums = rows.new_zeros(bs * d * h * w, feat.shape[1]).index_put((ranks_bev.long(),), rows, accumulate=True)
    return sums.unflatten(0, (bs, d, h, w)).movedim(-1, 1).contiguous().to(feat.dtype)


def register(op: Any, name: str, fake: Callable[..., Any]) -> None:
    """Register how the operator is made of others. torch.onnx.export reads that; compilers do not.

    An operator with logits is made of the bare operator, for which an exporter may have a node.
    """
    bare = OPERATORS[name].bare
    composed = _composition.forward(name, lambda *inputs: getattr(torch.ops.mx_driving, bare)(*inputs)) if bare else None
    _decomp.decomposition_table[op] = composed or globals()[name]
    # A fake tensor of dynamic shape would go through the decomposition if the operator had no meta entry of its own.
    _decomp.meta_table[op] = fake
    when_imported("torch._inductor.lowering", lambda: _keep_whole(op))


def _keep_whole(op: Any) -> None:
    """Let inductor call the operator as it is. If CI is set in the environment, inductor refuses that for an operator with a
    decomposition, unless the operator is on this list."""
    from torch._inductor import lowering

    lowering.FALLBACK_ALLOW_LIST.add(op.name())
