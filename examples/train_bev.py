"""Train a small network from six cameras to a map of road and vehicles, with one of four operators as view transform.

    python examples/train_bev.py --transform aggregation --out runs/aggregation
    python examples/train_bev.py --transform multi_scale --out runs/multi_scale --resume
    torchrun --nproc-per-node 2 examples/train_bev.py --transform geometric --out runs/geometric
    python examples/train_bev.py --transform lift --out runs/lift      # by depths that it learns
    python examples/train_bev.py --page looks.html      # and a page with the points that each cell reads

Scenes are rendered: the demo's street from a random place and heading, with random vehicles. The scenes of a step depend only
on the step, so that a resumed run and a run on several processes have the same losses. The folder --out gets checkpoint.pt,
losses.csv, prediction.png and, except for "lift", looks.png. The files scenes-*.pt are written beside this folder.

Needs `pip install '.[demo]'`, in the clone.
"""

from __future__ import annotations

import argparse
import csv
import math
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from sentences import at_least_one, check_place, in_a_sentence
from surround_view import scene
from surround_view.rig import Camera, surround
from torch import Tensor, nn

import mx_driving

SIZE = (72, 128)  # height and width of a camera's image
REACH = 14.4  # metres of ground to each side of the car
CLASSES = ("road", "vehicle")
HEIGHTS = (0.0, 0.5, 1.0, 1.5)  # metres: the pillar above a cell
DEPTHS = torch.arange(1.0, 21.0, 0.5)  # metres from a camera


@dataclass
class Scenes:
    """images [n, cam, 3, H, W] bytes, maps [n, class, cells, cells] bool."""

    images: Tensor
    maps: Tensor

    def __len__(self) -> int:
        return len(self.images)


def cell_centres(cells: int) -> Tensor:
    """Return ground points [cells, cells, 2] of the car's frame; both axes grow: x forward, y left."""
    line = (torch.arange(cells) + 0.5) * (2 * REACH / cells) - REACH
    return torch.stack(torch.meshgrid(line, line, indexing="ij"), -1)


def random_traffic(pose: Tensor, generator: torch.Generator) -> list[scene.Box]:
    """Return six to twelve vehicles within reach of the car, none on it and none on another."""

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    places, boxes, wanted = [(0.0, 0.0)], [], int(uniform(6, 13))
    for _ in range(200):
        place = uniform(-REACH, REACH), uniform(-REACH, REACH)
        if min(math.dist(place, other) for other in places) < 6 or len(boxes) == wanted:
            continue
        places.append(place)
        x, y = (pose[:2, :2] @ torch.tensor(place, dtype=torch.float64) + pose[:2, 3]).tolist()
        size = (scene.CAR, scene.VAN, scene.TRUCK)[int(uniform(0, 3))]
        colour = (int(uniform(30, 250)), int(uniform(30, 250)), int(uniform(30, 250)))
        boxes.append(scene.Box(x, y, uniform(0, 360), size, colour))
    return boxes


def true_map(pose: Tensor, boxes: list[scene.Box], cells: int) -> Tensor:
    """Return whether the centre of each cell lies on the road, and under a vehicle: [class, cells, cells]."""
    world = cell_centres(cells).double() @ pose[:2, :2].T + pose[:2, 3]
    x, y = world.unbind(-1)
    road = ((y > -7.4) & (y < 11.6)) | ((x > 12) & (x < 24))
    vehicle = torch.zeros_like(road)
    for box in boxes:
        along, across = ((world - torch.tensor([box.x, box.y], dtype=torch.float64)) @ box.turn()).abs().unbind(-1)
        vehicle |= (along < box.size[0] / 2) & (across < box.size[1] / 2)
    return torch.stack([road, vehicle])


