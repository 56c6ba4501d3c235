"""Draw the pixels that a query or an anchor reads, for the pages of the operators. `make tables` writes them to docs/images.

The shade of a pixel is the operator's own gradient of value, so that a picture always agrees with the operator.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

import mx_driving
from mx_driving.viz import COLOURS

WIDTH = 8.2  # inches


def panels(count: int, titles: list[str], aspect: float) -> tuple[Figure, Any]:
    figure = Figure(figsize=(WIDTH, WIDTH / count / aspect + 0.5), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False)[0]
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title, fontsize=9)
    return figure, axes


def shade(ax: Any, share: Tensor, largest: float) -> None:
    """Draw a map's pixels with a margin of one pixel. A pixel with a larger share is darker."""
    height, width = share.shape
    ax.imshow(share.numpy(), cmap="Greys", vmin=0, vmax=largest * 1.6)
    lines = {"color": "#d0d0d0", "linewidth": 0.5}
    ax.vlines(torch.arange(1, width) - 0.5, -0.5, height - 0.5, **lines)
    ax.hlines(torch.arange(1, height) - 0.5, -0.5, width - 0.5, **lines)
    ax.add_patch(Rectangle((-0.5, -0.5), width, height, fill=False, edgecolor="black"))
    ax.set(xlim=(-1.6, width + 1.0), ylim=(height - 0.4, -0.6))
    ax.set_axis_off()


def dots(ax: Any, places: Tensor, size: Any, colour: str, **more: Any) -> None:
    """Draw dots at `places`, in pixels of the map."""
    ax.scatter(*places.unbind(-1), s=size, color=colour, edgecolors="black", linewidths=0.6, zorder=3, **more)


def multi_scale_deformable_attn() -> Figure:
    """Draw one head of one query: four points on each of two levels, one point off the map."""
    shapes, starts = torch.tensor([[8, 12], [4, 6]]), torch.tensor([0, 96])
    value = torch.zeros(1, 120, 1, 1, requires_grad=True)
    reference = torch.tensor([0.62, 0.42])
    offsets = torch.tensor(
        [[[-2.1, -1.2], [1.4, -2.3], [2.7, 1.6], [5.6, -0.4]], [[-1.3, 0.9], [0.4, -1.1], [1.2, 0.8], [-2.4, -0.7]]]
    )
    locations = reference + offsets / shapes.flip(-1)[:, None]
    weights = torch.tensor([[0.2, 0.1, 0.15, 0.1], [0.15, 0.1, 0.12, 0.08]])
    mx_driving.multi_scale_deformable_attn(
        value, shapes, starts, locations[None, None, None], weights[None, None, None]
    ).sum().backward()
    assert value.grad is not None
    read = value.grad.flatten()
    figure, axes = panels(2, [f"level {n}: {h} x {w}" for n, (h, w) in enumerate(shapes.tolist())], 14 / 8)
    for level, ax in enumerate(axes):
        height, width = shapes[level].tolist()
        size = torch.tensor([width, height])
        shade(ax, read[starts[level] :][: height * width].view(height, width), float(read.max()))
        places = locations[level] * size - 0.5
        on = ((places > -1) & (places < size)).all(-1)
        dots(ax, places[on], weights[level][on] * 600, COLOURS[level])
        dots(ax, places[~on], 45, "white", marker="X")
        ax.plot(*(reference * size - 0.5), "+", color="#d00000", markersize=11, markeredgewidth=2)
    return figure


