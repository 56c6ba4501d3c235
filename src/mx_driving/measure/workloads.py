"""The calls that models make: rows named after models, sizes from the models' own configurations."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .._operators import OPERATORS, Inputs

MULTI_SCALE, AGGREGATION, GEOMETRIC = "multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention"
Sizes = list[tuple[int, int]]


class Workload(NamedTuple):
    """A call of an operator. `make` draws its five tensors from a generator."""

    name: str
    operator: str
    make: Callable[[torch.Generator], tuple[Tensor, ...]]

    @property
    def differentiable(self) -> tuple[int, ...]:
        """Which of the five inputs have a gradient."""
        return OPERATORS[self.operator].differentiable

    @property
    def gradients(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(Inputs._fields[i] for i in self.differentiable)


def off_lattice(locations: Tensor, size: Tensor) -> Tensor:
    """Locations moved at least 0.01 pixel away from pixel centres. The gradient of a location jumps there, and float32 and
    float64 may be on different sides."""
    pixels = locations.double() * size - 0.5
    whole = pixels.floor()
    return ((whole + (pixels - whole).clamp(0.01, 0.99) + 0.5) / size).float()


def _pyramid(sizes: Sizes) -> tuple[Tensor, Tensor]:
    shapes = torch.tensor(sizes)
    ends = shapes.prod(-1).cumsum(0)
    return shapes, torch.cat([ends.new_zeros(1), ends[:-1]])


def _attention(generator: torch.Generator, bs: int, sizes: Sizes, centres: Tensor, points: int, spread: float):
    """8 heads of 32 channels; points normally distributed about each query's centre, `spread` pixels of each level."""
    shapes, starts = _pyramid(sizes)
    levels, queries = len(sizes), centres.shape[-2]
    value = torch.randn(bs, int(shapes.prod(-1).sum()), 8, 32, generator=generator)
    offsets = torch.randn(bs, queries, 8, levels, points, 2, generator=generator) * spread
    size = shapes.flip(-1)[:, None]
    locations = off_lattice(centres[..., :, None, None, None, :] + offsets / size, size)
    weights = torch.rand(bs, queries, 8, levels * points, generator=generator).softmax(-1)
    return value, shapes, starts, locations, weights.view(bs, queries, 8, levels, points)


def _grid(height: int, width: int) -> Tensor:
    """Pixel centres, row by row, normalised (x, y)."""
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    return torch.stack([x, y], -1).view(-1, 2)


def _encoder(generator: torch.Generator, sizes: Sizes, bs: int = 1) -> tuple[Tensor, ...]:
    """A query per pixel of every level, looking near its own position."""
    return _attention(generator, bs, sizes, torch.cat([_grid(*size) for size in sizes]), 4, 3.0)


def _decoder(generator: torch.Generator, sizes: Sizes, queries: int) -> tuple[Tensor, ...]:
    """Object queries anywhere, points over a box of some pixels."""
    return _attention(generator, 1, sizes, torch.rand(1, queries, 2, generator=generator), 4, 4.0)


def _bevformer_spatial(generator: torch.Generator, queries: int) -> tuple[Tensor, ...]:
    """Six cameras; the queries of each are ground pillars in the order of the BEV grid, which sweep over the image."""
    sweep = torch.linspace(0, 1, queries)
    centres = torch.stack([(sweep * 50) % 1, 0.4 + 0.5 * sweep], -1).expand(6, -1, -1)
    return _attention(generator, 6, [(116, 200), (58, 100), (29, 50), (15, 25)], centres, 8, 4.0)


def _sparse4d(generator: torch.Generator, anchors: int, points: int) -> tuple[Tensor, ...]:
    """Six cameras of four scales, 256 channels in 8 groups; a point is seen by one camera, sometimes by its neighbour."""
    sizes = [(64, 176), (32, 88), (16, 44), (8, 22)]
    shapes, starts = _pyramid(sizes * 6)
    features = torch.randn(1, int(shapes.prod(-1).sum()), 256, generator=generator)
    heading = torch.rand(1, anchors, 1, 1, generator=generator) * 6
    extent = torch.randn(1, anchors, points, 2, generator=generator) * 0.05
    camera = torch.arange(6)
    x = (heading + extent[..., :1] - camera + 0.1) % 6 / 1.2  # 0..1 within a camera, neighbours overlap by a sixth
    y = (0.5 + 0.1 * torch.randn(1, anchors, 1, 1, generator=generator) + extent[..., 1:]).expand_as(x)
    weight = torch.rand(1, anchors, points * 24, 8, generator=generator).softmax(2)
    locations = torch.stack([x, y], -1)
    for height, width in sizes:  # centres of coarse pixels lie between those of fine ones: one move does not undo another
        locations = off_lattice(locations, torch.tensor([width, height]))
    shapes, starts = shapes.view(6, 4, 2), starts.view(6, 4)
    return features, shapes, starts, locations, weight.view(1, anchors, points, 6, 4, 8)


def _maptr(generator: torch.Generator, sizes: Sizes, bev: tuple[int, int], points: int) -> tuple[Tensor, ...]:
    """Each BEV cell reads a few pixels of six camera images near where it projects; integral locations."""
    centres = _grid(*bev).flip(-1)[None]
    value, shapes, starts, locations, weights = _attention(generator, 6, sizes, centres, points, 3.0)
    return value, shapes, starts, (locations * shapes.flip(-1)[:, None]).long(), weights


