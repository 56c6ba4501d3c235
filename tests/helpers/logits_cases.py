"""Inputs of the operators with logits, by name. cases.py has the inputs of bare operators, and the functions that use them."""

from typing import Any

import torch
from cases import AGGREGATION_LOGITS, GEOMETRIC_LOGITS, MULTI_SCALE_LOGITS, PYRAMID, Case, levels_of
from torch import Tensor


def multi_scale(
    bs: int, queries: int, channels: int, heads: int, sizes: list[tuple[int, int]], points: int,
    references: int | None = None, axis: str = "level", box: bool = False, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Samples on the map and around it. Every dtype holds references and offsets exactly, and they add up to places that are
    1 / 128 pixel or more off the lattice: odd 128ths of maps whose sides no 16 divides."""
    generator = torch.Generator().manual_seed(seed)
    shapes, starts = levels_of(*sizes)
    assert (shapes % 16).all()
    value = torch.randn(bs, int(shapes.prod(-1).sum()), heads, channels, dtype=torch.float64, generator=generator)
    references = references or (len(sizes) if axis == "level" else points)
    centre = torch.randint(64, (bs, queries, references, 2), generator=generator).double() / 64 + 1 / 128
    target = torch.rand(bs, queries, heads, len(sizes), points, 2, dtype=torch.float64, generator=generator) * 1.3 - 0.15
    away = target - of_samples(centre, len(sizes), points, axis)
    logits = 1.5 * torch.randn(bs, queries, heads, len(sizes) * points, dtype=torch.float64, generator=generator)
    if not box:
        offsets = (away * shapes.flip(-1)[:, None] * 8).round().clamp(-255, 255) / 8
        return value, shapes, starts, centre, offsets, logits, axis
    sides = 0.5 ** torch.randint(1, 3, centre.shape, generator=generator).double()
    offsets = (away * 32).round() / 32 * 2 * points / of_samples(sides, len(sizes), points, axis)
    return value, shapes, starts, torch.cat([centre, sides], -1), offsets, logits, axis


def geometric(bs, queries, channels, heads, sizes: list[tuple[int, int]], window: tuple[int, int], seed=0) -> tuple[Any, ...]:
    """References 1 / 128 pixel or more away from where rounding jumps; a window of (height, width) pixels."""
    generator = torch.Generator().manual_seed(seed)
    shapes, starts = levels_of(*sizes)
    assert (shapes % 16).all()
    value = torch.randn(bs, int(shapes.prod(-1).sum()), heads, channels, dtype=torch.float64, generator=generator)
    reference = torch.randint(-10, 74, (bs, queries, heads, 2), generator=generator).double() / 64 + 1 / 128
    x, y = (torch.arange(n) - n // 2 for n in reversed(window))
    points = torch.cartesian_prod(x, y).view(-1, 2)
    samples = (bs, queries, heads, len(sizes) * len(points))
    logits = 1.5 * torch.randn(samples, dtype=torch.float64, generator=generator)
    return value, shapes, starts, reference, points, logits


def ring_of_cameras(cams: int) -> Tensor:
    """Return projections [cam, 4, 4] from metres to 0..1, of a ring of cameras. Every dtype holds them exactly."""
    angle = torch.arange(cams) * (2 * torch.pi / cams) + 0.1
    turn = torch.stack([angle.cos(), 0 * angle, -angle.sin(), 0 * angle, 0 * angle + 1, 0 * angle])
    turn = torch.cat([turn, torch.stack([angle.sin(), 0 * angle, angle.cos()])]).T.reshape(cams, 3, 3)
    lens = torch.tensor([[0.4, 0, 0.5], [0, 0.6, 0.5], [0, 0, 1]])
    projection = torch.zeros(cams, 4, 4)
    projection[:, :3, :3], projection[:, :3, 3] = lens @ turn, torch.tensor([0.05, -0.1, 0.3])
    return projection.bfloat16().double()


def aggregation(
    bs: int, anchors: int, points: int, channels: int, groups: int, sizes: list[list[tuple[int, int]]],
    image_size: bool = True, pair_scale: bool = True, seed: int = 0,
) -> tuple[Any, ...]:  # fmt: skip
    """Points around cameras. Every dtype holds points and cameras exactly. Points in pictures are off the lattice."""
    generator = torch.Generator().manual_seed(seed)
    cams, scales = len(sizes), len(sizes[0])
    shapes = torch.tensor(sizes)
    starts = levels_of(*[size for cam in sizes for size in cam])[1].view(cams, scales)
    features = torch.randn(bs, int(shapes.prod(-1).sum()), channels, dtype=torch.float64, generator=generator)
    projection = ring_of_cameras(cams).expand(bs, -1, -1, -1).clone()
    key_points = torch.zeros(bs, anchors, points, 3, dtype=torch.float64)
    again = torch.ones(bs, anchors, points, dtype=torch.bool)
    while again.any():
        drawn = torch.randint(-127, 128, key_points.shape, generator=generator).double() / 16
        key_points = torch.where(again[..., None], drawn, key_points)
        again = _near_a_jump(key_points, projection, shapes)
    logits = 1.5 * torch.randn(bs, anchors, cams, scales, points, groups, dtype=torch.float64, generator=generator)
    pixels = torch.tensor([512.0, 256.0], dtype=torch.float64)
    if image_size:
        projection[:, :, :2] *= pixels[:, None]
    kept = (torch.rand(bs, anchors, cams, points, generator=generator) > 0.25).double() * 1.25
    size, scale = pixels.expand(bs, cams, 2).clone() if image_size else None, kept if pair_scale else None
    return features, shapes, starts, key_points, projection, logits, size, scale


def _near_a_jump(key_points: Tensor, projection: Tensor, shapes: Tensor) -> Tensor:
    """Return True for points that a camera sees less than 1 / 500 pixel from the lattice or the border, or nearer than 0.5."""
    turned = torch.einsum("bcij,bapj->bapci", projection[:, :, :3, :3], key_points) + projection[:, None, None, :, :3, 3]
    depth = turned[..., 2]
    places = (turned[..., :2] / depth[..., None])[..., None, :]  # [bs, anchor, pts, cam, 1, 2]
    fraction = (places * shapes.flip(-1) - 0.5) % 1
    jump = ((fraction < 0.002) | (fraction > 0.998)).any(-1).any(-1) | ((places % 1) < 1e-4).any(-1).any(-1)
    return ((depth > -1e-3) & (jump | (depth < 0.5))).any(-1)


def of_samples(reference: Tensor, levels: int, points: int, axis: str) -> Tensor:
    """Return the reference point of every sample: [bs, queries, R, 2] -> [bs, queries, 1, levels, points, 2]."""
    count = reference.shape[2]
    chosen = [(l % count if axis == "level" else p % count) for l in range(levels) for p in range(points)]
    return reference[:, :, chosen].unflatten(2, (levels, points))[:, :, None]


THREE, SPARSE4D = [(12, 17), (6, 9), (1, 1)], [(16, 44), (8, 22), (4, 11), (2, 5)]
TWO_CAMERAS, FEW_MAPS = [[(6, 7), (3, 4)], [(5, 5), (1, 1)]], [(6, 7), (3, 4), (5, 5)]
CASES = [
    Case(MULTI_SCALE_LOGITS, "pyramid", lambda: multi_scale(2, 70, 32, 4, PYRAMID, 4)),
    Case(MULTI_SCALE_LOGITS, "one reference for all levels", lambda: multi_scale(2, 30, 8, 2, PYRAMID, 3, 1)),
    Case(MULTI_SCALE_LOGITS, "boxes", lambda: multi_scale(2, 50, 16, 2, THREE, 4, box=True)),
    Case(MULTI_SCALE_LOGITS, "one box, 3 points", lambda: multi_scale(2, 30, 8, 2, PYRAMID, 3, 1, box=True)),
    Case(MULTI_SCALE_LOGITS, "pillars of 4", lambda: multi_scale(2, 40, 16, 4, [(29, 50), (15, 25)], 8, 4, "point")),
    Case(MULTI_SCALE_LOGITS, "a reference for each point", lambda: multi_scale(1, 30, 8, 2, THREE, 5, 5, "point")),
    Case(MULTI_SCALE_LOGITS, "boxes of points", lambda: multi_scale(1, 30, 8, 2, THREE, 4, 2, "point", box=True)),
    Case(MULTI_SCALE_LOGITS, "one level, one point", lambda: multi_scale(1, 30, 37, 3, [(5, 7)], 1)),
    Case(AGGREGATION_LOGITS, "two cameras", lambda: aggregation(2, 9, 7, 32, 8, TWO_CAMERAS)),
    Case(AGGREGATION_LOGITS, "from 0 to 1", lambda: aggregation(1, 9, 5, 24, 3, [[(6, 7)]] * 3, False, False)),
    Case(AGGREGATION_LOGITS, "one group of 37", lambda: aggregation(1, 7, 6, 37, 1, [[(6, 7)]] * 2, False, True)),
    Case(AGGREGATION_LOGITS, "Sparse4D", lambda: aggregation(1, 30, 13, 256, 8, [SPARSE4D] * 6, True, False)),
    # a vector holds some groups of a row, or some rows, or neither comes out even
    *(
        Case(AGGREGATION_LOGITS, f"{n} groups", lambda n=n: aggregation(1, 4, 5, n * 2, n, TWO_CAMERAS))
        for n in (2, 3, 5, 8, 16, 20, 37, 64)
    ),
    Case(AGGREGATION_LOGITS, "one row of logits", lambda: aggregation(2, 5, 1, 16, 8, [[(6, 7)]], seed=1)),
    Case(AGGREGATION_LOGITS, "more pairs than a bundle has room for", lambda: aggregation(1, 3, 45, 16, 4, [FEW_MAPS] * 3)),
    Case(AGGREGATION_LOGITS, "more scales than that", lambda: aggregation(1, 3, 2, 8, 2, [[(2, 3)] * 70] * 2)),
    Case(AGGREGATION_LOGITS, "blocks of anchors", lambda: aggregation(2, 150, 3, 8, 4, TWO_CAMERAS)),
    Case(GEOMETRIC_LOGITS, "pyramid", lambda: geometric(2, 70, 32, 4, PYRAMID, (2, 2))),
    Case(GEOMETRIC_LOGITS, "MapTR tiny", lambda: geometric(1, 120, 64, 4, [(15, 25)], (3, 5))),
    Case(GEOMETRIC_LOGITS, "odd channels", lambda: geometric(2, 90, 5, 2, [(5, 7), (1, 1)], (3, 3))),  # one packed pass
]