def render(count: int, seed: int, cells: int, tick=lambda: None) -> Scenes:
    """Yield the scenes of a seed, the same on every machine."""
    images, maps = [], []
    ground = scene.street(per_metre=16, traffic=())
    for index in range(count):
        generator = torch.Generator().manual_seed(1_000_003 * seed + index)
        u, v, w = torch.rand(3, generator=generator).tolist()
        pose = torch.eye(4, dtype=torch.float64)
        pose[:2, :2] = scene.Box(0, 0, 360 * w, scene.CAR, (0, 0, 0)).turn()
        pose[:2, 3] = torch.tensor([60 * u - 35, 16 * v - 6])
        boxes = random_traffic(pose, generator)
        views = [replace(c, camera_to_ego=pose @ c.camera_to_ego) for c in surround(*SIZE)]
        pictures = [scene.photograph(view, ground, boxes).image for view in views]
        images.append((torch.stack(pictures).permute(0, 3, 1, 2) * 255).round().byte())
        maps.append(true_map(pose, boxes, cells))
        tick()
    return Scenes(torch.stack(images), torch.stack(maps))


def projections(cameras: tuple[Camera, ...]) -> Tensor:
    """Return matrices from metres of the car's frame to 0..1 of each image, times depth: [cam, 4, 4]."""
    matrix = torch.eye(4).repeat(len(cameras), 1, 1)
    for row, camera in zip(matrix, cameras, strict=True):
        height, width = camera.size
        to_unit = torch.tensor([1 / width, 1 / height, 1, 1], dtype=torch.float64)
        row[:] = to_unit[:, None] * camera.projection
    return matrix


def block(inside: int, outside: int, stride: int = 1) -> nn.Sequential:
    """Return a convolution with group normalisation, whose result does not depend on the number of processes."""
    return nn.Sequential(nn.Conv2d(inside, outside, 3, stride, 1), nn.GroupNorm(8, outside), nn.ReLU(inplace=True))


class Backbone(nn.Module):
    """Images [n, 3, H, W] to two maps of `channels`, strides 8 and 16."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 24, 2), block(24, 48, 2), block(48, channels, 2), block(channels, channels))
        self.deeper = nn.Sequential(block(channels, channels, 2), block(channels, channels))

    def forward(self, images: Tensor) -> list[Tensor]:
        fine = self.stem(images)
        return [fine, self.deeper(fine)]


class Aggregation(nn.Module):
    """Sparse4D's view transform: an anchor, a box, for each cell; all cameras in one call."""

    def __init__(self, channels: int, cells: int) -> None:
        super().__init__()
        fixed = [(0.0, 0.0, height / HEIGHTS[-1] - 0.5) for height in HEIGHTS]
        self.attend = mx_driving.nn.DeformableFeatureAggregation(
            channels, 4, 2, 6, num_learnable_pts=2, fix_scale=fixed, attn_drop=0.0, residual_mode="add"
        )
        centres = cell_centres(cells).flatten(0, 1)
        rest = torch.tensor([0.75, math.log(1.2), math.log(1.2), math.log(1.5), 0.0, 1.0]).expand(len(centres), -1)
        self.register_buffer("anchor", torch.cat([centres, rest], 1)[None])
        self.register_buffer("projection", projections(surround(*SIZE))[None])

    def forward(self, query: Tensor, maps: list[Tensor]) -> Tensor:
        bs = len(query)
        tables = mx_driving.nn.flatten_cameras([m.unflatten(0, (bs, 6)) for m in maps])
        anchor, projection = self.anchor.expand(bs, -1, -1), self.projection.expand(bs, -1, -1, -1)
        return self.attend(query, anchor, torch.zeros_like(query), *tables, projection)


