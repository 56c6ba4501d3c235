"""The picture of the example: camera images, the view from above, and its recovery by gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .lift import Lift, Recovery
from .rig import Camera, Extent

INK, FAINT, PAPER, EMPTY = "#e8eaf0", "#8b93a7", "#12151d", (0.105, 0.12, 0.16)
COLOURS = ("#ff8a65", "#ffd54f", "#81c784", "#4fc3f7", "#9575cd", "#f06292")


@dataclass(frozen=True)
class Story:
    """The contents of the picture."""

    cameras: tuple[Camera, ...]
    extent: Extent
    lift: Lift
    bev: Tensor  # [cells * cells, 3]
    truth: Tensor | None
    recovery: Recovery
    pictures: list[Tensor]  # recovered camera images [H, W, 4]
    caption: str
    bev_note: str
    recovery_note: str


def draw(story: Story, out: Path) -> None:
    """Draw the picture and write it to a file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(16, 12.7), dpi=88, facecolor=PAPER)
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(3, 1, height_ratios=(4.5, 5.45, 1.5), left=0.02, right=0.98, top=0.905, bottom=0.0, hspace=0.1)
    figure.text(0.02, 0.967, "Surround view to bird's-eye view", color=INK, fontsize=21, weight="bold")
    figure.text(0.02, 0.945, story.caption, color=FAINT, fontsize=12)
    _top(figure, grid[0], story)
    _views(figure, grid[1], story)
    _strip(figure, grid[2], [p.numpy() for p in story.pictures], story.cameras, "recovered: ")
    _save(figure, out)


def _save(figure: Any, out: Path) -> None:
    """Write the figure without transparency: fewer bytes, and not every format has it."""
    from PIL import Image

    figure.canvas.draw()
    width, height = figure.canvas.get_width_height()
    image = Image.frombuffer("RGBA", (width, height), figure.canvas.buffer_rgba(), "raw", "RGBA", 0, 1).convert("RGB")
    image.save(out)


