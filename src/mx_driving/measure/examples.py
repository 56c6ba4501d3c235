"""The vendor documents' own example inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Example(NamedTuple):
    operator: str
    name: str
    make: Callable[[torch.Generator], tuple[Tensor, ...]]
    differentiable: tuple[int, ...]  # which of the five inputs have a gradient
    gradients: tuple[str, ...]


def off_lattice(locations: Tensor, size: Tensor) -> Tensor:
    """The gradient of a location jumps where a sample crosses a pixel centre: stay 0.01 pixel away from there, or float32
    and float64 may differ about the side."""
    pixels = locations.double() * size - 0.5
    whole = pixels.floor()
    return ((whole + (pixels - whole).clamp(0.01, 0.99) + 0.5) / size).float()


def _attention(
    generator: torch.Generator, bs: int, queries: int, channels: int, heads: int, levels: int, points: int
) -> tuple[Tensor, ...]:
    """Every level 60 x 40."""
    shapes = torch.tensor([[60, 40]] * levels)
    starts = torch.arange(levels) * 2400
    value = torch.rand(bs, 2400 * levels, heads, channels, generator=generator) * 0.01
    locations = torch.rand(bs, queries, heads, levels, points, 2, generator=generator)
    weights = torch.rand(bs, queries, heads, levels, points, generator=generator) + 1e-5
    return value, shapes, starts, off_lattice(locations, shapes.flip(-1)[:, None]), weights


def _geometric(generator: torch.Generator) -> tuple[Tensor, ...]:
    value, shapes, starts, locations, weights = _attention(generator, 6, 9680, 32, 8, 4, 4)
    return value, shapes, starts, locations * 40, weights


def _aggregation(generator: torch.Generator) -> tuple[Tensor, ...]:
    """1 x 2816 x 256, one camera with one 32 x 88 map, 10 anchors x 2000 points, 8 groups."""
    features = torch.rand(1, 2816, 256, generator=generator)
    locations = torch.rand(1, 10, 2000, 1, 2, generator=generator)
    weight = torch.rand(1, 10, 2000, 1, 1, 8, generator=generator)
    locations = off_lattice(locations, torch.tensor([88, 32]))
    return features, torch.tensor([[[32, 88]]]), torch.tensor([[0]]), locations, weight


_ATTENTION_GRADIENTS = ("value", "locations", "weights")
EXAMPLES = (
    Example(
        "multi_scale_deformable_attn",
        "[1, 16, 32, 4, 1, 8]",
        lambda g: _attention(g, 1, 16, 32, 4, 1, 8),
        (0, 3, 4),
        _ATTENTION_GRADIENTS,
    ),
    Example(
        "multi_scale_deformable_attn",
        "[6, 9680, 32, 8, 4, 4]",
        lambda g: _attention(g, 6, 9680, 32, 8, 4, 4),
        (0, 3, 4),
        _ATTENTION_GRADIENTS,
    ),
    Example("deformable_aggregation", "1 x 2816 x 256, 10 x 2000", _aggregation, (0, 3, 4), _ATTENTION_GRADIENTS),
    Example("geometric_kernel_attention", "[6, 9680, 32, 8, 4, 4]", _geometric, (0, 4), ("value", "weights")),
)
