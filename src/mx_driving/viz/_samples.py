"""The samples of a call, camera by camera, in one form for all operators: locations on the picture, and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._operator import geometry, rules
from .._operator.description import OPERATORS
from ._looks import Look


class Samples(NamedTuple):
    """Samples of n queries in one camera. Locations are shared by heads or levels where that axis is 1."""

    queries: Tensor  # [n], rising numbers of queries
    locations: Tensor  # [n, head or 1, level or 1, point, 2], 0..1 is the picture; NaN where nothing is read
    weights: Tensor  # [n, head, level, point]

    @property
    def read(self) -> Tensor:
        """Which queries read something here: [n]."""
        return ((self.weights != 0) & ~self.locations[..., 0].isnan()).flatten(1).any(1)

    def of(self, queries: Tensor) -> Samples:
        kept = torch.isin(self.queries, queries)
        return Samples(*(t[kept] for t in self))


class SampledCall(NamedTuple):
    """One call as a page shows it: a look, or one for each camera, whose rows are then the queries that the camera sees."""

    name: str
    looks: tuple[Look, ...]
    cameras: int
    scene: int

    @property
    def operator(self) -> str:
        return self.looks[0].operator

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many heads, levels and points: [head, level, point]."""
        weights = self.looks[0].weights
        if OPERATORS[self.operator].kind == "aggregation":
            _, _, points, _, levels, heads = weights.shape
            return heads, levels, points
        _, _, heads, levels, points = weights.shape
        return heads, levels, points

    @property
    def shapes(self) -> Tensor:
        """(H, W) of the levels of each camera: [camera, level, 2]."""
        shapes = torch.stack([look.shapes.cpu() for look in self.looks])
        return (shapes[0] if shapes.dim() == 4 else shapes).expand(self.cameras, -1, -1)

    def queries(self, seen: Tensor | None) -> int:
        """How many queries there are in all."""
        return self.looks[0].weights.shape[1] if seen is None else len(seen)

    def samples(self, seen: Tensor | None) -> Iterator[Samples]:
        for camera in range(self.cameras):
            look = self.looks[camera if len(self.looks) > 1 else 0]
            entry = self._entry(camera, look)
            locations, weights = _one_form(look, entry, camera)
            if seen is None:
                yield Samples(torch.arange(len(weights)), locations, weights)
                continue
            queries = seen[:, camera].nonzero()[:, 0]
            rows = queries if len(weights) == len(seen) else torch.arange(len(queries))
            yield Samples(queries, locations[rows], weights[rows])

    def _entry(self, camera: int, look: Look) -> int:
        """The place of a camera in the batch."""
        if len(self.looks) > 1 or OPERATORS[look.operator].kind == "aggregation":
            return self.scene
        return self.scene * self.cameras + camera


def _one_form(look: Look, entry: int, camera: int) -> tuple[Tensor, Tensor]:
    """Locations and weights of all queries in one camera."""
    if OPERATORS[look.operator].kind == "aggregation":
        locations = look.locations[entry, :, :, camera].cpu().float()
        within = geometry.inside(locations)[..., None]
        weights = look.weights[entry, :, :, camera].permute(0, 3, 2, 1)
        return locations.where(within, torch.nan)[:, None, None], weights.cpu().float()
    locations, weights = look.locations[entry].cpu().float(), look.weights[entry].cpu().float()
    sizes = look.shapes.cpu().flip(-1).float()[:, None]  # (W, H) of each level
    if OPERATORS[look.operator].rows == 1:  # whole pixels, truncated and clamped
        return ((locations.nan_to_num(0.0).trunc().clamp_min(0).minimum(sizes - 1)) + 0.5) / sizes, weights
    shown = geometry.on_map(geometry.pixels(locations, sizes), sizes)
    return locations.where(shown[..., None], torch.nan), weights


def check(calls: Sequence[SampledCall], seen: Tensor | None) -> None:
    """The looks have queries and samples, and fit the cameras, the scene and each other."""
    for call in calls:
        for look in call.looks:
            if look.weights.numel() == 0:
                fact = f"weights {tuple(look.weights.shape)} in {call.name}"
                rules.fail(ValueError, "looks", "have queries and samples", fact)
        _check_cameras(call)
        if seen is not None:
            _check_seen(call, seen)
    counts = [call.queries(seen) for call in calls]
    if len(set(counts)) > 1:
        fact = " and ".join(f"{n} queries" for n in dict.fromkeys(counts))
        rules.fail(ValueError, "looks", "have the same queries on one page", fact)


def _check_cameras(call: SampledCall) -> None:
    """There is a picture for each camera, and the scene is in the batch."""
    first = call.looks[0]
    grouped, batch, cameras = OPERATORS[call.operator].kind == "aggregation", first.weights.shape[0], call.cameras
    scenes = batch
    if len(call.looks) > 1:
        _check_one_for_each(call)
    elif grouped:
        if first.starts.shape[0] != cameras:
            rule = f"be one for each of the cam={first.starts.shape[0]} cameras of {call.name}"
            rules.fail(ValueError, "pictures", rule, cameras)
    else:
        scenes = batch // cameras
        if batch % cameras:
            rule = f"be one for each camera of a scene, a number that divides bs={batch} of {call.name}"
            rules.fail(ValueError, "pictures", rule, cameras)
    if not 0 <= call.scene < scenes:
        rules.fail(ValueError, "scene", f"be a number from 0 to {scenes - 1} for {call.name}", call.scene)


def _check_one_for_each(call: SampledCall) -> None:
    """Several looks make a call if they are of one attention operator, a camera each, with the same sizes."""
    kinds = {(look.operator, len(look.weights), look.weights.shape[2:]) for look in call.looks}
    if OPERATORS[call.operator].kind == "aggregation" or len(kinds) > 1 or len(call.looks) != call.cameras:
        rule = f"be alike and of attention, one for each of the {call.cameras} cameras, where {call.name} has several"
        rules.fail(ValueError, "looks", rule, ", ".join(map(str, call.looks)))


def _check_seen(call: SampledCall, seen: Tensor) -> None:
    """Rows are all queries, or those that the camera sees: alone, or padded to the longest as BEVFormer pads them."""
    if seen.shape[1] != call.cameras:
        rules.fail(ValueError, "plane.seen", f"have shape (num_queries, cameras={call.cameras})", tuple(seen.shape))
    counts = seen.sum(0).tolist()
    for camera, look in enumerate(call.looks):
        rows = look.weights.shape[1]
        num_seen = counts[camera] if len(call.looks) > 1 else max(counts)
        packed = rows == num_seen and OPERATORS[look.operator].kind != "aggregation"
        if rows != len(seen) and not packed:
            whom = f"camera {camera}" if len(call.looks) > 1 else "a camera"
            rule = f"have as many rows as {call.name} has queries, or mark as many as it samples {whom} for"
            rules.fail(ValueError, "plane.seen", rule, f"{len(seen)} rows, {num_seen} marked, and {rows} queries")
