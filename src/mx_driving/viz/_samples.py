"""The calls that a page shows, their samples in one layout for all operators, and the plane with the queries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._operator import rules
from .._operator.description import OPERATORS
from ._looks import Look, to_one_layout
from ._pictures import need_numbers


class Samples(NamedTuple):
    """The samples of n queries in a camera. An axis of 1 means that all heads, or all levels, share their locations."""

    queries: Tensor  # [n], the numbers of the queries, rising
    locations: Tensor  # [n, head or 1, level or 1, point, 2], 0..1 is the picture; NaN where nothing is read
    weights: Tensor  # [n, head, level, point]


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
        """Return (num_heads, num_levels, num_points); for aggregation (groups, scales, points)."""
        weights = self.looks[0].weights
        if OPERATORS[self.operator].kind == "aggregation":
            _, _, points, _, levels, heads = weights.shape
            return heads, levels, points
        _, _, heads, levels, points = weights.shape
        return heads, levels, points

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
        """For each camera, return its look in the scene, and its index in the batch of this look."""
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
        """For each camera, yield the samples of the queries that read something there; for a single camera, of all queries."""
        for camera, (look, entry) in enumerate(self.entries):
            locations, weights = to_one_layout(look, entry, camera)
            queries = torch.arange(len(weights)) if seen is None else seen[:, camera].nonzero()[:, 0]
            if seen is not None:
                indices = queries if len(weights) == len(seen) else torch.arange(len(queries))
                locations, weights = locations[indices], weights[indices]
            if self.cameras > 1:
                read = ((weights != 0) & ~locations[..., 0].isnan()).flatten(1).any(1)
                queries, locations, weights = queries[read], locations[read], weights[read]
            yield Samples(queries, locations, weights)


def make_calls(looks: Any, cameras: int, scene: int) -> list[SampledCall]:
    """Check the argument `looks` of `page`. Return its calls.

    If a layer calls the operator once for each camera, join its successive looks to one call. Looks with one number `_call`
    have all cameras of all scenes: join all of them. Join other looks, `cameras` at a time, if the batch of one look does not
    divide into the cameras.
    """
    if isinstance(looks, Look):
        looks = [looks]
    if not isinstance(looks, (Mapping, Sequence)) or isinstance(looks, str):
        rules.fail(TypeError, "looks", "be what recording() gives", type(looks).__name__)
    named = looks if isinstance(looks, Mapping) else {f"call {i}": entry for i, entry in enumerate(looks, 1)}
    calls = []
    for name, entry in named.items():
        entries = entry if isinstance(entry, (list, tuple)) else [entry]
        wrong = [type(look).__name__ for look in entries if not isinstance(look, Look)]
        if wrong or not entries:
            fact = f"{wrong[0] if wrong else 'an empty list'} in {name}"
            rules.fail(TypeError, "looks", "hold viz.Look, as recording() gives them", fact)
        calls.append(SampledCall(str(name), tuple(entries), cameras, scene))
    if not calls:
        rules.fail(ValueError, "looks", "hold a call", "none")
    if isinstance(looks, Mapping):
        return calls

    def make_key(call: SampledCall) -> Any:
        look, *others = call.looks
        number, layer = 0 if others else look._call, call.num_scenes is None and look.layer
        return number, layer, look.operator, len(look.weights), look.weights.shape[2:]

    joined = []
    for (number, layer, operator, *_), group in itertools.groupby(calls, make_key):
        run, size = list(group), 1
        if (number or layer) and OPERATORS[operator].kind == "attention" and len(run) % cameras == 0:
            size = len(run) if number else cameras
        for i in range(0, len(run), size):
            parts = tuple(look for call in run[i : i + size] for look in call.looks)
            layers = ", ".join(dict.fromkeys(look.layer for look in parts if look.layer))
            joined.append(run[i]._replace(name=run[i].name + f" ({layers})" * bool(layers), looks=parts))
    return joined


def check(calls: Sequence[SampledCall], seen: Any) -> Tensor | None:
    """Check that the looks have queries and samples, and fit the cameras, the scene, the mask `plane.seen` and each other.
    Return the mask on the CPU."""
    if seen is not None:
        need_numbers(("plane.seen", seen))
        if seen.dtype != torch.bool:
            rules.fail(TypeError, "plane.seen", "have dtype bool", str(seen.dtype).removeprefix("torch."))
        rules.need_axes("plane.seen", seen, "num_queries, cameras")
        seen = seen.detach().cpu()
    for call in calls:
        first, *others = call.looks
        aggregation = OPERATORS[call.operator].kind == "aggregation"
        if not any(look.weights.numel() for look in call.looks):
            fact = f"weights {tuple(first.weights.shape)} in {call.name}"
            rules.fail(ValueError, "looks", "have queries and samples", fact)

        # Several looks: a look for each camera, or for each camera in each scene.
        kinds = {(look.operator, len(look.weights), look.weights.shape[2:]) for look in call.looks}
        is_count = len(call.looks) == call.cameras or (len(call.looks) % call.cameras == 0 and len(first.weights) == 1)
        if others and (aggregation or len(kinds) > 1 or not is_count):
            rule = f"be alike and of attention, one for each of the {call.cameras} cameras, where {call.name} has several"
            rules.fail(ValueError, "looks", rule, ", ".join(map(str, call.looks)))
        scenes = call.num_scenes
        if scenes is None:
            if aggregation:
                rule = f"be one for each of the cam={first.starts.shape[0]} cameras of {call.name}"
            else:
                rule = f"be one for each camera of a scene, a number that divides bs={first.weights.shape[0]} of {call.name}"
            fitting = dict.fromkeys(c.looks[0].layer for c in calls if c.num_scenes is not None and c.looks[0].layer)
            advice = ", which fits " + " and ".join(f"looks.of({layer!r})" for layer in fitting) if fitting else ""
            rules.fail(ValueError, "pictures", rule, f"{call.cameras}{advice}")
        if not 0 <= call.scene < scenes:
            rules.fail(ValueError, "scene", f"be a number from 0 to {scenes - 1} for {call.name}", call.scene)

        # The queries of each camera: all of them, or those that the camera sees.
        counts = [look.weights.shape[1] for look, _ in call.entries]
        if seen is None:
            if len(set(counts)) > 1:
                rule = f"be a mask [num_queries, cameras], because the cameras of {call.name} have different queries"
                rules.fail(ValueError, "plane.seen", rule, f"None for {' and '.join(map(str, counts))} queries")
        else:
            if seen.shape[1] != call.cameras:
                rules.fail(ValueError, "plane.seen", f"have shape (num_queries, cameras={call.cameras})", tuple(seen.shape))
            for camera, count in enumerate(counts):
                num_seen = int(seen[:, camera].sum() if others else seen.sum(0).max())
                # A single look pads all cameras of all scenes to one number of queries, as BEVFormer does.
                is_packed = not aggregation and (count == num_seen or (not others and scenes > 1 and count > num_seen))
                if count != len(seen) and not is_packed:
                    whom = f"camera {camera}" if others else "a camera"
                    rule = f"have as many rows as {call.name} has queries, or mark as many as it samples {whom} for"
                    rules.fail(ValueError, "plane.seen", rule, f"{len(seen)} rows, {num_seen} marked, and {count} queries")
        first_count, this_count = calls[0].num_queries(seen), call.num_queries(seen)
        if first_count != this_count:
            fact = f"{first_count} queries in {calls[0].name} and {this_count} in {call.name}"
            advice = "; looks.of(layer) selects the looks of a layer" if first.layer else ""
            rules.fail(ValueError, "looks", "have the same queries on one page", fact + advice)
    return seen


# ---- The plane: lay out the queries of a page, and choose the queries that it shows.


@dataclass(frozen=True, eq=False)
class Plane:
    """The positions of the queries: the cells of a map, the anchors of a scene, the boxes of a photograph.

    Args:
        places: (rows, columns) for queries in rows from the top left; or points (x, y) [num_queries, 2], or boxes
            (centre x, centre y, width, height) [num_queries, 4], where 0..1 is the plane. None: rows that form a square.
        picture: the picture under the queries, as for `page`, or None.
        extent: (x0, x1, y0, y1) in metres, as for `bev`. Places and picture are then seen from above: the first axis is x
            (forward, drawn up), the second axis y (left, drawn left), and a tensor of places holds metres.
        labels: the names of the queries, for instance their classes. None: their numbers.
        seen: [num_queries, cameras], bool, True where a query reads a camera. None: every query reads every camera. A look of
            bs=cameras, or a look for each camera, may leave out the queries that the camera does not see.
    """

    places: tuple[int, int] | Tensor | None = None
    picture: Any = None
    extent: tuple[float, float, float, float] | None = None
    labels: Sequence[str] | None = None
    seen: Tensor | None = None


class PlaneLayout(NamedTuple):
    """The places of all queries on the plane, 0..1 from the top left, and the rows and columns of queries in a grid."""

    places: Tensor  # [num_queries, 2 or 4]
    grid: Tensor | None  # [num_queries, 2], (row, column)


def lay_out(plane: Plane, queries: int) -> PlaneLayout:
    """Check the plane. Return the places of its queries."""
    check_extent("plane.extent", plane.extent)
    places, labels = plane.places, plane.labels
    if labels is not None:
        is_list = isinstance(labels, Sequence) or hasattr(labels, "tolist")  # a NumPy array is no Sequence
        if isinstance(labels, str) or not is_list or not all(isinstance(label, str) for label in labels):
            rules.fail(TypeError, "plane.labels", "be strings, one for each query", repr(labels)[:80])
        if len(labels) != queries:
            rules.fail(ValueError, "plane.labels", f"have {queries} entries, one for each query", len(labels))

    if not isinstance(places, Tensor):
        columns = math.ceil(math.sqrt(queries))
        rows = -(-queries // columns)
        if places is not None:
            if not (isinstance(places, Sequence) and len(places) == 2 and all(type(n) is int for n in places)):
                rules.fail(TypeError, "plane.places", "be (rows, columns) or a torch.Tensor", repr(places)[:80])
            if places[0] * places[1] != queries or min(places) < 1:
                rules.fail(ValueError, "plane.places", f"be rows and columns of {queries} queries", tuple(places))
            rows, columns = places
        row, column = torch.arange(queries).div(columns, rounding_mode="floor"), torch.arange(queries) % columns
        x, y = (column + 0.5) / columns, (row + 0.5) / rows
        fractions = torch.stack([x, y] if plane.extent is None else [1 - x, 1 - y], -1)
        return PlaneLayout(fractions, torch.stack([row, column], -1))

    need_numbers(("plane.places", places))
    widths = (2, 4) if plane.extent is None else (2,)
    if places.dim() != 2 or len(places) != queries or places.shape[1] not in widths:
        shapes = " or ".join(f"(num_queries={queries}, {n})" for n in widths)
        rules.fail(ValueError, "plane.places", f"have shape {shapes}", tuple(places.shape))
    places = places.detach().cpu().double()
    if not bool(places.isfinite().all()):
        query = int((~places.isfinite()).any(1).nonzero()[0])
        rules.fail(ValueError, "plane.places", "be finite", f"{places[query].tolist()} for query {query}")
    if plane.extent is not None:
        x0, x1, y0, y1 = plane.extent
        places = torch.stack([(y1 - places[:, 1]) / (y1 - y0), (x1 - places[:, 0]) / (x1 - x0)], -1)
    # Places are a grid if every x occurs with every y.
    axes = [torch.unique((places[:, i] * 1e5).round(), return_inverse=True) for i in (1, 0)]
    grid = torch.stack([inverse for _, inverse in axes], -1)
    rows, columns = (len(values) for values, _ in axes)
    full = rows * columns == len(places) == len(torch.unique(grid[:, 0] * columns + grid[:, 1]))
    return PlaneLayout(places, grid if full and min(rows, columns) > 1 else None)


def check_extent(name: str, extent: Any) -> None:
    if extent is None:
        return
    numbers = isinstance(extent, Sequence) and len(extent) == 4 and all(isinstance(n, (int, float)) for n in extent)
    if not (numbers and -math.inf < extent[0] < extent[1] < math.inf and -math.inf < extent[2] < extent[3] < math.inf):
        rules.fail(ValueError, name, "be (x0, x1, y0, y1) in metres, rising", repr(extent))


def choose_queries(laid: PlaneLayout, most: int) -> tuple[Tensor, str]:
    """Return at most `most` evenly spread queries, and a sentence about queries that are left out."""
    count = len(laid.places)
    if count <= most:
        return torch.arange(count), ""
    if laid.grid is None:
        kept = torch.linspace(0, count - 1, most).round().long().unique()
        return kept, f"{len(kept):,} of {count:,} queries are shown, evenly spread over their numbers."
    sizes = laid.grid.amax(0) + 1
    step = 2
    while math.prod((-(-sizes // step)).tolist()) > most:
        step += 1
    offset = (sizes - 1).clamp_max((step - 1) // 2)
    kept = (laid.grid % step == offset).all(1).nonzero()[:, 0]
    which = {2: "second", 3: "third"}.get(step, f"{step}th")
    return kept, f"{len(kept):,} of {count:,} queries are shown: those of every {which} row and column."
