"""Where samples lie, for all that looks at them: locations are (x, y), sizes (W, H), shapes (H, W)."""

from __future__ import annotations

from torch import Tensor


def pixels(locations: Tensor, sizes: Tensor) -> Tensor:
    """Normalised locations in pixels: the centre of the first pixel is 0."""
    return locations * sizes - 0.5


def on_map(pixels: Tensor, sizes: Tensor) -> Tensor:
    """Where a bilinear sample has a corner on its map; NaN has none."""
    return ((pixels > -1) & (pixels < sizes)).all(-1)


def inside(locations: Tensor) -> Tensor:
    """Strictly inside the picture; NaN is not."""
    return ((locations > 0) & (locations < 1)).all(-1)


def starts_of(shapes: Tensor) -> Tensor:
    """The starts of maps that lie one after the other."""
    rows = shapes.prod(-1).flatten()
    return (rows.cumsum(0) - rows).view(shapes.shape[:-1])
