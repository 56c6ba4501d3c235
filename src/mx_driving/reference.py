"""The specification in plain torch: any device, any floating dtype, differentiable twice. Nobody optimises it.

Arithmetic is in float64 if a floating input is float64, else in float32. Index tables are never trusted: a row outside
`num_keys` reads as zero and receives no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._operator import composition, geometry

__all__ = [
    "Corners",
    "bev_pool_v3",
    "bev_pool_v3_backward",
    "deformable_aggregation",
    "deformable_aggregation_backward",
    "deformable_aggregation_with_logits",
    "deformable_aggregation_with_logits_backward",
    "geometric_kernel_attention",
    "geometric_kernel_attention_backward",
    "geometric_kernel_attention_with_logits",
    "geometric_kernel_attention_with_logits_backward",
    "multi_scale_deformable_attn",
    "multi_scale_deformable_attn_backward",
    "multi_scale_deformable_attn_with_logits",
    "multi_scale_deformable_attn_with_logits_backward",
]

_LARGE = 2.0**62  # larger than any map, and exact in int64 and in floats


class Corners(NamedTuple):
    """The corners of samples on a map. Corner k is on the right if k & 1, and below if k & 2."""

    valid: Tensor
    inside: list[Tensor]  # whether corner k lies on the map, and value has its row
    row: list[Tensor]  # row of value at corner k; 0 where inside[k] is False
    right: Tensor  # fraction of a pixel between corner 0 and the sample in x
    below: Tensor  # fraction of a pixel between corner 0 and the sample in y

    def coefficient(self, k: int) -> Tensor:
        return (self.right if k & 1 else 1 - self.right) * (self.below if k & 2 else 1 - self.below)


def _corners(x: Tensor, y: Tensor, shape: Tensor, start: Tensor, num_keys: int) -> Corners:
    height, width = shape[0].long(), shape[1].long()
    valid = (x > -1) & (y > -1) & (x < width) & (y < height)
    x, y = torch.where(valid, x, 0), torch.where(valid, y, 0)
    column, line = x.detach().floor(), y.detach().floor()
    inside, row = [], []
    for k in range(4):
        xk, yk = column.long() + (k & 1), line.long() + (k >> 1)
        on_map = valid & (xk >= 0) & (xk < width) & (yk >= 0) & (yk < height)
        r = start.long() + yk * width + xk
        inside.append(on_map & (r >= 0) & (r < num_keys))
        row.append(torch.where(inside[k], r, 0))
    return Corners(valid, inside, row, x - column, y - line)


def _rows(value: Tensor, row: Tensor, inside: Tensor) -> Tensor:
    """Gather rows of value [n, num_keys, c]. `row` and `inside` are [n, ...]. Return [n, ..., c]: 0 where inside is False."""
    flat = row.flatten(1)
    rows = value.gather(1, flat[..., None].expand(-1, -1, value.shape[-1]))
    return torch.where(inside[..., None], rows.unflatten(1, row.shape[1:]), 0)


def _add_rows(value: Tensor, row: Tensor, inside: Tensor, terms: Tensor) -> Tensor:
    """Return value [n, num_keys, c] with terms [n, ..., c] added to the rows `row`. Ignore terms where `inside` is False."""
    n, num_keys, c = value.shape
    offset = torch.arange(n, device=row.device).view(-1, *[1] * (row.dim() - 1)) * num_keys
    terms = torch.where(inside[..., None], terms, 0)
    return value.flatten(0, 1).index_add(0, (row + offset).flatten(), terms.flatten(0, -2)).view(n, num_keys, c)


def _by_head(t: Tensor) -> Tensor:
    """Convert [bs, rows, heads, ...] to [bs * heads, rows, ...]."""
    return t.transpose(1, 2).flatten(0, 1)


def _levels(shapes: Tensor, starts: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(shapes.unbind(0), starts.unbind(0), strict=True))


def _sampled(corners: Corners, value: Tensor) -> Tensor:
    return sum(corners.coefficient(k)[..., None] * _rows(value, corners.row[k], corners.inside[k]) for k in range(4))  # pyright: ignore


def _products(corners: Corners, value: Tensor, g: Tensor) -> list[Tensor]:
    """Return the products of g with the rows of the four corners, [..., c]."""
    return [torch.where(corners.inside[k][..., None], _rows(value, corners.row[k], corners.inside[k]) * g, 0) for k in range(4)]


def _slopes(corners: Corners, dots: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the dot products of g with the sample and with its slopes in x and y. `dots`: dot products of g with the
    corners."""
    sample = sum(corners.coefficient(k) * dots[k] for k in range(4))
    dx = (1 - corners.below) * (dots[1] - dots[0]) + corners.below * (dots[3] - dots[2])
    dy = (1 - corners.right) * (dots[2] - dots[0]) + corners.right * (dots[3] - dots[1])
    return sample, dx, dy  # pyright: ignore


