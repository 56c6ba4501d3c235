"""Draw with matplotlib: the samples of a query on an image, and a view from above."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._operator import geometry, rules
from .._package_files import pip_install
from . import _pictures, _samples

COLOURS = ("#ffd166", "#06d6a0", "#4cc9f0", "#f72585", "#b388eb", "#ff9f1c")  # colours of levels, legible on photographs


def sampling_points(
    image: Any,
    locations: Tensor,
    weights: Tensor,
    *,
    reference: Tensor | None = None,
    least: float = 0.0,
    labels: bool = True,
    ax: Any = None,
) -> Any:
    """Draw a dot on a picture for each sample of queries. The dot's colour shows the level, its area the weight.

    Args:
        image: [H, W, 3], [3, H, W] or [H, W], 0..1 or bytes, a tensor or a NumPy array.
        locations: [..., num_levels, num_points, 2], (x, y), 0..1 is the picture. Leading axes are heads, queries or both.
        weights: [..., num_levels, num_points]. `look.samples(query, camera)` returns locations and weights of a recorded call.
        reference: [n, 2] or [n, 4], points or boxes (centre x, centre y, width, height) to mark, 0..1.
        least: the smallest weight that is drawn.
        labels: whether to draw a legend that names the levels.
        ax: matplotlib axes. None makes new ones, which a notebook shows as a picture if a cell ends with them.

    Samples outside the picture are left out: they read zeros.

    Returns:
        The axes.

    Raises:
        TypeError, ValueError: an argument is not as described above.
        RuntimeError: matplotlib is not installed.
    """
    _pictures.need_numbers(("locations", locations), ("weights", weights))
    if locations.dim() < 3 or locations.shape[-1] != 2:
        rules.fail(ValueError, "locations", "have shape (..., num_levels, num_points, 2)", tuple(locations.shape))
    if weights.shape != locations.shape[:-1]:
        fact = f"{tuple(weights.shape)}"
        if weights.dim() == locations.dim() + 1:
            fact += ", as deformable_aggregation has it: look.samples(query, camera) returns both as they are drawn"
        rules.fail(ValueError, "weights", f"have shape {tuple(locations.shape[:-1])}", fact)
    if locations.numel() == 0:
        rules.fail(ValueError, "locations", "hold a point", f"shape {tuple(locations.shape)}")
    if reference is not None:
        _pictures.need_numbers(("reference", reference))
        if reference.dim() != 2 or reference.shape[1] not in (2, 4):
            rules.fail(ValueError, "reference", "have shape (n, 2) or (n, 4)", tuple(reference.shape))
    picture = _pictures.to_pixels("image", _pictures.from_numpy("image", image))
    ax = _find_axes(ax, picture.shape[1] / picture.shape[0])
    height, width = picture.shape[:2]
    ax.imshow(picture.numpy())
    levels = locations.shape[-3]
    locations = locations.detach().float().cpu().movedim(-3, 0).reshape(levels, -1, 2)
    weights = weights.detach().float().cpu().movedim(-2, 0).reshape(levels, -1)
    largest = max(float(weights.nan_to_num(0).max()), 1e-12)
    for level in range(levels):
        shown = geometry.inside(locations[level]) & (weights[level] >= least)
        x, y = geometry.pixels(locations[level][shown], torch.tensor([width, height])).unbind(-1)
        area = (weights[level][shown] / largest).clamp_min(0.01) * 60
        colour = COLOURS[level % len(COLOURS)]
        ax.scatter(x, y, area, color=colour, edgecolors="black", linewidths=0.4, label=f"level {level}", alpha=0.85)
    for x, y, *size in [] if reference is None else reference.tolist():
        if size:
            box = (x - size[0] / 2) * width - 0.5, (y - size[1] / 2) * height - 0.5, size[0] * width, size[1] * height
            from matplotlib.patches import Rectangle

            ax.add_patch(Rectangle(box[:2], *box[2:], fill=False, edgecolor="white", linewidth=1.5))
        else:
            ax.plot(x * width - 0.5, y * height - 0.5, "+", color="white", markersize=9, markeredgewidth=1.5)
    if labels:
        ax.legend(loc="upper right", fontsize=7, framealpha=0.7, markerscale=0.8)
    ax.set_xlim(-0.5, width - 0.5)
    ax.set_ylim(height - 0.5, -0.5)
    ax.set_axis_off()
    return ax


def bev(
    view: Any, *, extent: tuple[float, float, float, float] | None = None, title: str = "", ax: Any = None, **imshow: Any
) -> Any:
    """Draw a bird's-eye view: forward is up, left is left.

    Args:
        view: [nx, ny] or [nx, ny, 3] in RGB, 0..1 or bytes, a tensor or a NumPy array; the first axis is x (forward), the
            second one y (left), both growing.
        extent: (x0, x1, y0, y1) in metres, for the axes. None: the axes count cells.
        title: text above the picture.
        ax: matplotlib axes. None makes new ones, which a notebook shows as a picture if a cell ends with them.
        imshow: arguments for `Axes.imshow`, for instance vmin, vmax, cmap.

    Returns:
        The axes.

    Raises:
        TypeError, ValueError: an argument is not as described above.
        RuntimeError: matplotlib is not installed.
    """
    view = _pictures.from_numpy("view", view)
    _pictures.need_numbers(("view", view))
    if view.dim() not in (2, 3) or view.shape[2:] not in ((), (3,)) or 0 in view.shape:
        rules.fail(ValueError, "view", "have shape (nx, ny) or (nx, ny, 3) with cells", tuple(view.shape))
    _samples.check_extent("extent", extent)
    cells = view.detach().cpu()
    cells = cells if cells.dim() == 3 and cells.dtype == torch.uint8 else cells.float()
    ax = _find_axes(ax, view.shape[1] / view.shape[0])
    x0, x1, y0, y1 = extent or (0.0, float(view.shape[0]), 0.0, float(view.shape[1]))
    ax.imshow(cells.flip(0, 1).numpy(), extent=(y1, y0, x0, x1), **imshow)
    ax.plot((y0 + y1) / 2 if extent is None else 0, (x0 + x1) / 2 if extent is None else 0, "^", color="white", mec="black")
    if extent is not None:
        ax.set_xlabel("left (m)", fontsize=8)
        ax.set_ylabel("forward (m)", fontsize=8)
        ax.tick_params(labelsize=7)
    else:
        ax.set_axis_off()
    ax.set_title(title, fontsize=9)
    return ax


def _find_axes(ax: Any, aspect: float) -> Any:
    """Return the caller's axes, or the axes of a new figure with this aspect ratio."""
    if ax is not None:
        return ax
    try:
        from ._picture import Picture, PictureAxes
    except ImportError:
        raise RuntimeError(f"mx_driving.viz draws with matplotlib: {pip_install('[demo]')}") from None
    # Make the figure without pyplot, which would keep the figure for a window that never opens.
    figure = Picture(figsize=(4 * math.sqrt(aspect) + 1, 4 / math.sqrt(aspect) + 1), layout="constrained")
    return figure.add_subplot(axes_class=PictureAxes)
