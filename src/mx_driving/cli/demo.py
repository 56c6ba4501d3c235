"""`mx-driving demo`: six cameras to a bird's-eye view, and the view back to the cameras, in one picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

from .._cli_support.files import PICTURES, writable, writable_photograph, writing
from .._cli_support.problems import need
from .._cli_support.show import grid, open_console, say, show
from ..viz import Look, Plane, recording
from ..viz import page as write_page

FLOOR = 26.0  # dB where seen; 29.4 measured, at most 25.5 when the map is moved by half a cell
FALL = 1000.0  # times the loss must fall; 157 thousand measured on the example rig, 289 thousand on the street
STEPS = 60


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration measured. psnr is None with a user's rig, which has no true map."""

    out: Path
    psnr: float | None
    recovered_psnr: float
    losses: list[float]
    seen: float
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether the view is good enough and the descent descended."""
        return (self.psnr is None or self.psnr >= FLOOR) and self.losses[-1] * FALL <= self.losses[0]


def run_demo(
    out: Path,
    rig: Path | None = None,
    *,
    width: int = 800,
    cells: int = 200,
    steps: int = STEPS,
    report: Any = None,
    page: Path | None = None,
) -> DemoResult:
    """Make the views, recover them, and draw the picture.

    Args:
        out: picture to write, in the format that its ending says.
        rig: rig file with photographs; without one a street is rendered.
        width: width of the rendered images (height follows, 9 : 16).
        cells: cells per side of the rendered scene's view (a rig file sets its own).
        steps: gradient steps of the recovery.
        report: called with (fraction done, what is going on).
        page: page to write, which shows where each cell of the view looks.
    Raises: RigError for a rig that cannot be used, Problem when an extra is missing or the picture could not be written.
    """
    out = Path(out)
    _look_before_work(out, page)
    from ..demo import lift, picture

    report = report or (lambda fraction, text: None)
    began = time.perf_counter()
    cameras, extent, truth, hidden = _input(rig, width, cells, report)
    report(0.25, "projecting the ground")
    plan = lift.build(cameras, extent, hidden)
    if not bool(plan.seen.any()):
        raise _rig_error(f"the cameras must see some ground inside the bev extent; got none of {extent.cells**2} cells")
    features = lift.pyramid(cameras)
    with recording() as looks:
        bev = plan(features)
    found = lift.recover(plan, bev, steps, _ticker(report, steps))
    report(0.85, "drawing")
    quality = None if truth is None else lift.psnr(bev, truth, plan.seen)
    again = lift.psnr(found.bev, bev, plan.seen)
    seen = float(plan.seen.float().mean())
    notes = _notes(cameras, extent, quality, again, seen)
    picture.draw(picture.Story(cameras, extent, plan, bev, truth, found, lift.paint(plan, found.features), *notes), out)
    if page is not None:
        report(0.95, "writing the page")
        _write_page(page, looks, cameras, extent, torch.where(plan.seen[:, None], bev, torch.tensor(picture.EMPTY)))
    return DemoResult(out, quality, again, found.losses, seen, time.perf_counter() - began)


def _input(rig: Path | None, width: int, cells: int, report: Callable[[float, str], None]) -> tuple[Any, Any, Any, Any]:
    """Cameras with images, extent, true map and occlusion test; the last two only for the rendered street."""
    from ..demo import rig as rigs

    if rig is not None:
        report(0.0, "reading the photographs")
        loaded = rigs.load_rig(rig)
        return loaded.cameras, loaded.extent, None, None
    from ..demo import scene

    report(0.0, "painting the street")
    extent = replace(rigs.Extent(), cells=cells)
    ground = scene.street()
    cameras = []
    for i, camera in enumerate(rigs.surround(width * 9 // 16, width)):
        report(0.03 + 0.03 * i, f"rendering {camera.name}")
        cameras.append(scene.photograph(camera, ground))
    report(0.2, "drawing the true map")
    return tuple(cameras), extent, scene.true_map(ground, extent), scene.hidden


def _write_page(path: Path, looks: list[Look], cameras: Any, extent: Any, view: torch.Tensor) -> None:
    """Where the cells of the lifted view look."""
    cells = extent.cells, extent.cells
    plane = Plane(cells, view.view(*cells, 3), (*extent.x, *extent.y))
    with writing("--page", path):
        write_page(looks, {c.name: c.image for c in cameras}, path, plane=plane, title="Where a bird's-eye view looks")


def _ticker(report: Callable[[float, str], None], steps: int) -> Callable[[], None]:
    done = iter(range(1, steps + 1))
    return lambda: report(0.3 + 0.55 * next(done) / steps, "recovering the view by gradient descent")


def _notes(cameras: Any, extent: Any, quality: float | None, again: float, seen: float) -> tuple[str, str, str]:
    shape = f"{extent.cells} x {extent.cells} cells of {extent.cell[0]:.2g} x {extent.cell[1]:.2g} m"
    plural = "camera" if len(cameras) == 1 else "cameras"
    caption = f"{len(cameras)} pinhole {plural}, 4 scales each, onto {shape}; {100 * seen:.0f} % of the ground is seen"
    return caption, "" if quality is None else f"PSNR {quality:.1f} dB where seen", f"PSNR {again:.1f} dB to the lifted view"


def _look_before_work(out: Path, page: Path | None) -> None:
    need("the demo", PICTURES, "matplotlib", "numpy", "PIL")
    writable_photograph("--out", out, "the demo")
    if page is not None:
        writable("--page", page)


def _rig_error(message: str) -> ValueError:
    from ..demo.rig import RigError

    return RigError(message)


def demo(
    out: Annotated[Path, typer.Option(help="Picture to write; its ending says the format.")] = Path("demo.png"),
    rig: Annotated[
        Path | None, typer.Option(help="Rig file (JSON) with your own photographs and calibration; see docs/command_line.md.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(help="Page (HTML) to write: move over the view and see where each cell looks.")
    ] = None,
) -> None:
    """Six cameras to a bird's-eye view, and back again by gradient descent.

    Cameras round a car look at a rendered street. `deformable_aggregation` gathers their images into a view from above;
    then the same view is recovered from blank feature maps through the operator's backward. One picture shows it all.
    Exit status 0 means that the view matches the true map and the descent descended.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    _look_before_work(out, page)
    console = open_console("mx-driving demo")
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=1.0)
        result = run_demo(out, rig, report=lambda f, text: progress.update(task, completed=f, description=text), page=page)
    _report(console, result)
    if page is not None:
        say(console, f"the page is in {escape(str(page))}")
    raise typer.Exit(0 if result.ok else 1)


def _report(console: Any, result: DemoResult) -> None:
    """A table of what was measured, and where the picture is; within 80 columns."""
    table = grid(None, {"what": 0, "measured": 0, "wanted": 0}, {})
    if result.psnr is not None:
        table.add_row("lifted view against the\ntrue map, where seen", f"{result.psnr:.1f} dB", f"{FLOOR:.0f} dB or more")
    first, last = result.losses[0], result.losses[-1]
    fall = f"{first:.3g} to {last:.3g}\n({first / max(last, 1e-30):.0f} times less)"
    table.add_row(f"loss over {len(result.losses)} gradient steps", fall, f"{FALL:.0f} times less\nor better")
    table.add_row("recovered view against the\nlifted view", f"{result.recovered_psnr:.1f} dB", "")
    table.add_row("ground seen by a camera", f"{100 * result.seen:.0f} %", "")
    show(console, table)
    verdict = "[bold green]all is well[/]" if result.ok else "[bold red]not good enough[/]"
    say(console, f"{verdict}, {result.seconds:.1f} s; the picture is in {escape(str(result.out))}")
