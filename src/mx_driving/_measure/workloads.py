"""The calls that models make. Workloads are named after models, and have the sizes of the models' own configurations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import geometry as calibration
from .._operator import composition, geometry
from .._operator.description import AGGREGATION, GEOMETRIC, MULTI_SCALE, OPERATORS, POOL, Operator

Sizes = list[tuple[int, int]]
Call = Callable[[], Any]
Args = tuple[Any, ...]  # arguments of an operator: tensors, None for an omitted input, options


class Workload(NamedTuple):
    """A call of an operator. `make` draws its arguments from a generator, in float32. `constant` names inputs without a
    gradient in the model, such as the reference points of a grid."""

    name: str
    operator: str
    make: Callable[[torch.Generator], Args]
    constant: tuple[str, ...] = ()

    @property
    def description(self) -> Operator:
        return OPERATORS[self.operator]

    @property
    def differentiable_names(self) -> tuple[str, ...]:
        """Return the names of the operator's differentiable inputs."""
        return tuple(self.description.inputs[i] for i in self.description.differentiable)

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Return the indices of the inputs whose gradient the model needs."""
        names = self.description.inputs
        return tuple(i for i in self.description.differentiable if names[i] not in self.constant)

    def inputs(self, dtype: str = "float32") -> Args:
        """Return the arguments in this dtype, drawn from a fixed seed: all measurements use the same arguments."""
        return cast(self.make(torch.Generator().manual_seed(0)), getattr(torch, dtype))

    def bare(self, args: Args) -> tuple[str, Args]:
        """Return the bare operator and its arguments: computed locations and weights, in the dtype of logits."""
        if not self.description.bare:
            return self.operator, args
        inputs = composition.bare_inputs(self.operator, *args)
        return self.description.bare, cast(inputs, args[self.description.weights].dtype)


def cast(args: Args, dtype: torch.dtype) -> Args:
    """Return arguments whose floating tensors have this dtype."""
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def take_queries(operator: str, args: Args, begin: int, end: int) -> Args:
    """Return the arguments for queries begin..end (anchors of aggregation, channels of pooling)."""
    row = OPERATORS[operator]
    axes = (*row.axes[row.queries][:-1], *(None for _ in row.options))
    return tuple(
        a if axis is None or a is None else a.narrow(axis, begin, min(end, a.shape[axis]) - begin)
        for a, axis in zip(args, axes, strict=True)
    )


def move_off_lattice(locations: Tensor, size: Tensor) -> Tensor:
    """Move locations at least 0.01 pixel away from pixel centres. The gradient of a location jumps at a pixel centre, and the
    location may round to different sides of the centre in float32 and in float64."""
    pixels = geometry.pixels(locations.double(), size)
    whole = pixels.floor()
    return ((whole + (pixels - whole).clamp(0.01, 0.99) + 0.5) / size).float()


def _make_tables(sizes: Sizes) -> tuple[Tensor, Tensor]:
    shapes = torch.tensor(sizes)
    return shapes, geometry.starts_of(shapes)


def _draw_attention(generator: torch.Generator, bs: int, sizes: Sizes, centres: Tensor, points: int, spread: float):
    """Draw 8 heads of 32 channels. Points lie around their query's centre, with a standard deviation of `spread` pixels."""
    shapes, starts = _make_tables(sizes)
    levels, queries = len(sizes), centres.shape[-2]
    value = torch.randn(bs, int(shapes.prod(-1).sum()), 8, 32, generator=generator)
    offsets = torch.randn(bs, queries, 8, levels, points, 2, generator=generator) * spread
    size = shapes.flip(-1)[:, None]
    locations = move_off_lattice(centres[..., :, None, None, None, :] + offsets / size, size)
    weights = torch.rand(bs, queries, 8, levels * points, generator=generator).softmax(-1)
    return value, shapes, starts, locations, weights.view(bs, queries, 8, levels, points)


def make_pixel_centres(height: int, width: int) -> Tensor:
    """Return pixel centres, row by row, normalised (x, y)."""
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack([x, y], -1).view(-1, 2)


def draw_encoder(generator: torch.Generator, sizes: Sizes, bs: int = 1, with_logits: bool = False) -> Args:
    """Draw a query for each pixel of each level. A query samples near its pixel."""
    draw = _draw_attention_with_logits if with_logits else _draw_attention
    return draw(generator, bs, sizes, torch.cat([make_pixel_centres(*size) for size in sizes])[None], 4, 3.0)


