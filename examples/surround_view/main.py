"""Six cameras to a bird's-eye view, and back again by gradient descent.

    python examples/surround_view/main.py --out demo.png --page looks.html
    python examples/surround_view/main.py --rig examples/surround_view/rig.json       # photographs and their calibration

Cameras around a car look at a rendered street. `deformable_aggregation` gathers their images into a view from above. Gradient
descent then recovers feature maps from this view, through the operator's backward. --out gets a picture of both, --page a page
that shows where each cell looks. Exit status 0 means that the view matches the true map and that the loss has fallen.

Needs `pip install '.[demo]'`, in the clone.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mx_driving import viz

sys.path.insert(0, str(Path(__file__).parents[1]))
from sentences import in_a_sentence

from surround_view import lift, picture, scene
from surround_view.rig import Extent, load_rig, surround

FLOOR = 26.0  # dB where seen; 29.4 measured, at most 25.5 when the map is moved by half a cell
FALL = 1000.0  # The loss must fall by this factor. Measured: 157,000 on the example rig, 289,000 on the street.


@dataclass(frozen=True)
class Result:
    """The quality of the view and of the recovery. psnr is None for a user's rig, which has no true map."""

    psnr: float | None
    recovered_psnr: float
    losses: list[float]
    seen: float

    @property
    def ok(self) -> bool:
        """Return whether the view is good enough and the loss has decreased."""
        return (self.psnr is None or self.psnr >= FLOOR) and self.losses[-1] * FALL <= self.losses[0]


def run(
    out: Path, rig: Path | None = None, page: Path | None = None, width: int = 800, cells: int = 200, steps: int = 60
) -> Result:
    """Compute the views, recover them, draw the picture, and write the page."""
    if rig is None:
        print("rendering a street", flush=True)
        ground, extent, hidden = scene.street(), replace(Extent(), cells=cells), scene.hidden
        cameras = tuple(scene.photograph(camera, ground) for camera in surround(width * 9 // 16, width))
        truth = scene.true_map(ground, extent)
    else:
        (cameras, extent), truth, hidden = load_rig(rig), None, None
    plan = lift.build(cameras, extent, hidden)
    if not bool(plan.seen.any()):
        raise ValueError(f"the cameras must see some ground inside the bev extent; got none of {extent.cells**2} cells")
    with viz.recording() as looks:
        bev = plan(lift.pyramid(cameras))
    print("recovering the view by gradient descent", flush=True)
    recovery = lift.recover(plan, bev, steps)
    quality = None if truth is None else lift.psnr(bev, truth, plan.seen)
    result = Result(quality, lift.psnr(recovery.bev, bev, plan.seen), recovery.losses, float(plan.seen.float().mean()))
    shape = f"{extent.cells} x {extent.cells} cells of {extent.cell[0]:.2g} x {extent.cell[1]:.2g} m"
    caption = f"{len(cameras)} pinhole cameras, 4 scales each, onto {shape}; {100 * result.seen:.0f} % of the ground is seen"
    notes = "" if quality is None else f"PSNR {quality:.1f} dB where seen", f"PSNR {result.recovered_psnr:.1f} dB to it"
    painted = lift.paint(plan, recovery.features)
    picture.draw(picture.Story(cameras, extent, plan, bev, truth, recovery, painted, caption, *notes), out)
    if page is not None:
        view = torch.where(plan.seen[:, None], bev, torch.tensor(picture.EMPTY)).view(extent.cells, extent.cells, 3)
        plane = viz.Plane((extent.cells, extent.cells), view, (*extent.x, *extent.y))
        viz.page(looks, {c.name: c.image for c in cameras}, page, plane=plane, title="Where a bird's-eye view looks")
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="picture to write; its ending says the format")
    parser.add_argument("--rig", type=Path, help="rig file (JSON) with your own photographs and calibration")
    parser.add_argument("--page", type=Path, help="page (HTML) to write: move over the view and see where each cell looks")
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    with in_a_sentence("surround_view"):
        result = run(options.out, options.rig, options.page)
    if result.psnr is not None:
        print(f"lifted view against the true map, where seen: {result.psnr:.1f} dB ({FLOOR:.0f} or more)")
    first, last = result.losses[0], result.losses[-1]
    print(f"loss: {first:.3g} to {last:.3g}, {first / max(last, 1e-30):.0f} times less ({FALL:.0f} or more)")
    print(f"recovered view against the lifted view: {result.recovered_psnr:.1f} dB")
    verdict = "all is well" if result.ok else "not good enough"
    print(f"{verdict}, {time.perf_counter() - began:.1f} s; the picture is in {options.out}")
    sys.exit(0 if result.ok else 1)


if __name__ == "__main__":
    main()