def _pixels(location: Tensor, shape: Tensor) -> tuple[Tensor, Tensor]:
    """Convert normalised (x, y) to pixels. The centre of the first pixel is 0."""
    return location[..., 0] * shape[1] - 0.5, location[..., 1] * shape[0] - 0.5


def multi_scale_deformable_attn(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    dtype = composition.compute_dtype(value, locations, weights)
    bs, num_keys, heads, channels = value.shape
    v, locations, weights = (_by_head(t.to(dtype)) for t in (value, locations, weights))
    out = v.new_zeros(bs * heads, locations.shape[1], channels)
    for l, (shape, start) in enumerate(_levels(shapes, starts) if num_keys else []):
        corners = _corners(*_pixels(locations[:, :, l], shape), shape, start, num_keys)
        weight = torch.where(corners.valid, weights[:, :, l], 0)
        out = out + (weight[..., None] * _sampled(corners, v)).sum(2)
    return out.unflatten(0, (bs, heads)).transpose(1, 2).flatten(2).to(value.dtype)


def multi_scale_deformable_attn_backward(
    grad_output: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = composition.compute_dtype(value, locations, weights)
    bs, num_keys, heads, channels = value.shape
    v, location, weight = (_by_head(t.to(dtype)) for t in (value, locations, weights))
    g = _by_head(grad_output.to(dtype).unflatten(2, (heads, channels)))[:, :, None]
    grad_v = torch.zeros_like(v)
    grad_location, grad_weight = [], []
    for l, (shape, start) in enumerate(_levels(shapes, starts) if num_keys else []):
        corners = _corners(*_pixels(location[:, :, l], shape), shape, start, num_keys)
        w = torch.where(corners.valid, weight[:, :, l], 0)
        for k in range(4 if output_mask[0] else 0):
            grad_v = _add_rows(grad_v, corners.row[k], corners.inside[k], (corners.coefficient(k) * w)[..., None] * g)
        sample, dx, dy = _slopes(corners, [products.sum(-1) for products in _products(corners, v, g)])
        grad_weight.append(sample)
        slopes = torch.stack([shape[1] * w * dx, shape[0] * w * dy], -1)
        grad_location.append(torch.where(corners.valid[..., None], slopes, 0))
    grad_locations = torch.stack(grad_location, 2) if grad_location else torch.zeros_like(location)
    grad_weights = torch.stack(grad_weight, 2) if grad_weight else torch.zeros_like(weight)
    gradients = (_unhead(t, bs) for t in (grad_v, grad_locations, grad_weights))
    return composition.like_inputs(gradients, (value, locations, weights), output_mask)  # pyright: ignore


def _unhead(t: Tensor, bs: int) -> Tensor:
    return t.unflatten(0, (bs, -1) if bs else (0, t.shape[1])).transpose(1, 2) if t.shape[0] else t


def _truncated(location: Tensor) -> Tensor:
    """Truncate locations to int64; negative locations become 0. int64, because no floating dtype holds every map size."""
    if location.dtype.is_floating_point:
        location = location.to(composition.compute_dtype(location))
        location = torch.where(location > 0, location, 0)  # NaN becomes 0
        location = torch.where(location < _LARGE, location, _LARGE)
    return location.long()


def _nearest(location: Tensor, shape: Tensor, start: Tensor, num_keys: int) -> tuple[Tensor, Tensor]:
    """Truncate locations and clamp them to the map. Return their rows of value, and a mask of rows that exist."""
    height, width = shape[0].long(), shape[1].long()
    x, y = _truncated(location).unbind(-1)
    x, y = torch.minimum(x, width - 1).clamp(min=0), torch.minimum(y, height - 1).clamp(min=0)
    row = start.long() + y * width + x
    inside = (row >= 0) & (row < num_keys) & (height > 0) & (width > 0)
    return torch.where(inside, row, 0), inside


def geometric_kernel_attention(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    dtype = composition.compute_dtype(value, locations, weights)
    bs, num_keys, heads, channels = value.shape
    v, weight, location = _by_head(value.to(dtype)), _by_head(weights.to(dtype)), _by_head(locations)
    out = v.new_zeros(bs * heads, locations.shape[1], channels)
    for l, (shape, start) in enumerate(_levels(shapes, starts) if num_keys else []):
        row, inside = _nearest(location[:, :, l], shape, start, num_keys)
        out = out + (weight[:, :, l][..., None] * _rows(v, row, inside)).sum(2)
    return out.unflatten(0, (bs, heads)).transpose(1, 2).flatten(2).to(value.dtype)


def geometric_kernel_attention_backward(
    grad_output: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weights: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    dtype = composition.compute_dtype(value, locations, weights)
    bs, num_keys, heads, channels = value.shape
    v, weight, location = _by_head(value.to(dtype)), _by_head(weights.to(dtype)), _by_head(locations)
    g = _by_head(grad_output.to(dtype).unflatten(2, (heads, channels)))[:, :, None]
    grad_v, grad_weight = torch.zeros_like(v), []
    for l, (shape, start) in enumerate(_levels(shapes, starts) if num_keys else []):
        row, inside = _nearest(location[:, :, l], shape, start, num_keys)
        if output_mask[0]:
            grad_v = _add_rows(grad_v, row, inside, weight[:, :, l][..., None] * g)
        grad_weight.append((_rows(v, row, inside) * g).sum(-1))
    grad_weights = torch.stack(grad_weight, 2) if grad_weight else torch.zeros_like(weight)
    gradients = (_unhead(t, bs) for t in (grad_v, grad_weights))
    return composition.like_inputs(gradients, (value, weights), output_mask)  # pyright: ignore


def deformable_aggregation(feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor) -> Tensor:
    dtype = composition.compute_dtype(feature_maps, locations, weight)
    bs, num_feat, channels = feature_maps.shape
    v, location, weights = feature_maps.to(dtype), locations.to(dtype), weight.to(dtype)
    groups = weight.shape[-1]
    out = v.new_zeros(bs, locations.shape[1], channels)
    for cam in range(starts.shape[0] if num_feat and channels else 0):
        seen = geometry.inside(location[:, :, :, cam])
        for scale in range(starts.shape[1]):
            corners = _aggregation_corners(location[:, :, :, cam], seen, shapes[cam, scale], starts[cam, scale], num_feat)
            w = torch.where(seen[..., None], weights[:, :, :, cam, scale], 0)
            sampled = _sampled(corners, v).unflatten(-1, (groups, -1))
            out = out + (w[..., None] * sampled).flatten(-2).sum(2)
    return out.to(feature_maps.dtype)


def _aggregation_corners(location: Tensor, seen: Tensor, shape: Tensor, start: Tensor, num_feat: int) -> Corners:
    x, y = _pixels(location, shape)
    outside = torch.full_like(x, float("nan"))
    return _corners(torch.where(seen, x, outside), torch.where(seen, y, outside), shape, start, num_feat)


def deformable_aggregation_backward(
    grad_output: Tensor,
    feature_maps: Tensor,
    shapes: Tensor,
    starts: Tensor,
    locations: Tensor,
    weight: Tensor,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = composition.compute_dtype(feature_maps, locations, weight)
    _, num_feat, channels = feature_maps.shape
    v, location, weights = feature_maps.to(dtype), locations.to(dtype), weight.to(dtype)
    groups = weight.shape[-1]
    g = grad_output.to(dtype)[:, :, None]
    grad_v = torch.zeros_like(v)
    grad_location, grad_weight = list(torch.zeros_like(location).unbind(3)), []
    for cam in range(starts.shape[0] if num_feat and channels else 0):
        seen = geometry.inside(location[:, :, :, cam])
        for scale in range(starts.shape[1]):
            shape = shapes[cam, scale]
            corners = _aggregation_corners(location[:, :, :, cam], seen, shape, starts[cam, scale], num_feat)
            w = torch.where(seen[..., None], weights[:, :, :, cam, scale], 0)
            by_channel = w.repeat_interleave(channels // groups, -1)
            for k in range(4 if output_mask[0] else 0):
                terms = corners.coefficient(k)[..., None] * by_channel * g
                grad_v = _add_rows(grad_v, corners.row[k], corners.inside[k], terms)
            dots = [products.unflatten(-1, (groups, -1)).sum(-1) for products in _products(corners, v, g)]
            wide = Corners(*corners[:3], corners.right[..., None], corners.below[..., None])
            sample, dx, dy = _slopes(wide, dots)
            grad_weight.append(sample)
            slopes = torch.stack([(shape[1] * w * dx).sum(-1), (shape[0] * w * dy).sum(-1)], -1)
            grad_location[cam] = grad_location[cam] + torch.where(seen[..., None], slopes, 0)
    grad_locations = torch.stack(grad_location, 3) if grad_location else torch.zeros_like(location)
    stacked = torch.stack(grad_weight, 3).unflatten(3, tuple(starts.shape)) if grad_weight else torch.zeros_like(weights)
    gradients = (grad_v, grad_locations, stacked)
    return composition.like_inputs(gradients, (feature_maps, locations, weight), output_mask)  # pyright: ignore


def _over(name: str, bare: Callable[..., Tensor], bare_backward: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
    return composition.forward(name, bare), composition.backward(name, bare_backward)


multi_scale_deformable_attn_with_logits, multi_scale_deformable_attn_with_logits_backward = _over(
    "multi_scale_deformable_attn_with_logits", multi_scale_deformable_attn, multi_scale_deformable_attn_backward
)
geometric_kernel_attention_with_logits, geometric_kernel_attention_with_logits_backward = _over(
    "geometric_kernel_attention_with_logits", geometric_kernel_attention, geometric_kernel_attention_backward
)
deformable_aggregation_with_logits, deformable_aggregation_with_logits_backward = _over(
    "deformable_aggregation_with_logits", deformable_aggregation, deformable_aggregation_backward
)


def bev_pool_v3(
    feat: Tensor, depth: Tensor, ranks_feat: Tensor, ranks_depth: Tensor, ranks_bev: Tensor, bs: int, d: int, h: int, w: int
) -> Tensor:
    """Return the output: output[b, :, d, h, w] is the sum of depth * feat over the points of the cell (b, d, h, w)."""
    dtype, cells = composition.compute_dtype(feat, depth), bs * d * h * w
    sums = torch.zeros(cells, feat.shape[1], dtype=dtype, device=feat.device)
    if feat.shape[0] and depth.shape[0] and cells:
        ranks = ranks_feat, ranks_depth, ranks_bev
        (feat_row, depth_row, cell), there = _ranks(ranks, (feat.shape[0], depth.shape[0], cells))
        rows = depth.to(dtype)[depth_row, None] * feat.to(dtype)[feat_row]
        sums = sums.index_add(0, cell, torch.where(there[:, None], rows, 0))
    return sums.view(bs, d, h, w, feat.shape[1]).movedim(-1, 1).contiguous().to(feat.dtype)


def bev_pool_v3_backward(
    grad_output: Tensor,
    feat: Tensor,
    depth: Tensor,
    ranks_feat: Tensor,
    ranks_depth: Tensor,
    ranks_bev: Tensor,
    bs: int,
    d: int,
    h: int,
    w: int,
    output_mask: list[bool],
) -> tuple[Tensor, Tensor]:
    """Return the gradients of feat and depth."""
    dtype, cells = composition.compute_dtype(feat, depth), bs * d * h * w
    grad_feat, grad_depth = (
        t.new_zeros(t.shape if needed else 0, dtype=dtype) for t, needed in zip((feat, depth), output_mask, strict=True)
    )
    if feat.shape[0] and depth.shape[0] and cells:
        ranks = ranks_feat, ranks_depth, ranks_bev
        (feat_row, depth_row, cell), there = _ranks(ranks, (feat.shape[0], depth.shape[0], cells))
        grad = grad_output.to(dtype).movedim(1, -1).flatten(0, 3)[cell]
        if output_mask[0]:
            rows = depth.to(dtype)[depth_row, None] * grad
            grad_feat = grad_feat.index_add(0, feat_row, torch.where(there[:, None], rows, 0))
        if output_mask[1]:
            products = (grad * feat.to(dtype)[feat_row]).sum(-1)
            grad_depth = grad_depth.index_add(0, depth_row, torch.where(there, products, 0))
    return grad_feat.to(feat.dtype), grad_depth.to(depth.dtype)


def _ranks(ranks: tuple[Tensor, ...], rows: tuple[int, ...]) -> tuple[list[Tensor], Tensor]:
    """Return the ranks of all points, and a mask of points whose three ranks exist. Ranks of other points are 0."""
    wide = [t.long() for t in ranks]
    there = torch.stack([(t >= 0) & (t < count) for t, count in zip(wide, rows, strict=True)]).all(0)
    return [torch.where(there, t, 0) for t in wide], there