class PerCamera(nn.Module):
    """BEVFormer's and MapTR's view transform: all cells query every camera; a cell is the mean of the cameras that see it."""

    def __init__(self, channels: int, cells: int, geometric: bool) -> None:
        super().__init__()
        self.geometric = geometric
        if geometric:
            self.attend = mx_driving.nn.GeometricKernelAttention(channels, len(HEIGHTS), 2, kernel_size=(3, 3))
            self.project = nn.Linear(channels, channels)
        else:
            self.attend = mx_driving.nn.MultiScaleDeformableAttention(channels, 4, 2, 4)
        centres = cell_centres(cells).flatten(0, 1)
        pillar = torch.stack([F.pad(centres, (0, 1), value=height) for height in HEIGHTS], 1)  # [cells, heights, 3]
        projected = torch.einsum("cij,nhj->cnhi", projections(surround(*SIZE))[:, :3], F.pad(pillar, (0, 1), value=1.0))
        place = projected[..., :2] / projected[..., 2:].clamp_min(1e-3)
        seen = ((place > 0) & (place < 1)).all(-1) & (projected[..., 2] > 0.1)
        self.register_buffer("place", place)  # [cam, cells, heights, 2]
        self.register_buffer("share", seen.any(-1) / seen.any(-1).sum(0).clamp_min(1))  # [cam, cells]

    def forward(self, query: Tensor, maps: list[Tensor]) -> Tensor:
        bs = len(query)
        tables = mx_driving.nn.flatten_levels(maps)
        # a multi-scale query reads near one reference point on every level: the pillar's middle
        reference = self.place if self.geometric else self.place.mean(2, keepdim=True).expand(-1, -1, 2, -1)
        asked = query.repeat_interleave(6, 0)
        found = self.attend(asked, reference.repeat(bs, 1, 1, 1), *tables).unflatten(0, (bs, 6))
        found = (found * self.share[..., None]).sum(1)
        return query + (self.project(found) if self.geometric else found)


class Lift(nn.Module):
    """BEVDet's view transform: a pixel spreads its feature over depths by probability, and a cell sums its points."""

    def __init__(self, channels: int, cells: int) -> None:
        super().__init__()
        self.cells = cells
        self.likely, self.project = nn.Conv2d(channels, len(DEPTHS), 1), nn.Linear(channels, channels)
        height, width = SIZE[0] // 8, SIZE[1] // 8
        pixels = mx_driving.geometry.frustum((SIZE[1], SIZE[0]), (width, height), DEPTHS)
        points = mx_driving.geometry.unproject(pixels, torch.stack([c.projection for c in surround(*SIZE)]).float())[None]
        cell, lower = 2 * REACH / cells, (-REACH, -REACH, -2.0)
        # rows of the view are x, forward: bev_ranks counts along its first axis last
        ranks = mx_driving.geometry.bev_ranks(points[..., [1, 0, 2]], lower, (cell, cell, 4.0), (cells, cells, 1))
        self.register_buffer("ranks", torch.stack(ranks)[:, None])  # of one scene
        rows = 6 * height * width
        self.register_buffer("sizes", torch.tensor([len(DEPTHS) * rows, rows, cells * cells]).int().view(3, 1, 1))

    def forward(self, query: Tensor, maps: list[Tensor]) -> Tensor:
        bs, fine = len(query), maps[0] + F.interpolate(maps[1], size=maps[0].shape[-2:])
        ranks = (self.ranks + self.sizes * torch.arange(bs, dtype=torch.int32)[:, None]).flatten(1)
        shape = (bs, 1, self.cells, self.cells, fine.shape[1])
        found = mx_driving.bev_pool_v3(self.likely(fine).softmax(1), fine.permute(0, 2, 3, 1), *ranks, shape)
        return query + self.project(found.flatten(2).transpose(1, 2))


