"""float64 truth in numpy, written from the operators' equations and from nothing else in this repository.

Each function returns the output and the gradients, and a scale for each: the same sum of the absolute values of its terms.
Rounding errors are measured in scales.
"""

from typing import NamedTuple

import numpy as np
import torch


class Truth(NamedTuple):
    results: list[np.ndarray]  # output, then the gradients in the order of the inputs that have one
    scales: list[np.ndarray]


def _bilinear(height, width, x, y):
    """Return whether samples x, y [...] are valid, and (on the map, row, share, d share / dx, d share / dy) of each corner."""
    with np.errstate(invalid="ignore"):
        valid = (x > -1) & (y > -1) & (x < width) & (y < height)
    x, y = np.where(valid, x, 0.0), np.where(valid, y, 0.0)
    x0, y0 = np.floor(x), np.floor(y)
    lw, lh = x - x0, y - y0
    corners = []
    for dy in (0, 1):
        for dx in (0, 1):
            cx, cy = (x0 + dx).astype(np.int64), (y0 + dy).astype(np.int64)
            on_map = valid & (cx >= 0) & (cx < width) & (cy >= 0) & (cy < height)
            sx, sy = (lw if dx else 1 - lw), (lh if dy else 1 - lh)
            row = np.where(on_map, cy * width + cx, 0)
            corners.append((on_map, row, sx * sy, (1 if dx else -1) * sy, (1 if dy else -1) * sx))
    return valid, corners