def draw_decoder(generator: torch.Generator, sizes: Sizes, queries: int, with_logits: bool = False) -> Args:
    """Draw object queries anywhere, with points a few pixels around them."""
    draw = _draw_attention_with_logits if with_logits else _draw_attention
    return draw(generator, 1, sizes, torch.rand(1, queries, 2, generator=generator), 4, 4.0)


def draw_bevformer_spatial(generator: torch.Generator, queries: int, with_logits: bool = False) -> Args:
    """Draw six cameras. The queries of a camera are pillars in the order of the BEV grid, and sweep over the image.

    With logits, a query has a pillar of four reference points. Two of the query's eight points belong to each reference point.
    """
    sweep = torch.linspace(0, 1, queries)
    centres = torch.stack([(sweep * 50) % 1, 0.4 + 0.5 * sweep], -1)[None]
    if not with_logits:
        return _draw_attention(generator, 6, BEVFORMER, centres, 8, 4.0)
    height = torch.tensor([0.06, 0.02, -0.02, -0.06])
    pillars = centres[:, :, None] + torch.stack([0 * height, height], -1)
    return _draw_attention_with_logits(generator, 6, BEVFORMER, pillars, 8, 4.0, "point")


def draw_sparse4d(generator: torch.Generator, anchors: int, points: int) -> tuple[Tensor, ...]:
    """Draw six cameras of four scales, 256 channels in 8 groups. A point is visible in one camera or in two neighbours."""
    sizes = SPARSE4D
    shapes, starts = _make_tables(sizes * 6)
    features = torch.randn(1, int(shapes.prod(-1).sum()), 256, generator=generator)
    heading = torch.rand(1, anchors, 1, 1, generator=generator) * 6
    extent = torch.randn(1, anchors, points, 2, generator=generator) * 0.05
    camera = torch.arange(6)
    x = (heading + extent[..., :1] - camera + 0.1) % 6 / 1.2  # 0..1 in a camera; neighbours overlap by a sixth
    y = (0.5 + 0.1 * torch.randn(1, anchors, 1, 1, generator=generator) + extent[..., 1:]).expand_as(x)
    weight = torch.rand(1, anchors, points * 24, 8, generator=generator).softmax(2)
    locations = torch.stack([x, y], -1)
    # The pixel centres of two scales never lie close together: a move away from one cannot end at another.
    for height, width in sizes:
        locations = move_off_lattice(locations, torch.tensor([width, height]))
    shapes, starts = shapes.view(6, 4, 2), starts.view(6, 4)
    return features, shapes, starts, locations, weight.view(1, anchors, points, 6, 4, 8)


def draw_maptr(generator: torch.Generator, sizes: Sizes, bev: tuple[int, int], points: int) -> tuple[Tensor, ...]:
    """Draw BEV cells that read a few pixels of six images around their projection, at integer locations."""
    centres = make_pixel_centres(*bev).flip(-1)[None]
    value, shapes, starts, locations, weights = _draw_attention(generator, 6, sizes, centres, points, 3.0)
    return value, shapes, starts, (locations * shapes.flip(-1)[:, None]).long(), weights


def _round_to_sixteen_bits(t: Tensor) -> Tensor:
    """Round to numbers that every dtype represents, so that workloads in 16 bits and in float32 sample the same locations."""
    return (t.bfloat16() * 4096).round().float() / 4096


def _draw_attention_with_logits(
    generator: torch.Generator, bs: int, sizes: Sizes, reference: Tensor, points: int, spread: float, axis: str = "level"
) -> Args:
    """Draw inputs like those of `_draw_attention`, but with offsets and logits. Keep samples away from pixel centres, where the
    gradient of a location jumps. reference: [1 or bs, queries, 2], or [1 or bs, queries, heights of a pillar, 2]."""
    shapes, starts = _make_tables(sizes)
    levels, queries = len(sizes), reference.shape[1]
    if reference.dim() == 3:
        reference = reference[:, :, None].expand(-1, -1, levels, -1)
    value = torch.randn(bs, int(shapes.prod(-1).sum()), 8, 32, generator=generator)
    reference = _round_to_sixteen_bits(reference.expand(bs, -1, -1, -1))
    offsets = _round_to_sixteen_bits(torch.randn(bs, queries, 8, levels, points, 2, generator=generator) * spread)
    logits = torch.rand(bs, queries, 8, levels * points, generator=generator)
    samples = composition.MultiScale(shapes, reference.double(), offsets.double(), logits, axis)
    pixels = geometry.pixels(samples.locations, shapes.flip(-1)[:, None])
    near = (pixels - pixels.round()).abs() < 0.01
    offsets = torch.where(near, offsets + 0.125, offsets)  # bfloat16 keeps this step in offsets below 32
    return value, shapes, starts, reference, _round_to_sixteen_bits(offsets), logits, axis


