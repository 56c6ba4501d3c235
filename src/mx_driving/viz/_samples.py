"""Read the samples of a call, camera by camera, in one layout for all operators: locations on the picture, and weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._operator import rules
from .._operator.description import OPERATORS
from ._looks import Look, to_one_layout


class Samples(NamedTuple):
    """The samples of n queries in a camera. An axis of 1 means that all heads, or all levels, share their locations."""

    queries: Tensor  # [n], the numbers of the queries, rising
    locations: Tensor  # [n, head or 1, level or 1, point, 2], 0..1 is the picture; NaN where nothing is read
    weights: Tensor  # [n, head, level, point]

    @property
    def read(self) -> Tensor:
        """Return the mask [n] of the queries that read something in this camera."""
        return ((self.weights != 0) & ~self.locations[..., 0].isnan()).flatten(1).any(1)

    def select(self, queries: Tensor) -> Samples:
        kept = torch.isin(self.queries, queries)
        return Samples(*(t[kept] for t in self))


class SampledCall(NamedTuple):
    """A call as a page shows it: one look; a look for each camera; or a look for each camera in each scene, the cameras of the
    first scene first. A camera's look may leave out the queries that the camera does not see."""

    name: str
    looks: tuple[Look, ...]
    cameras: int
    scene: int

    @property
    def operator(self) -> str:
        return self.looks[0].operator

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return (num_heads, num_levels, num_points); groups are heads and scales are levels."""
        weights = self.looks[0].weights
        if OPERATORS[self.operator].kind == "aggregation":
            _, _, points, _, levels, heads = weights.shape
            return heads, levels, points
        _, _, heads, levels, points = weights.shape
        return heads, levels, points

    @property
    def shapes(self) -> Tensor:
        """Return the (H, W) of each camera's levels, [camera, level, 2]."""
        if OPERATORS[self.operator].kind == "aggregation":
            return self.looks[0].shapes.cpu()
        return torch.stack([look.shapes.cpu() for look, _ in self.entries])

    @property
    def num_scenes(self) -> int | None:
        """Return the number of scenes in the batch, or None if the batch does not divide into scenes of these cameras."""
        first, *others = self.looks
        batch = first.weights.shape[0]
        if others:
            return batch * (len(self.looks) // self.cameras)
        if OPERATORS[self.operator].kind == "aggregation":
            return batch if first.starts.shape[0] == self.cameras else None
        return None if batch % self.cameras else batch // self.cameras

    @property
    def entries(self) -> list[tuple[Look, int]]:
        """Return the look of each camera in the scene, and the entry of the look's batch."""
        first, *others = self.looks
        if OPERATORS[self.operator].kind == "aggregation":
            return [(first, self.scene)] * self.cameras
        if not others:
            return [(first, self.scene * self.cameras + camera) for camera in range(self.cameras)]
        if len(self.looks) == self.cameras:
            return [(look, self.scene) for look in self.looks]
        return [(look, 0) for look in self.looks[self.scene * self.cameras :][: self.cameras]]

    def num_queries(self, seen: Tensor | None) -> int:
        return self.entries[0][0].weights.shape[1] if seen is None else len(seen)

    def samples(self, seen: Tensor | None) -> Iterator[Samples]:
        for camera, (look, entry) in enumerate(self.entries):
            locations, weights = to_one_layout(look, entry, camera)
            if seen is None:
                yield Samples(torch.arange(len(weights)), locations, weights)
                continue
            queries = seen[:, camera].nonzero()[:, 0]
            indices = queries if len(weights) == len(seen) else torch.arange(len(queries))
            yield Samples(queries, locations[indices], weights[indices])


def check(calls: Sequence[SampledCall], seen: Tensor | None) -> None:
    """Check that the looks have queries and samples, and fit the cameras, the scene and each other."""
    for call in calls:
        if not any(look.weights.numel() for look in call.looks):
            fact = f"weights {tuple(call.looks[0].weights.shape)} in {call.name}"
            rules.fail(ValueError, "looks", "have queries and samples", fact)
        _check_cameras(call, calls)
        if seen is not None:
            _check_seen(call, seen)
        elif len({look.weights.shape[1] for look, _ in call.entries}) > 1:
            counts = " and ".join(str(look.weights.shape[1]) for look, _ in call.entries)
            rule = f"be a mask [num_queries, cameras], because the cameras of {call.name} have different queries"
            rules.fail(ValueError, "plane.seen", rule, f"None for {counts} queries")
    first = calls[0]
    for call in calls:
        counts = [c.num_queries(seen) for c in (first, call)]
        if counts[0] != counts[1]:
            fact = f"{counts[0]} queries in {first.name} and {counts[1]} in {call.name}"
            advice = "; looks.of(layer) selects the looks of a layer" if call.looks[0].layer else ""
            rules.fail(ValueError, "looks", "have the same queries on one page", fact + advice)


def _check_cameras(call: SampledCall, calls: Sequence[SampledCall]) -> None:
    """Check that there is a picture for each camera, and that the scene is in the batch."""
    first, scenes = call.looks[0], call.num_scenes
    if len(call.looks) > 1:
        _check_looks_of_cameras(call)
    if scenes is None:
        if OPERATORS[call.operator].kind == "aggregation":
            rule = f"be one for each of the cam={first.starts.shape[0]} cameras of {call.name}"
        else:
            rule = f"be one for each camera of a scene, a number that divides bs={first.weights.shape[0]} of {call.name}"
        fitting = dict.fromkeys(c.looks[0].layer for c in calls if c.num_scenes is not None and c.looks[0].layer)
        advice = ", which fits " + " and ".join(f"looks.of({layer!r})" for layer in fitting) if fitting else ""
        rules.fail(ValueError, "pictures", rule, f"{call.cameras}{advice}")
    if not 0 <= call.scene < scenes:
        rules.fail(ValueError, "scene", f"be a number from 0 to {scenes - 1} for {call.name}", call.scene)


def _check_looks_of_cameras(call: SampledCall) -> None:
    """Check several looks: a look for each camera (in each scene, if no look has several scenes), all of the same attention
    operator and of the same sizes."""
    kinds = {(look.operator, len(look.weights), look.weights.shape[2:]) for look in call.looks}
    count, batch = len(call.looks), call.looks[0].weights.shape[0]
    is_count = count == call.cameras or (count % call.cameras == 0 and batch == 1)
    if OPERATORS[call.operator].kind == "aggregation" or len(kinds) > 1 or not is_count:
        rule = f"be alike and of attention, one for each of the {call.cameras} cameras, where {call.name} has several"
        rules.fail(ValueError, "looks", rule, ", ".join(map(str, call.looks)))


def _check_seen(call: SampledCall, seen: Tensor) -> None:
    """Check that a look has all queries, or those that its camera sees. BEVFormer pads all cameras to one number of queries."""
    if seen.shape[1] != call.cameras:
        rules.fail(ValueError, "plane.seen", f"have shape (num_queries, cameras={call.cameras})", tuple(seen.shape))
    counts = seen.sum(0).tolist()
    for camera, (look, _) in enumerate(call.entries):
        num_queries = look.weights.shape[1]
        num_seen = counts[camera] if len(call.looks) > 1 else max(counts)
        # A batch of scenes may be padded to the queries that another scene's camera sees.
        is_padded = len(call.looks) == 1 and call.num_scenes != 1 and num_queries > num_seen
        is_packed = (num_queries == num_seen or is_padded) and OPERATORS[look.operator].kind != "aggregation"
        if num_queries != len(seen) and not is_packed:
            whom = f"camera {camera}" if len(call.looks) > 1 else "a camera"
            rule = f"have as many rows as {call.name} has queries, or mark as many as it samples {whom} for"
            rules.fail(ValueError, "plane.seen", rule, f"{len(seen)} rows, {num_seen} marked, and {num_queries} queries")