class Network(nn.Module):
    """Images [bs, cam, 3, H, W], 0..1, to logits [bs, class, cells, cells]."""

    def __init__(self, transform: str, cells: int, channels: int = 64) -> None:
        super().__init__()
        self.cells = cells
        self.backbone = Backbone(channels)
        self.query = nn.Parameter(torch.randn(cells * cells, channels) * 0.1)
        builders = {
            "aggregation": lambda: Aggregation(channels, cells),
            "multi_scale": lambda: PerCamera(channels, cells, geometric=False),
            "geometric": lambda: PerCamera(channels, cells, geometric=True),
            "lift": lambda: Lift(channels, cells),
        }
        self.lift = builders[transform]()
        self.norm = nn.LayerNorm(channels)
        self.head = nn.Sequential(block(channels, channels), block(channels, channels), nn.Conv2d(channels, len(CLASSES), 1))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.backbone(images.flatten(0, 1) - 0.45)
        view = self.norm(self.lift(self.query.expand(len(images), -1, -1), maps))
        return self.head(view.transpose(1, 2).unflatten(2, (self.cells, self.cells)).contiguous())


def loss_of(logits: Tensor, truth: Tensor) -> Tensor:
    """Return the cross entropy, with a larger weight for cells of vehicles, which are few."""
    weight = torch.tensor([1.0, 4.0]).view(1, -1, 1, 1)
    return F.binary_cross_entropy_with_logits(logits, truth.float(), pos_weight=weight)


@torch.no_grad()
def intersection_over_union(model: nn.Module, scenes: Scenes, batch: int = 8) -> dict[str, float]:
    """Return the intersection over union of each class over all scenes."""
    hits, either = torch.zeros(len(CLASSES)), torch.zeros(len(CLASSES))
    for start in range(0, len(scenes), batch):
        guess = model(scenes.images[start : start + batch] / 255) > 0
        truth = scenes.maps[start : start + batch]
        hits += (guess & truth).sum((0, 2, 3))
        either += (guess | truth).sum((0, 2, 3))
    return dict(zip(CLASSES, (hits / either.clamp_min(1)).tolist(), strict=True))


def draw(model: nn.Module, scenes: Scenes, path: Path, title: str, count: int = 3) -> None:
    """Draw the front camera, the true map and the prediction of the first scenes, a row for each scene."""
    from matplotlib.figure import Figure

    count = min(count, len(scenes))
    figure = Figure(figsize=(9.5, 2.9 * count), layout="constrained")
    axes = figure.subplots(count, 3, width_ratios=(1.6, 1, 1), squeeze=False)
    with torch.no_grad():
        guess = model(scenes.images[:count] / 255).sigmoid()
    extent = (-REACH, REACH, -REACH, REACH)
    for row, image, truth, share in zip(axes, scenes.images, scenes.maps.float(), guess, strict=False):
        row[0].imshow(image[1].permute(1, 2, 0).numpy())
        row[0].set_axis_off()
        mx_driving.viz.bev(_coloured(truth), extent=extent, ax=row[1], title="truth")
        mx_driving.viz.bev(_coloured(share), extent=extent, ax=row[2], title="prediction")
    figure.suptitle(title, fontsize=10)
    figure.savefig(path, dpi=90)


def draw_looks(look: mx_driving.viz.Look, scenes: Scenes, path: Path) -> None:
    """Draw the points that the cell of a vehicle ahead reads in the front camera's picture."""
    front, cells = 1, scenes.maps.shape[-1]
    cell = vehicle_ahead(scenes.maps[0, 1])
    ax = mx_driving.viz.sampling_points(scenes.images[0, front], *seen_by(look, front, cell))
    ahead, left = cell_centres(cells).flatten(0, 1)[cell].tolist()
    ax.set_title(f"where the cell {ahead:.1f} m ahead and {left:.1f} m left looks", fontsize=9)
    ax.figure.savefig(path, dpi=90)


def write_page(model: Network, look: mx_driving.viz.Look, scenes: Scenes, guess: Tensor, path: Path) -> None:
    """Write a page with the points that each cell of the first scene's map reads in every camera."""
    # Every cell samples every camera, so the page needs to know which cells a camera sees. Their share is above 0.
    share = getattr(model.lift, "share", None)
    extent = (-REACH, REACH, -REACH, REACH)
    seen = None if share is None else share.T > 0
    plane = mx_driving.viz.Plane(tuple(guess.shape[1:]), _coloured(guess), extent, seen=seen)
    pictures = {camera.name: image for camera, image in zip(surround(*SIZE), scenes.images[0], strict=True)}
    mx_driving.viz.page(look, pictures, path, plane=plane, title="Where the cells of the map look")