def _top(figure: Any, place: Any, story: Story) -> None:
    """Draw the cameras' images on the left, the loss curve on the right."""
    left, right = place.subgridspec(1, 2, width_ratios=(2.62, 1), wspace=0.09)
    count = len(story.cameras)
    columns = count if count < 3 else -(-count // 2)
    panes = left.subgridspec(-(-count // columns), columns, wspace=0.03, hspace=0.14)
    for i, camera in enumerate(story.cameras):
        assert camera.image is not None
        axes = figure.add_subplot(panes[i // columns, i % columns])
        axes.imshow(camera.image.numpy())
        _frame(axes, camera.name, COLOURS[i % len(COLOURS)])
    _curve(figure.add_subplot(right.subgridspec(2, 1, height_ratios=(14, 1), hspace=0)[0]), story.recovery.losses)


def _curve(axes: Any, losses: list[float]) -> None:
    axes.set_facecolor("#171b25")
    axes.semilogy(range(1, len(losses) + 1), losses, color="#4fc3f7", linewidth=2.2)
    axes.fill_between(range(1, len(losses) + 1), losses, min(losses) * 0.7, color="#4fc3f7", alpha=0.12)
    axes.set_ylim(min(losses) * 0.7, max(losses) * 1.6)
    axes.set_xlim(1, len(losses))
    axes.set_title("loss, from blank feature maps on", color=INK, fontsize=12, loc="left")
    axes.tick_params(colors=FAINT, which="both", labelsize=10)
    axes.grid(color="#2a3040", linewidth=0.7)
    for spine in axes.spines.values():
        spine.set_color("#2a3040")
    axes.text(
        0.97, 0.93, f"{losses[0]:.3g}  to  {losses[-1]:.2g}", transform=axes.transAxes, color=INK, ha="right", fontsize=12
    )


def _views(figure: Any, place: Any, story: Story) -> None:
    """Draw three maps: lifted, true (or how many cameras see each cell), recovered."""
    cells, lift = story.extent.cells, story.lift
    mask = lift.seen.view(cells, cells, 1)
    empty = torch.tensor(EMPTY)
    masked = lambda view: torch.where(mask, view.view(cells, cells, 3).clamp(0, 1), empty)  # noqa: E731
    panes = place.subgridspec(1, 3, wspace=0.06)
    lifted, other, found = (figure.add_subplot(panes[i]) for i in range(3))
    _map(lifted, masked(story.bev), story, "lifted by deformable_aggregation", story.bev_note)
    if story.truth is not None:
        _map(other, story.truth.view(cells, cells, 3), story, "true map", "dimmed where no camera sees it", dim=~mask)
    else:
        _map(other, _coverage(lift, cells), story, "cameras per cell", "dark none, blue one, brighter more")
    _map(found, masked(story.recovery.bev), story, "recovered by descent", story.recovery_note)


def _coverage(lift: Lift, cells: int) -> Tensor:
    shades = torch.tensor([EMPTY, (0.16, 0.38, 0.62), (0.31, 0.76, 0.97), (0.85, 0.95, 1.0)])
    return shades[lift.cameras.clamp(max=3)].view(cells, cells, 3)


def _map(axes: Any, view: Tensor, story: Story, title: str, note: str, dim: Tensor | None = None) -> None:
    """Draw a bird's-eye view with forward up and left on the left, the car and each camera's field of view."""
    if dim is not None:
        view = torch.where(dim, view * 0.35, view)
    (x0, x1), (y0, y1) = story.extent.x, story.extent.y
    axes.imshow(view.flip(0, 1).numpy(), extent=(y1, y0, x0, x1), interpolation="nearest")
    for i, camera in enumerate(story.cameras):
        _wedge(axes, camera, COLOURS[i % len(COLOURS)], 0.09 * (x1 - x0))
    if x0 < -1 and x1 > 4 and y0 < -1 and y1 > 1 and not _sees_own_car(story):
        axes.fill([0.9, 0.9, -0.9, -0.9], [-0.9, 3.6, 3.6, -0.9], color=INK, alpha=0.9, zorder=4)
        axes.fill([0.7, 0.7, -0.7, -0.7], [1.6, 2.5, 2.5, 1.6], color=PAPER, zorder=5)
    axes.set_xlim(y1, y0)
    axes.set_ylim(x0, x1)
    axes.set_aspect("equal")
    _frame(axes, title, INK)
    axes.text(1, 1.02, note, transform=axes.transAxes, color=FAINT, fontsize=11, ha="right")


def _sees_own_car(story: Story) -> bool:
    """Return whether the cameras see the ground where the car would be drawn."""
    (x0, x1), (y0, y1), cells = story.extent.x, story.extent.y, story.extent.cells
    row, column = int((1.35 - x0) / (x1 - x0) * cells), int(-y0 / (y1 - y0) * cells)
    return bool(story.lift.seen.view(cells, cells)[row, column])


def _wedge(axes: Any, camera: Camera, colour: str, reach: float) -> None:
    """Return the two edges of a camera's field of view, seen from above."""
    inverse = torch.linalg.inv(camera.intrinsics)
    x, y = camera.position[:2].tolist()
    for u in (-0.5, camera.size[1] - 0.5):
        ray = camera.camera_to_ego[:3, :3] @ inverse @ torch.tensor([u, camera.size[0] / 2, 1.0], dtype=torch.float64)
        dx, dy = (ray[:2] / ray[:2].norm() * reach).tolist()
        axes.plot([y, y + dy], [x, x + dx], color=colour, linewidth=1.4, alpha=0.9, zorder=6)


def _strip(figure: Any, place: Any, pictures: list[Any], cameras: tuple[Camera, ...], prefix: str) -> None:
    """Draw the recovered camera images in one row."""
    panes = place.subgridspec(1, max(len(pictures), 4), wspace=0.04)
    for i, picture in enumerate(pictures):
        axes = figure.add_subplot(panes[i])
        axes.set_facecolor(EMPTY)
        axes.imshow(picture)
        _frame(axes, prefix + cameras[i].name, COLOURS[i % len(COLOURS)])


def _frame(axes: Any, title: str, colour: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_anchor("NW")
    axes.set_title(title, color=colour, fontsize=12, loc="left", pad=4, parse_math=False)  # a camera's name is no formula
    for spine in axes.spines.values():
        spine.set_visible(False)