def _sample(value, start, corners, grad, groups=1):
    """Return samples [..., c] and dot products by group [3, ..., groups]: of grad [..., c] with samples, and with their slopes
    along x and y. Return the scales of both, too."""
    total = total_scale = dots = dots_scale = 0.0
    for on_map, row, *shares in corners:
        rows = np.where(on_map[..., None], value[start + row], 0.0)
        products = (grad * rows).reshape(*row.shape, groups, rows.shape[-1] // groups)
        share, shares = shares[0][..., None], np.stack(shares)[..., None]
        total = total + share * rows
        total_scale = total_scale + share * np.abs(rows)
        dots = dots + shares * products.sum(-1)
        dots_scale = dots_scale + np.abs(shares) * np.abs(products).sum(-1)
    return total, total_scale, dots, dots_scale


def _add_rows(gradient, scale, row, terms):
    """Add terms [..., c] to rows of a gradient, and their absolute values to its scale."""
    rows, terms = torch.from_numpy(row.reshape(-1)), torch.from_numpy(terms.reshape(-1, terms.shape[-1]))
    torch.from_numpy(gradient).index_add_(0, rows, terms)
    torch.from_numpy(scale).index_add_(0, rows, terms.abs())


def _flat(results, scales) -> Truth:
    """Put heads and channels of the output on one axis, and keys of the gradient of value before heads."""
    bs, queries, heads, channels = results[0].shape
    flat = bs, queries, heads * channels
    return Truth(*([out.reshape(flat), np.ascontiguousarray(gv.swapaxes(1, 2)), *rest] for out, gv, *rest in (results, scales)))


def multi_scale_deformable_attn(value, shapes, starts, locations, weights, grad) -> Truth:
    bs, _, heads, channels = value.shape
    queries = locations.shape[1]
    out = np.zeros((bs, queries, heads, channels))
    g = grad.reshape(bs, queries, heads, channels)
    gv, gl, gw = np.zeros_like(value.swapaxes(1, 2), order="C"), np.zeros(locations.shape), np.zeros(weights.shape)
    scales = [np.zeros(a.shape) for a in (out, gv, gl, gw)]
    for b, h, l in np.ndindex(bs, heads, len(starts)):
        (height, width), start = shapes[l], starts[l]
        x = locations[b, :, h, l, :, 0] * width - 0.5
        y = locations[b, :, h, l, :, 1] * height - 0.5
        valid, corners = _bilinear(height, width, x, y)
        w = np.where(valid, weights[b, :, h, l], 0.0)
        gq = np.where(valid[..., None], g[b, :, h][:, None], 0.0)
        bil, bil_scale, (of_weight, *slopes), (of_weight_scale, *slope_scales) = _sample(value[b, :, h], start, corners, gq)
        out[b, :, h] += (w[..., None] * bil).sum(1)
        scales[0][b, :, h] += np.abs(w[..., None] * bil_scale).sum(1)
        for on_map, row, share, _, _ in corners:
            terms = np.where(on_map[..., None], (share * w)[..., None] * gq, 0.0)
            _add_rows(gv[b, h], scales[1][b, h], start + row, terms)
        gw[b, :, h, l], scales[3][b, :, h, l] = of_weight[..., 0], of_weight_scale[..., 0]
        for axis, size in ((0, width), (1, height)):
            gl[b, :, h, l, :, axis] = size * w * slopes[axis][..., 0]
            scales[2][b, :, h, l, :, axis] = np.abs(size * w) * slope_scales[axis][..., 0]
    return _flat([out, gv, gl, gw], scales)


def deformable_aggregation(features, shapes, starts, locations, weight, grad) -> Truth:
    bs, _, channels = features.shape
    _, anchors, _, cams, maps, groups = weight.shape
    out = np.zeros((bs, anchors, channels))
    gf, gl, gw = np.zeros(features.shape), np.zeros(locations.shape), np.zeros(weight.shape)
    scales = [np.zeros(a.shape) for a in (out, gf, gl, gw)]
    for b, cam, s in np.ndindex(bs, cams, maps):
        (height, width), start = shapes[cam, s], starts[cam, s]
        u, v = locations[b, :, :, cam, 0], locations[b, :, :, cam, 1]
        with np.errstate(invalid="ignore"):
            seen = (u > 0) & (u < 1) & (v > 0) & (v < 1)
        nan = np.nan
        _, corners = _bilinear(height, width, np.where(seen, u * width - 0.5, nan), np.where(seen, v * height - 0.5, nan))
        w = np.where(seen[..., None], weight[b, :, :, cam, s], 0.0)
        wide = np.repeat(w, channels // groups, -1)  # [anchors, points, channels]
        gq = np.where(seen[..., None], grad[b][:, None], 0.0)
        found = _sample(features[b], start, corners, gq, groups)
        bil, bil_scale, (of_weight, *slopes), (of_weight_scale, *slope_scales) = found
        out[b] += (wide * bil).sum(1)
        scales[0][b] += np.abs(wide * bil_scale).sum(1)
        for on_map, row, share, _, _ in corners:
            _add_rows(gf[b], scales[1][b], start + row, np.where(on_map[..., None], share[..., None] * wide * gq, 0.0))
        gw[b, :, :, cam, s], scales[3][b, :, :, cam, s] = of_weight, of_weight_scale
        for axis, extent in ((0, width), (1, height)):
            gl[b, :, :, cam, axis] += extent * (w * slopes[axis]).sum(-1)
            scales[2][b, :, :, cam, axis] += extent * np.abs(w * slope_scales[axis]).sum(-1)
    return Truth([out, gf, gl, gw], scales)


def _nearest(x, size):
    x = np.where(np.isnan(x), 0.0, x)
    return np.trunc(np.clip(x, 0, size - 1)).astype(np.int64)


def geometric_kernel_attention(value, shapes, starts, locations, weights, grad) -> Truth:
    bs, _, heads, channels = value.shape
    queries = locations.shape[1]
    out = np.zeros((bs, queries, heads, channels))
    g = grad.reshape(out.shape)
    gv, gw = np.zeros_like(value.swapaxes(1, 2), order="C"), np.zeros(weights.shape)
    scales = [np.zeros(a.shape) for a in (out, gv, gw)]
    for b, h, l in np.ndindex(bs, heads, len(starts)):
        (height, width), start = shapes[l], starts[l]
        xy = locations[b, :, h, l]
        row = start + _nearest(xy[..., 1], height) * width + _nearest(xy[..., 0], width)
        w, rows, gq = weights[b, :, h, l][..., None], value[b, :, h][row], g[b, :, h][:, None]
        out[b, :, h] += (w * rows).sum(1)
        scales[0][b, :, h] += np.abs(w * rows).sum(1)
        _add_rows(gv[b, h], scales[1][b, h], row, w * gq)
        gw[b, :, h, l] = (gq * rows).sum(-1)
        scales[2][b, :, h, l] = np.abs(gq * rows).sum(-1)
    return _flat([out, gv, gw], scales)


def _softmax(logits):
    shares = np.exp(logits - logits.max(-1, keepdims=True))
    return shares / shares.sum(-1, keepdims=True)


def _of_logits(weights, of_weights, scale):
    """Return the gradient of logits [..., samples], and its scale."""
    mean = (weights * of_weights).sum(-1, keepdims=True)
    return weights * (of_weights - mean), weights * (scale + (weights * scale).sum(-1, keepdims=True))


def multi_scale_deformable_attn_with_logits(value, shapes, starts, reference, offsets, logits, axis, grad) -> Truth:
    bs, queries, heads, levels, points, _ = offsets.shape
    count = reference.shape[2]
    sizes = np.array([[w, h] for h, w in shapes], dtype=np.float64)
    per_sample = [(l, p, (l if count > 1 else 0) if axis == "level" else p % count) for l, p in np.ndindex(levels, points)]
    box = reference.shape[3] == 4
    locations, step = np.zeros(offsets.shape), np.zeros(offsets.shape)  # step: what a unit of offset moves a location by
    for l, p, r in per_sample:
        step[:, :, :, l, p] = reference[:, :, None, r, 2:] / (2 * points) if box else 1 / sizes[l]
        locations[:, :, :, l, p] = reference[:, :, None, r, :2] + offsets[:, :, :, l, p] * step[:, :, :, l, p]
    weights = _softmax(logits.reshape(bs, queries, heads, levels * points)).reshape(offsets.shape[:5])
    (out, gv, gl, gw), scales = multi_scale_deformable_attn(value, shapes, starts, locations, weights, grad)
    gr, gr_scale = np.zeros(reference.shape), np.zeros(reference.shape)
    for l, p, r in per_sample:
        for found, of_location, offset in ((gr, gl, offsets), (gr_scale, scales[2], np.abs(offsets))):
            found[:, :, r, :2] += of_location[:, :, :, l, p].sum(2)
            if box:
                found[:, :, r, 2:] += (of_location[:, :, :, l, p] * offset[:, :, :, l, p]).sum(2) / (2 * points)
    flat = (bs, queries, heads, levels * points)
    of_logits, logits_scale = _of_logits(*(a.reshape(flat) for a in (weights, gw, scales[3])))
    results = [out, gv, gr, gl * step, of_logits.reshape(logits.shape)]
    return Truth(results, [*scales[:2], gr_scale, scales[2] * step, logits_scale.reshape(logits.shape)])


def geometric_kernel_attention_with_logits(value, shapes, starts, reference, window, logits, grad) -> Truth:
    bs, queries, heads, _ = reference.shape
    levels, points = len(starts), len(window)
    pixels = np.zeros((bs, queries, heads, levels, points, 2))
    for l, (height, width) in enumerate(shapes):
        pixels[:, :, :, l] = np.rint(reference[:, :, :, None] * np.array([width, height]) + window)  # half to even
    weights = _softmax(logits.reshape(bs, queries, heads, levels * points))
    (out, gv, gw), scales = geometric_kernel_attention(value, shapes, starts, pixels, weights.reshape(pixels.shape[:5]), grad)
    of_logits, logits_scale = _of_logits(weights, gw.reshape(weights.shape), scales[2].reshape(weights.shape))
    return Truth([out, gv, of_logits.reshape(logits.shape)], [*scales[:2], logits_scale.reshape(logits.shape)])


def deformable_aggregation_with_logits(features, shapes, starts, points, projection, logits, size, pair_scale, grad) -> Truth:
    bs, anchors, cams, maps, count, groups = logits.shape
    whole = np.concatenate([points, np.ones((*points.shape[:3], 1))], -1)
    size = np.ones((bs, cams, 2)) if size is None else size
    scale = np.ones((bs, anchors, cams, count)) if pair_scale is None else pair_scale
    turned = np.einsum("bcij,bapj->bapci", projection[:, :, :3], whole)
    depth = np.maximum(turned[..., 2], 1e-5)
    locations = turned[..., :2] / depth[..., None] / size[:, None, None]
    rows = np.moveaxis(logits, 5, 2).reshape(bs, anchors, groups, cams * maps * count)
    shares = _softmax(rows)
    by_sample = (bs, anchors, groups, cams, maps, count)
    weights = shares.reshape(by_sample).transpose(0, 1, 5, 3, 4, 2) * scale.transpose(0, 1, 3, 2)[..., None, None]
    (out, gf, gl, gw), scales = deformable_aggregation(features, shapes, starts, locations, weights, grad)
    found = []
    for of_location, of_weight, sign in ((gl, gw, 1), (scales[2], scales[3], -1)):  # the gradients, and their scales
        inputs = (projection[:, :, :3], whole, locations)
        matrix, hom, at = inputs if sign > 0 else map(np.abs, inputs)
        of_turned = np.zeros(turned.shape)
        of_turned[..., :2] = of_location / size[:, None, None] / depth[..., None]
        of_turned[..., 2] = -sign * (of_location * at).sum(-1) / depth * (turned[..., 2] > 1e-5)
        of_points = np.einsum("bapci,bcij->bapj", of_turned, matrix[..., :3])
        of_projection = np.zeros(projection.shape)
        of_projection[:, :, :3] = np.einsum("bapci,bapj->bcij", of_turned, hom)
        scaled = of_weight * scale.transpose(0, 1, 3, 2)[..., None, None]
        found.append((of_points, of_projection, scaled.transpose(0, 1, 5, 3, 4, 2).reshape(rows.shape)))
    of_logits, logits_scale = _of_logits(shares, found[0][2], found[1][2])
    back = [np.moveaxis(a.reshape(by_sample), 2, 5) for a in (of_logits, logits_scale)]
    return Truth([out, gf, *found[0][:2], back[0]], [*scales[:2], *found[1][:2], back[1]])
