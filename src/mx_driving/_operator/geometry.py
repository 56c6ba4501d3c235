"""Positions of samples. Locations are (x, y), sizes (W, H), shapes (H, W)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _torch_private


def pixels(locations: Tensor, sizes: Tensor) -> Tensor:
    """Convert normalised locations to pixels. The centre of the first pixel is 0."""
    return locations * sizes - 0.5


def on_map(pixels: Tensor, sizes: Tensor) -> Tensor:
    """Return whether a bilinear sample has a corner on its map. False for NaN."""
    return ((pixels > -1) & (pixels < sizes)).all(-1)


def inside(locations: Tensor) -> Tensor:
    """Return whether locations are strictly inside the picture. False for NaN."""
    return ((locations > 0) & (locations < 1)).all(-1)


def as_int64(index: Tensor) -> Tensor:
    """Return `index` as int64. Graphs of torch.jit.trace and make_fx do not check dtypes, and a conversion in the graph would
    truncate a float index. So add an int64 zero there: a float index stays floating, and the kernel refuses it."""
    if torch.compiler.is_compiling() or not (_torch_private.is_tracing() or _torch_private.count_dispatch_modes()):
        return index.long()
    return index + index.new_zeros(1, dtype=torch.int64)


def clamp_index(index: Tensor, size: Any) -> tuple[Tensor, Tensor]:
    """Return index clamped to 0..size, and a flag: 1 where index lay outside 0..size - 1, else 0.

    size is a number or a tensor. The code compares nothing, because some compilers compute comparisons of int64 wrongly.
    """
    index = as_int64(index).clamp(min=-1).clamp(max=size)
    clamped = index.clamp(min=0)
    return clamped, clamped - index.clamp(max=size - 1)


def starts_of(shapes: Tensor) -> Tensor:
    """Return the start index of every map, for maps stored one after the other without gaps."""
    rows = shapes.prod(-1).flatten()
    return (rows.cumsum(0) - rows).view(shapes.shape[:-1])