def vehicle_ahead(vehicle: Tensor) -> int:
    """Return the cell under a vehicle that is nearest to a point 9 m ahead."""
    distance = (cell_centres(len(vehicle)) - torch.tensor([9.0, 0.0])).norm(dim=-1)
    return int(torch.where(vehicle, distance, distance + 100).argmin())


def seen_by(look: mx_driving.viz.Look, camera: int, cell: int) -> tuple[Tensor, Tensor]:
    """Return locations [..., level, point, 2] in 0..1 of the camera's picture, and weights, of the first scene."""
    if look.operator == "deformable_aggregation":
        weights = look.weights[0, cell, :, camera].mean(-1).T  # [scale, pts]
        return look.locations[0, cell, :, camera].expand(len(weights), -1, -1), weights
    places = look.locations[camera, cell]
    if look.operator == "geometric_kernel_attention":
        places = (places + 0.5) / look.shapes.flip(-1)[:, None]
    return places, look.weights[camera, cell]


def _coloured(shares: Tensor) -> Tensor:
    """Return a picture [cells, cells, 3] of probabilities [class, cells, cells]: road grey, vehicles orange."""
    road, vehicle = shares[..., None]
    ground = torch.tensor([0.13, 0.19, 0.16]) * (1 - road) + torch.tensor([0.55, 0.57, 0.60]) * road
    return ground * (1 - vehicle) + torch.tensor([1.0, 0.55, 0.1]) * vehicle


def batch_of(step: int, count: int, size: int, rank: int, world: int) -> Tensor:
    """Return this process's scenes of a step; they depend only on the step."""
    epoch, place = divmod(step * size, count - count % size)
    order = torch.randperm(count, generator=torch.Generator().manual_seed(epoch))
    return order[place : place + size][rank::world]


def cached(folder: Path, count: int, seed: int, cells: int, progress: Progress) -> Scenes:
    """Return the scenes, which the first process renders once for each folder."""
    path = folder / f"scenes-{seed}-{count}-{cells}.pt"
    if not path.exists() and _rank() == 0:
        task = progress.add_task(f"rendering {count} scenes", total=count)
        scenes = render(count, seed, cells, lambda: progress.advance(task))
        folder.mkdir(parents=True, exist_ok=True)
        torch.save((scenes.images, scenes.maps), path)
    if dist.is_initialized():
        dist.barrier()
    return Scenes(*torch.load(path))


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def train(options: argparse.Namespace) -> dict[str, float]:
    """Train, and return the intersection over union on held-out scenes."""
    import matplotlib.figure  # noqa: F401  raises now if the package is missing

    if options.out.exists() and not options.out.is_dir():
        raise ValueError(f"--out must be a folder; got {options.out}")
    if options.page is not None:
        check_place("--page", options.page)
        if options.transform == "lift":
            raise ValueError("--transform must be one that looks at places of pictures, for --page; got lift")
    if options.scenes < options.batch:
        raise ValueError(f"--scenes must be at least --batch={options.batch}; got {options.scenes}")
    rank, world = _rank(), dist.get_world_size() if dist.is_initialized() else 1
    torch.manual_seed(0)
    model = Network(options.transform, options.cells)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.rate, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, options.rate, total_steps=options.steps, pct_start=0.15)
    checkpoint, losses, earlier = options.out / "checkpoint.pt", [], 0.0
    if options.resume and checkpoint.exists():
        rule = f"{checkpoint} must be whole, and of the same --transform, --cells and --steps"
        try:
            state = torch.load(checkpoint)
            for part, name in ((model, "model"), (optimiser, "optimiser"), (schedule, "schedule")):
                part.load_state_dict(state[name])
        except Exception as error:  # torch.load raises many classes
            raise ValueError(f"{rule}; got {error}") from None
        losses, earlier = state["losses"], state["seconds"]
        if schedule.total_steps != options.steps:
            raise ValueError(f"{rule}; got {schedule.total_steps} steps")
    learner = nn.parallel.DistributedDataParallel(model) if world > 1 else model
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn()
    with Progress(*columns, disable=rank > 0) as progress:
        seen = cached(options.out.parent, options.scenes, 0, options.cells, progress)
        held_out = cached(options.out.parent, options.held_out, 1, options.cells, progress)
        options.out.mkdir(parents=True, exist_ok=True)
        began = time.perf_counter() - earlier
        task = progress.add_task("training", total=options.steps, completed=len(losses))
        for step in range(len(losses), min(options.steps, options.stop or options.steps)):
            index = batch_of(step, len(seen), options.batch, rank, world)
            loss = loss_of(learner(seen.images[index] / 255), seen.maps[index])
            optimiser.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimiser.step()
            schedule.step()
            losses.append(_mean(loss))
            progress.update(task, advance=1, description=f"training, loss {losses[-1]:.3f}")
            if rank == 0 and (len(losses) % options.save == 0 or len(losses) in (options.steps, options.stop)):
                parts = {"model": model.state_dict(), "optimiser": optimiser.state_dict(), "schedule": schedule.state_dict()}
                torch.save({**parts, "losses": losses, "seconds": time.perf_counter() - began}, checkpoint)
        seconds = time.perf_counter() - began
    return report(model, held_out, losses, seconds, options) if rank == 0 else {}