def _draw_maptr_with_logits(generator: torch.Generator, sizes: Sizes, bev: tuple[int, int], window: tuple[int, int]) -> Args:
    """Draw BEV cells. Each head projects a cell at a height of its own, and reads a window of `window` = (height, width) pixels
    there."""
    shapes, starts = _make_tables(sizes)
    value = torch.randn(6, int(shapes.prod(-1).sum()), 8, 32, generator=generator)
    above = torch.stack([torch.zeros(8), torch.linspace(-0.2, 0.2, 8)], -1)
    reference = _round_to_sixteen_bits((make_pixel_centres(*bev).flip(-1)[:, None] + above).expand(6, -1, -1, -1))
    y, x = (torch.arange(n) - n // 2 for n in window)
    points = torch.cartesian_prod(x, y)
    logits = torch.rand(6, reference.shape[1], 8, len(sizes) * len(points), generator=generator)
    return value, shapes, starts, reference, points, logits


def make_ring_of_cameras() -> tuple[Tensor, Tensor]:
    """Return the projection [6, 4, 4] from metres to pixels, and image_size [6, 2], of six cameras that look outwards, 60
    degrees apart, 1.5 metres above the ground. Focal length and image size are those of Sparse4D's scaled and
    cropped nuScenes."""
    yaw = torch.arange(6) * (torch.pi / 3)
    cos, sin, zero = yaw.cos(), yaw.sin(), 0 * yaw
    right, down, forward = (sin, -cos, zero), (zero, zero, zero - 1), (cos, sin, zero)
    turn = torch.stack([torch.stack(axis, -1) for axis in (right, down, forward)], 1)  # [cam, camera's axis, x y z]
    lens = torch.tensor([[557.0, 0, 352], [0, 557, 76], [0, 0, 1]])
    projection = torch.zeros(6, 4, 4)
    projection[:, :3, :3], projection[:, :3, 3] = lens @ turn, lens @ torch.tensor([0, 1.5, 0])
    projection[:, 3, 3] = 1
    return _round_to_sixteen_bits(projection), torch.tensor([704.0, 256.0]).expand(6, -1).contiguous()


def _draw_sparse4d_with_logits(generator: torch.Generator, anchors: int, points: int, sizes: Sizes) -> Args:
    """Draw boxes of a car's size up to 50 metres away, seen by six cameras."""
    shapes, starts = _make_tables(sizes * 6)
    features = torch.randn(1, int(shapes.prod(-1).sum()), 256, generator=generator)
    shapes, starts = shapes.view(6, -1, 2), starts.view(6, -1)
    projection, image_size = (t[None] for t in make_ring_of_cameras())
    angle, distance = torch.rand(2, 1, anchors, 1, generator=generator)
    distance = 4 + 46 * distance
    centres = torch.stack([distance * (6.2832 * angle).cos(), distance * (6.2832 * angle).sin(), 0 * angle + 0.8], -1)
    logits = torch.rand(1, anchors, 6, len(sizes), points, 8, generator=generator)
    key_points = torch.zeros(1, anchors, points, 3)
    is_near_jump = torch.ones(1, anchors, points, dtype=torch.bool)
    while is_near_jump.any():
        offsets = (torch.rand(1, anchors, points, 3, generator=generator) - 0.5) * torch.tensor([4.6, 1.9, 1.7])
        key_points = torch.where(is_near_jump[..., None], _round_to_sixteen_bits(centres + offsets), key_points)
        # Replace points that lie at the border of a camera's image, or within 0.002 pixel of a jump of the gradient.
        inputs = (key_points.double(), projection.double(), logits, image_size.double())
        locations = composition.Aggregation(shapes, *inputs).locations  # [bs, anchor, pts, cam, 2]
        seen = ((locations > -1e-4) & (locations < 1 + 1e-4)).all(-1)
        border = ((locations.abs() < 1e-4) | ((locations - 1).abs() < 1e-4)).any(-1)
        pixels = geometry.pixels(locations[..., None, :], shapes.flip(-1))
        lattice = ((pixels - pixels.round()).abs() < 0.002).any(-1).any(-1)
        is_near_jump = (seen & (border | lattice)).any(-1)
    return features, shapes, starts, key_points, projection, logits, image_size, None


def draw_lifted(
    generator: torch.Generator, grid: tuple[int, int], depths: int, cells: int, reach: float, channels: int
) -> tuple[Any, ...]:
    """Return the arguments of bev_pool_v3 for the points of six cameras, sorted by cell, as in models.

    The map is a square with sides of 2 * `reach` metres and `cells` x `cells` cells. Points outside the map are left out. A
    pixel has `depths` points, whose depths are half a metre apart. `grid` is (height, width) of a camera's features.
    """
    projection, image_size = make_ring_of_cameras()
    frustum = calibration.frustum(tuple(image_size[0].tolist()), (grid[1], grid[0]), 1 + torch.arange(depths) / 2)
    positions, side, pixels = calibration.unproject(frustum, projection)[None], 2 * reach / cells, math.prod(grid)
    lower, cell = (-reach, -reach, -3.0), (side, side, 8.0)
    ranks_depth, ranks_feat, ranks_bev = calibration.bev_ranks(positions, lower, cell, (cells, cells, 1))
    feat = torch.randn(6 * pixels, channels, generator=generator)
    depth = torch.rand(6, depths, pixels, generator=generator).softmax(1).flatten()
    return feat, depth, ranks_feat, ranks_depth, ranks_bev, 1, 1, cells, cells


def remove_depth(args: Args) -> Args:
    """Return the arguments without depth: feat has a row for each point, as in BEVFusion."""
    feat, depth, ranks_feat, ranks_depth, *rest = args
    points = torch.arange(len(ranks_feat), dtype=torch.int32)
    return (depth[ranks_depth, None] * feat[ranks_feat], torch.ones(()).expand(len(points)), points, points, *rest)


def _draw_example(
    generator: torch.Generator, bs: int, queries: int, channels: int, heads: int, levels: int, points: int, scale: int = 1
) -> tuple[Tensor, ...]:
    """Draw inputs as in the vendor's documents; every level is 60 x 40. `scale` multiplies locations in 0..1."""
    shapes = torch.tensor([[60, 40]] * levels)
    starts = torch.arange(levels) * 2400
    value = torch.rand(bs, 2400 * levels, heads, channels, generator=generator) * 0.01
    locations = torch.rand(bs, queries, heads, levels, points, 2, generator=generator)
    weights = torch.rand(bs, queries, heads, levels, points, generator=generator) + 1e-5
    return value, shapes, starts, move_off_lattice(locations, shapes.flip(-1)[:, None]) * scale, weights


def _draw_aggregation_example(generator: torch.Generator) -> tuple[Tensor, ...]:
    """Draw features 1 x 2816 x 256 of one camera with one 32 x 88 map, for 10 anchors x 2000 points in 8 groups."""
    features = torch.rand(1, 2816, 256, generator=generator)
    locations = torch.rand(1, 10, 2000, 1, 2, generator=generator)
    weight = torch.rand(1, 10, 2000, 1, 1, 8, generator=generator)
    locations = move_off_lattice(locations, torch.tensor([88, 32]))
    return features, torch.tensor([[[32, 88]]]), torch.tensor([[0]]), locations, weight


# Example inputs from the vendor's documents.
EXAMPLES = (
    Workload("Vendor example small [1, 16, 32, 4, 1, 8]", MULTI_SCALE, lambda g: _draw_example(g, 1, 16, 32, 4, 1, 8)),
    Workload("Vendor example large [6, 9680, 32, 8, 4, 4]", MULTI_SCALE, lambda g: _draw_example(g, 6, 9680, 32, 8, 4, 4)),
    Workload("Vendor example aggregation 1 x 2816 x 256, 10 x 2000", AGGREGATION, _draw_aggregation_example),
    Workload(
        "Vendor example geometric [6, 9680, 32, 8, 4, 4]", GEOMETRIC, lambda g: _draw_example(g, 6, 9680, 32, 8, 4, 4, 40)
    ),
)
DETR = [(100, 134), (50, 67), (25, 34), (13, 17)]
BEVFORMER = [(116, 200), (58, 100), (29, 50), (15, 25)]
SPARSE4D = [(64, 176), (32, 88), (16, 44), (8, 22)]


def _add_logits(name: str, bare: str, make: Callable[[torch.Generator], Args], *constant: str) -> Workload:
    return Workload(f"{name}, with logits", f"{bare}_with_logits", make, constant)


GRID = "reference_points"  # the `constant` input of workloads whose reference points are a fixed grid

# Operators with logits. A workload has the sizes of the bare workload of the same name, without ", with logits".
WITH_LOGITS = (
    _add_logits("Deformable-DETR encoder", MULTI_SCALE, lambda g: draw_encoder(g, DETR, 1, True), GRID),
    _add_logits("Deformable-DETR decoder, 300 queries", MULTI_SCALE, lambda g: draw_decoder(g, DETR, 300, True)),
    _add_logits("BEVFormer temporal self-attention", MULTI_SCALE, lambda g: draw_encoder(g, [(200, 200)], 2, True), GRID),
    _add_logits(
        "BEVFormer spatial cross-attention, 6 x 2500", MULTI_SCALE, lambda g: draw_bevformer_spatial(g, 2500, True), GRID
    ),
    _add_logits("Sparse4D v3", AGGREGATION, lambda g: _draw_sparse4d_with_logits(g, 900, 13, SPARSE4D)),
    _add_logits("MapTR tiny", GEOMETRIC, lambda g: _draw_maptr_with_logits(g, [(15, 25)], (200, 100), (2, 4))),
    _add_logits("MapTR nano", GEOMETRIC, lambda g: _draw_maptr_with_logits(g, [(10, 16)], (80, 40), (2, 4))),
)
WORKLOADS = (
    Workload("Deformable-DETR encoder", MULTI_SCALE, lambda g: draw_encoder(g, DETR)),
    Workload("Deformable-DETR decoder, 300 queries", MULTI_SCALE, lambda g: draw_decoder(g, DETR, 300)),
    Workload("DINO decoder, 900 queries", MULTI_SCALE, lambda g: draw_decoder(g, DETR, 900)),
    Workload("RT-DETR decoder", MULTI_SCALE, lambda g: draw_decoder(g, [(80, 80), (40, 40), (20, 20)], 300)),
    Workload("Mask2Former pixel decoder", MULTI_SCALE, lambda g: draw_encoder(g, [(32, 32), (64, 64), (128, 128)])),
    Workload("BEVFormer temporal self-attention", MULTI_SCALE, lambda g: draw_encoder(g, [(200, 200)], 2)),
    Workload("BEVFormer spatial cross-attention, 6 x 2500", MULTI_SCALE, lambda g: draw_bevformer_spatial(g, 2500)),
    Workload("Sparse4D v3", AGGREGATION, lambda g: draw_sparse4d(g, 900, 13)),
    Workload("SparseDrive map head", AGGREGATION, lambda g: draw_sparse4d(g, 100, 300)),
    Workload("MapTR tiny", GEOMETRIC, lambda g: draw_maptr(g, [(15, 25)], (200, 100), 8)),
    Workload("MapTR nano", GEOMETRIC, lambda g: draw_maptr(g, [(10, 16)], (80, 40), 8)),
    Workload("BEVDet-R50, 64 channels", POOL, lambda g: draw_lifted(g, (16, 44), 118, 128, 51.2, 64)),
    Workload("BEVDet-R50, 80 channels", POOL, lambda g: draw_lifted(g, (16, 44), 118, 128, 51.2, 80)),
    Workload("BEVFusion", POOL, lambda g: draw_lifted(g, (32, 88), 118, 360, 54.0, 80)),
    Workload("FlashOcc", POOL, lambda g: draw_lifted(g, (16, 44), 88, 200, 40.0, 64)),
    *WITH_LOGITS,
    *EXAMPLES,
)

# The workloads of `mx-driving check`: all operators, in sizes for which the float64 reference takes seconds.
CHECKED = (
    *EXAMPLES,
    *(w for w in WITH_LOGITS if w.name.startswith(("Deformable-DETR decoder", "MapTR nano"))),
    _add_logits("Sparse4D 2 scales", AGGREGATION, lambda g: _draw_sparse4d_with_logits(g, 900, 13, SPARSE4D[2:])),
    *(w for w in WORKLOADS if w.name.startswith("BEVDet-R50, 80")),
    Workload("BEVFusion 8 x 22, without depth", POOL, lambda g: remove_depth(draw_lifted(g, (8, 22), 118, 90, 54.0, 80))),
)
