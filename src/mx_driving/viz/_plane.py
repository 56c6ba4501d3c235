"""Lay out the queries of a page, and choose the queries that it shows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._operator import rules
from ._pictures import need_numbers


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
    _check_labels(plane, queries)
    places = plane.places
    if isinstance(places, Tensor):
        need_numbers(("plane.places", places))
        return _find_grid(_to_fractions(plane, places, queries))
    if places is None:
        columns = math.ceil(math.sqrt(queries))
        rows = -(-queries // columns)
    else:
        rows, columns = _check_rows_and_columns(places, queries)
    row, column = torch.arange(queries).div(columns, rounding_mode="floor"), torch.arange(queries) % columns
    x, y = (column + 0.5) / columns, (row + 0.5) / rows
    fractions = torch.stack([x, y] if plane.extent is None else [1 - x, 1 - y], -1)
    return PlaneLayout(fractions, torch.stack([row, column], -1))


def _check_rows_and_columns(places: Any, queries: int) -> tuple[int, int]:
    pair = isinstance(places, Sequence) and len(places) == 2 and all(type(n) is int for n in places)
    if not pair:
        rules.fail(TypeError, "plane.places", "be (rows, columns) or a torch.Tensor", repr(places)[:80])
    if places[0] * places[1] != queries or min(places) < 1:
        rules.fail(ValueError, "plane.places", f"be rows and columns of {queries} queries", tuple(places))
    return places[0], places[1]


def _to_fractions(plane: Plane, places: Tensor, queries: int) -> Tensor:
    """Convert a tensor of places to fractions of the plane."""
    widths = (2, 4) if plane.extent is None else (2,)
    if places.dim() != 2 or len(places) != queries or places.shape[1] not in widths:
        shapes = " or ".join(f"(num_queries={queries}, {n})" for n in widths)
        rules.fail(ValueError, "plane.places", f"have shape {shapes}", tuple(places.shape))
    places = places.detach().cpu().double()
    if not bool(places.isfinite().all()):
        query = int((~places.isfinite()).any(1).nonzero()[0])
        rules.fail(ValueError, "plane.places", "be finite", f"{places[query].tolist()} for query {query}")
    if plane.extent is None:
        return places
    x0, x1, y0, y1 = plane.extent
    return torch.stack([(y1 - places[:, 1]) / (y1 - y0), (x1 - places[:, 0]) / (x1 - x0)], -1)


def _find_grid(places: Tensor) -> PlaneLayout:
    """Return the layout of places. Places are a grid if every x occurs with every y."""
    axes = [torch.unique((places[:, i] * 1e5).round(), return_inverse=True) for i in (1, 0)]
    grid = torch.stack([inverse for _, inverse in axes], -1)
    rows, columns = (len(values) for values, _ in axes)
    full = rows * columns == len(places) == len(torch.unique(grid[:, 0] * columns + grid[:, 1]))
    return PlaneLayout(places, grid if full and min(rows, columns) > 1 else None)


def _check_labels(plane: Plane, queries: int) -> None:
    labels = plane.labels
    if labels is not None:
        is_list = isinstance(labels, Sequence) or hasattr(labels, "tolist")  # a NumPy array is no Sequence
        if isinstance(labels, str) or not is_list or not all(isinstance(label, str) for label in labels):
            rules.fail(TypeError, "plane.labels", "be strings, one for each query", repr(labels)[:80])
        if len(labels) != queries:
            rules.fail(ValueError, "plane.labels", f"have {queries} entries, one for each query", len(labels))


def check_extent(name: str, extent: Any) -> None:
    if extent is None:
        return
    numbers = isinstance(extent, Sequence) and len(extent) == 4 and all(isinstance(n, (int, float)) for n in extent)
    if not (numbers and -math.inf < extent[0] < extent[1] < math.inf and -math.inf < extent[2] < extent[3] < math.inf):
        rules.fail(ValueError, name, "be (x0, x1, y0, y1) in metres, rising", repr(extent))


def check_seen(seen: Any) -> Tensor | None:
    """Check the type and the axes of the mask `plane.seen`. Return the mask on the CPU."""
    if seen is None:
        return None
    need_numbers(("plane.seen", seen))
    if seen.dtype != torch.bool:
        rules.fail(TypeError, "plane.seen", "have dtype bool", str(seen.dtype).removeprefix("torch."))
    rules.need_axes("plane.seen", seen, "num_queries, cameras")
    return seen.detach().cpu()


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