def report(model: Network, held_out: Scenes, losses: list[float], seconds: float, options: argparse.Namespace) -> dict:
    """Print and draw what was learnt, and write the curve."""
    found = intersection_over_union(model, held_out)
    scores = ", ".join(f"{name} {100 * score:.1f} %" for name, score in found.items())
    what = f"{options.transform}: IoU on {len(held_out)} held-out scenes: {scores}"
    with (options.out / "losses.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("step", "loss"), *enumerate(losses)])
    draw(model, held_out, options.out / "prediction.png", what)
    with torch.no_grad(), mx_driving.viz.recording() as looks:
        guess = model(held_out.images[:1] / 255)[0].sigmoid()
    if looks:
        draw_looks(looks[-1], held_out, options.out / "looks.png")
    if options.page is not None:
        write_page(model, looks[-1], held_out, guess, options.page)
    print(f"{what}; {len(losses)} steps, {seconds:.0f} s of training")
    print(f"checkpoint, losses and picture are in {options.out}")
    if options.page is not None:
        print(f"the page is in {options.page}")
    return found


def _mean(loss: Tensor) -> float:
    """Return the mean over the processes, which have equal shares of a batch."""
    value = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(value)
        value /= dist.get_world_size()
    return value.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transform", choices=("aggregation", "multi_scale", "geometric", "lift"), default="aggregation")
    parser.add_argument("--out", type=Path, default=Path("runs/bev"))
    parser.add_argument("--page", type=Path, help="page (HTML) to write: where each cell of a map looks")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--stop", type=int, default=0, help="stop after this step, as if interrupted")
    for name, default, what in (
        *(("steps", 300, None), ("save", 50, "steps between checkpoints"), ("cells", 48, "per side of the map")),
        *(("batch", 4, "scenes per step, of all processes together"), ("scenes", 128, None), ("held-out", 24, None)),
    ):
        parser.add_argument(f"--{name}", type=at_least_one, default=default, help=what)
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    with in_a_sentence("train_bev.py"):
        options = parser.parse_args()
        if "RANK" in os.environ:
            dist.init_process_group("gloo")
        train(options)
        if dist.is_initialized():
            dist.barrier()  # the other processes wait, because the first process still draws pictures
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
