"""The operators for exporters: gathers and sums of standard torch operations, without loops over levels.

`index_select` reads the rows, because every runtime computes it right. There is no `grid_sample`, and no shape depends on data.
Batch, queries and map sizes stay dynamic. Results equal the reference's. Some compilers compute comparisons of int64 wrongly,
so only floating numbers are compared; an index outside its table is clamped to a row of zeros instead.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import reference
from .._operator import composition, geometry
from .._operator.description import OPERATORS

# For every corner: the index of its row in padded value, and its coefficient.
Corners = list[tuple[Tensor, Tensor]]


def _pad_rows(value: Tensor) -> Tensor:
    """Add a row of zeros before the first row and behind the last row of every batch entry, along axis 1."""
    zeros = value.new_zeros(value.shape[0], 1, *value.shape[2:])
    return torch.cat([zeros, value, zeros], 1)


def _padded_row(row: Tensor, num_keys: int) -> Tensor:
    """Return the index of a row in `_pad_rows(value)`; for a row outside value, the index of a row of zeros."""
    return row.clamp(min=-1).clamp(max=num_keys) + 1


def _corners(x: Tensor, y: Tensor, shape: Tensor, start: Tensor, num_keys: int) -> tuple[Tensor, Corners]:
    """Return a mask of valid samples, and the four corners of every sample."""
    width, height = shape[1].to(x.dtype), shape[0].to(x.dtype)
    valid = (x > -1) & (y > -1) & (x < width) & (y < height)
    x, y = torch.where(valid, x, 0), torch.where(valid, y, 0)
    column, line = x.detach().floor(), y.detach().floor()
    row = start.long() + line.long() * shape[1].long() + column.long()
    corners = []
    for below, vertical, on_line in ((0, 1 - (y - line), line >= 0), (shape[1].long(), y - line, line + 1 < height)):
        for right, horizontal, on_column in ((0, 1 - (x - column), column >= 0), (1, x - column, column + 1 < width)):
            on_map = torch.where(valid & on_line & on_column, row + below + right, -1)
            corners.append((_padded_row(on_map, num_keys), horizontal * vertical))
    return valid, corners


def _weighted_rows(value: Tensor, corners: Corners) -> Tensor:
    """Return the sum of coefficient * value[index] over corners (index, coefficient) [..., samples], as [..., c]."""
    parts = [
        (coefficient[..., None] * value.index_select(0, index.flatten()).unflatten(0, index.shape)).sum(-2)
        for index, coefficient in corners
    ]
    return sum(parts[1:], parts[0])


def _sum_by_head(value: Tensor, corners: Corners, weights: Tensor) -> Tensor:
    """Sum value [bs, num_keys, num_heads, c] over corners [bs, num_queries, num_heads, num_levels, num_points]."""
    bs, heads = value.shape[0], value.shape[2]
    batch = torch.arange(bs, device=value.device).view(-1, 1, 1, 1, 1)
    head = torch.arange(heads, device=value.device).view(-1, 1, 1)
    rows = value.shape[1] + 2
    head_corners = [
        (((batch * rows + row) * heads + head).flatten(-2), (coefficient * weights).flatten(-2)) for row, coefficient in corners
    ]
    return _weighted_rows(_pad_rows(value).flatten(0, 2), head_corners).flatten(2)


def multi_scale_deformable_attn(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    dtype = composition.compute_dtype(value, locations, weights)
    shape, start = shapes.transpose(0, 1)[..., None], starts[:, None]  # these broadcast over [num_levels, num_points]
    valid, corners = _corners(*reference._pixels(locations.to(dtype), shape), shape, start, value.shape[1])
    return _sum_by_head(value.to(dtype), corners, torch.where(valid, weights.to(dtype), 0)).to(value.dtype)


def geometric_kernel_attention(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    dtype = composition.compute_dtype(value, locations, weights)
    (height, width), start = shapes.long().transpose(0, 1)[..., None], starts.long()[:, None]
    x, y = reference._truncated(locations).unbind(-1)
    row = start + torch.minimum(y, height - 1).clamp(min=0) * width + torch.minimum(x, width - 1).clamp(min=0)
    exists = height.clamp(0, 1) * width.clamp(0, 1)  # 1 for a map that has pixels, else 0
    corner = (_padded_row(row, value.shape[1]) * exists, torch.ones((), dtype=dtype, device=value.device))
    return _sum_by_head(value.to(dtype), [corner], weights.to(dtype)).to(value.dtype)


def deformable_aggregation(feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor) -> Tensor:
    dtype = composition.compute_dtype(feature_maps, locations, weight)
    bs, num_feat, channels = feature_maps.shape
    groups = weight.shape[-1]
    location = locations.to(dtype)[..., None, :]  # [bs, anchor, pts, cam, 1, 2]
    seen = geometry.inside(location)
    shape = shapes.movedim(-1, 0)
    x, y = (torch.where(seen, pixel, float("nan")) for pixel in reference._pixels(location, shape))
    _, corners = _corners(x, y, shape, starts, num_feat)
    weights = torch.where(seen[..., None], weight.to(dtype), 0)
    batch = torch.arange(bs, device=weight.device).view(-1, 1, 1, 1, 1)
    group = torch.arange(groups, device=weight.device)
    group_corners = []
    for row, coefficient in corners:
        index = (batch * (num_feat + 2) + row)[..., None] * groups + group
        both = (index, coefficient[..., None] * weights)
        group_corners.append(tuple(t.flatten(2, 4).transpose(2, 3) for t in both))  # [bs, anchor, group, samples]
    rows = _pad_rows(feature_maps.to(dtype)).unflatten(-1, (groups, channels // groups)).flatten(0, 2)
    return _weighted_rows(rows, group_corners).flatten(2).to(feature_maps.dtype)


def bev_pool_v3(
    feat: Tensor, depth: Tensor, ranks_feat: Tensor, ranks_depth: Tensor, ranks_bev: Tensor, bs: int, d: int, h: int, w: int
) -> Tensor:
    """Add points that have an invalid rank to an extra cell, and drop this cell. A depth of 0 would not do: 0 x NaN is NaN."""
    dtype, cells = composition.compute_dtype(feat, depth), bs * d * h * w
    feat_row, no_feat = geometry.clamp_index(ranks_feat, feat.shape[0])
    depth_row, no_depth = geometry.clamp_index(ranks_depth, depth.shape[0])
    cell, no_cell = geometry.clamp_index(ranks_bev, cells)
    cell = cell + (no_feat + no_depth + no_cell).clamp(max=1) * (cells - cell)
    coefficient = torch.cat([depth.to(dtype), depth.new_zeros(1, dtype=dtype)]).index_select(0, depth_row)
    features = torch.cat([feat.to(dtype), feat.new_zeros(1, feat.shape[1], dtype=dtype)]).index_select(0, feat_row)
    rows = coefficient[:, None] * features
    sums = rows.new_zeros(cells + 1, feat.shape[1]).index_put((cell,), rows, accumulate=True)[:cells]
    return sums.unflatten(0, (bs, d, h, w)).movedim(-1, 1).contiguous().to(feat.dtype)


def find(name: str) -> Callable[..., Tensor]:
    """Return the decomposition of an operator. For an operator with logits, the decomposition calls the bare operator, which
    may have an ONNX node."""
    bare = OPERATORS[name].bare
    composed = composition.forward(name, lambda *inputs: getattr(torch.ops.mx_driving, bare)(*inputs)) if bare else None
    return composed or globals()[name]