def deformable_aggregation() -> Figure:
    """Draw an anchor of seven points: camera 0 sees four of them, camera 1 all, camera 2 none."""
    size = torch.tensor([12, 8])
    shapes, starts = torch.tensor([[[8, 12]]] * 3), torch.tensor([[0], [96], [192]])
    maps = torch.zeros(1, 288, 1, requires_grad=True)
    box = torch.tensor([[0.0, 0.0], [0.16, 0.0], [-0.16, 0.0], [0.1, 0.16], [-0.1, 0.16], [0.1, -0.16], [-0.1, -0.16]])
    centres = torch.tensor([[0.95, 0.5], [0.22, 0.47], [-1.4, 0.5]])
    locations = (centres + box[:, None]).view(1, 1, 7, 3, 2)
    weight = torch.tensor([0.3, *[0.1] * 6]).view(1, 1, 7, 1, 1, 1).expand(-1, -1, -1, 3, -1, -1)
    mx_driving.deformable_aggregation(maps, shapes, starts, locations, weight).sum().backward()
    assert maps.grad is not None
    read = maps.grad.view(3, 8, 12)
    figure, axes = panels(3, ["camera 0", "camera 1", "camera 2: the anchor is not seen"], 14 / 8)
    for camera, ax in enumerate(axes):
        shade(ax, read[camera], float(read.max()))
        places = locations[0, 0, :, camera]
        counts = ((places > 0) & (places < 1)).all(-1)
        dots(ax, places[counts] * size - 0.5, 45, COLOURS[0])
        dots(ax, places[~counts] * size - 0.5, 45, "white", marker="X")
    return figure


def geometric_kernel_attention() -> Figure:
    """Draw one head of one query: a window of 3 x 5 pixels at the map's edge, whose last column is clamped."""
    shapes, starts = torch.tensor([[8, 12]]), torch.tensor([0])
    value = torch.zeros(1, 96, 1, 1, requires_grad=True)
    x, y = torch.meshgrid(torch.arange(8, 13), torch.arange(2, 5), indexing="ij")
    places = torch.stack([x, y], -1).view(-1, 2)
    weights = torch.full((1, 1, 1, 1, 15), 1 / 15)
    mx_driving.geometric_kernel_attention(value, shapes, starts, places[None, None, None, None], weights).sum().backward()
    assert value.grad is not None
    read = value.grad.view(8, 12)
    figure, (ax,) = panels(1, ["level 0: 8 x 12"], 14 / 8)
    figure.set_size_inches(WIDTH / 2, WIDTH / 2 / 1.75 + 0.4)
    shade(ax, read, float(read.max()))
    dots(ax, places[places[:, 0] < 12].double(), 25, COLOURS[0])
    dots(ax, places[places[:, 0] == 12].double(), 35, "white", marker="X")
    for row in (2, 3, 4):
        ax.annotate("", (11.1, row), (11.9, row), arrowprops={"arrowstyle": "->"})
    return figure


def bev_pool_v3() -> Figure:
    """Draw the output of two cameras seen from above, whose depths are less probable the farther they are."""
    cells, depths, pixels = (16, 28), 24, 12
    place, heading = torch.tensor([[4.0, 8.0], [23.0, 8.0]]), torch.tensor([0.0, torch.pi])
    angle = heading[:, None, None] + torch.linspace(-0.5, 0.5, pixels)
    far = torch.arange(1, depths + 1)[:, None] * 0.8
    x, y = (place[:, i, None, None] + far * turn(angle) for i, turn in enumerate((torch.cos, torch.sin)))
    on = ((x >= 0) & (x < cells[1]) & (y >= 0) & (y < cells[0])).flatten()
    ranks_bev = (y.long() * cells[1] + x.long()).flatten()[on]
    ranks_depth = torch.arange(2 * depths * pixels)[on]
    ranks_feat = (ranks_depth // (depths * pixels) * pixels + ranks_depth % pixels).int()
    depth = torch.exp(-far / 10).expand(2, depths, pixels)
    output = mx_driving.bev_pool_v3(depth, torch.ones(2, pixels, 1), ranks_depth, ranks_feat, ranks_bev, (1, 1, *cells, 1))
    figure, (ax,) = panels(1, ["16 x 28 cells"], 28 / 16)
    figure.set_size_inches(WIDTH / 2, WIDTH / 2 / 1.75 + 0.4)
    shade(ax, output[0, 0, 0], float(output.max()))
    dots(ax, place.double() - 0.5, 45, COLOURS[0])
    return figure


def write(folder: pathlib.Path) -> None:
    for picture in (multi_scale_deformable_attn, deformable_aggregation, geometric_kernel_attention, bev_pool_v3):
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "mx_driving"}):
            picture().savefig(folder / f"{picture.__name__}.svg", metadata={"Date": None})