def _vendor_attention(
    generator: torch.Generator, bs: int, queries: int, channels: int, heads: int, levels: int, points: int
) -> tuple[Tensor, ...]:
    """Inputs drawn as in the vendor's documents; every level is 60 x 40."""
    shapes = torch.tensor([[60, 40]] * levels)
    starts = torch.arange(levels) * 2400
    value = torch.rand(bs, 2400 * levels, heads, channels, generator=generator) * 0.01
    locations = torch.rand(bs, queries, heads, levels, points, 2, generator=generator)
    weights = torch.rand(bs, queries, heads, levels, points, generator=generator) + 1e-5
    return value, shapes, starts, off_lattice(locations, shapes.flip(-1)[:, None]), weights


def _vendor_geometric(generator: torch.Generator) -> tuple[Tensor, ...]:
    value, shapes, starts, locations, weights = _vendor_attention(generator, 6, 9680, 32, 8, 4, 4)
    return value, shapes, starts, locations * 40, weights


def _vendor_aggregation(generator: torch.Generator) -> tuple[Tensor, ...]:
    """1 x 2816 x 256, one camera with one 32 x 88 map, 10 anchors x 2000 points, 8 groups."""
    features = torch.rand(1, 2816, 256, generator=generator)
    locations = torch.rand(1, 10, 2000, 1, 2, generator=generator)
    weight = torch.rand(1, 10, 2000, 1, 1, 8, generator=generator)
    locations = off_lattice(locations, torch.tensor([88, 32]))
    return features, torch.tensor([[[32, 88]]]), torch.tensor([[0]]), locations, weight


# The vendor documents' own example inputs.
EXAMPLES = (
    Workload("Vendor example small [1, 16, 32, 4, 1, 8]", MULTI_SCALE, lambda g: _vendor_attention(g, 1, 16, 32, 4, 1, 8)),
    Workload("Vendor example large [6, 9680, 32, 8, 4, 4]", MULTI_SCALE, lambda g: _vendor_attention(g, 6, 9680, 32, 8, 4, 4)),
    Workload("Vendor example aggregation 1 x 2816 x 256, 10 x 2000", AGGREGATION, _vendor_aggregation),
    Workload("Vendor example geometric [6, 9680, 32, 8, 4, 4]", GEOMETRIC, _vendor_geometric),
)
DETR = [(100, 134), (50, 67), (25, 34), (13, 17)]
WORKLOADS = (
    Workload("Deformable-DETR encoder", MULTI_SCALE, lambda g: _encoder(g, DETR)),
    Workload("Deformable-DETR decoder, 300 queries", MULTI_SCALE, lambda g: _decoder(g, DETR, 300)),
    Workload("DINO decoder, 900 queries", MULTI_SCALE, lambda g: _decoder(g, DETR, 900)),
    Workload("RT-DETR decoder", MULTI_SCALE, lambda g: _decoder(g, [(80, 80), (40, 40), (20, 20)], 300)),
    Workload("Mask2Former pixel decoder", MULTI_SCALE, lambda g: _encoder(g, [(32, 32), (64, 64), (128, 128)])),
    Workload("BEVFormer temporal self-attention", MULTI_SCALE, lambda g: _encoder(g, [(200, 200)], 2)),
    Workload("BEVFormer spatial cross-attention, 6 x 2500", MULTI_SCALE, lambda g: _bevformer_spatial(g, 2500)),
    Workload("Sparse4D v3", AGGREGATION, lambda g: _sparse4d(g, 900, 13)),
    Workload("SparseDrive map head", AGGREGATION, lambda g: _sparse4d(g, 100, 300)),
    Workload("MapTR tiny", GEOMETRIC, lambda g: _maptr(g, [(15, 25)], (200, 100), 8)),
    Workload("MapTR nano", GEOMETRIC, lambda g: _maptr(g, [(10, 16)], (80, 40), 8)),
    *EXAMPLES,
)


def _batch(make: Callable[[torch.Generator], tuple[Tensor, ...]], g: torch.Generator, bs: int) -> tuple[Tensor, ...]:
    """`bs` different calls of batch 1 as one."""
    value, shapes, starts, locations, weights = zip(*(make(g) for _ in range(bs)), strict=True)
    return torch.cat(value), shapes[0], starts[0], torch.cat(locations), torch.cat(weights)


# The rows that GPU kernels are compared on; a 800 x 1333 image at strides 8 to 64.
LARGE_DETR = [(100, 167), (50, 84), (25, 42), (13, 21)]
GPU_WORKLOADS = (
    Workload("Encoder, batch 2, 22,223 queries", MULTI_SCALE, lambda g: _encoder(g, LARGE_DETR, 2)),
    Workload("BEVFormer spatial cross-attention, 6 x 9680", MULTI_SCALE, lambda g: _bevformer_spatial(g, 9680)),
    Workload("Decoder, batch 2, 900 queries", MULTI_SCALE, lambda g: _batch(lambda g: _decoder(g, LARGE_DETR, 900), g, 2)),
    Workload("Sparse4D, batch 6, 900 x 13", AGGREGATION, lambda g: _batch(lambda g: _sparse4d(g, 900, 13), g, 6)),
    Workload("MapTR tiny", GEOMETRIC, lambda g: _maptr(g, [(15, 25)], (200, 100), 8)),
)
