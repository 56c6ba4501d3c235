"""Ways in which an implementation goes wrong: known differences of vendors' versions, and usual mistakes.

Each is the operator once more, with the mistake. `explain.py` looks which of them gives what the device gave.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _geometry
from .._measure import plain
from .compute import Core, core

_SCALE, _AGGREGATION, _GEOMETRIC = "multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention"
_NORMALISED = (_SCALE, _AGGREGATION)
_ALL = (_SCALE, _AGGREGATION, _GEOMETRIC)
_ATTENTION = (_SCALE, _GEOMETRIC)
_POOL = ("bev_pool_v3",)
_ORDERS = math.factorial(4)


class Suspect(NamedTuple):
    """A mistake: its words, the operators that can have it, and a function of the operator's core and its inputs."""

    words: str
    operators: tuple[str, ...]
    run: Callable[..., Tensor]

    def form(self, operator: str) -> Core:
        return lambda *inputs: self.run(core(operator), *inputs)


def _size(shapes: Tensor, locations: Tensor) -> Tensor:
    """(width, height) of each sample's map. An aggregation's scales share their locations: the largest stands for all."""
    size = shapes.flip(-1).to(locations.dtype)
    return size[:, 0] if shapes.dim() == 3 else size[:, None]


def _by_scale(move: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Locations moved by a function of them and of their maps' sizes. Scales of an aggregation are summed one by one."""

    def run(of: Core, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        if shapes.dim() == 2:
            return of(value, shapes, starts, move(locations, _size(shapes, locations)), weights)
        total = torch.zeros((), dtype=value.dtype)
        for s in range(shapes.shape[1]):
            tables = shapes[:, s : s + 1], starts[:, s : s + 1]
            moved = torch.where(_geometry.inside(locations)[..., None], move(locations, _size(tables[0], locations)), torch.nan)
            total = total + of(value, *tables, moved, weights[:, :, :, :, s : s + 1])
        return total

    return run


def _clamped(axes: tuple[int, int]) -> Callable[..., Tensor]:
    """Locations moved to the border's pixels, along these axes."""
    along = torch.tensor(axes, dtype=torch.bool)
    return _by_scale(lambda at, size: torch.where(along, torch.minimum(torch.maximum(at, 0.5 / size), 1 - 0.5 / size), at))


def _swapped(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return of(v, s, t, l.flip(-1), w)


def _turned(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return of(v, s.flip(-1), t, l, w)


def _packed(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return of(v, s, _geometry.starts_of(s), l, w)


def _levels_with_points(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return of(v, s, t, l, w.transpose(3, 4).reshape(w.shape))


def _points_with_levels(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return of(v, s, t, l.transpose(3, 4).reshape(l.shape), w)


def _channels_first(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return of(v, s, t, l, w).unflatten(2, v.shape[2:]).transpose(2, 3).flatten(2)


def _interleaved(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    groups = w.shape[-1]
    blocks = v.unflatten(2, (-1, groups)).transpose(2, 3).flatten(2)
    return of(blocks, s, t, l, w).unflatten(2, (groups, -1)).transpose(2, 3).flatten(2)


def _as_attention(v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """An aggregation as attention: groups are heads, maps of all cameras are levels."""
    groups, scales = w.shape[-1], s.shape[1]
    at = l.permute(0, 1, 3, 2, 4)[:, :, None, :, None].expand(-1, -1, groups, -1, scales, -1, -1).flatten(3, 4)
    weights = w.permute(0, 1, 5, 3, 4, 2).flatten(3, 4)
    return v.unflatten(2, (groups, -1)), s.flatten(0, 1), t.flatten(), at, weights


def _beyond_the_picture(of: Core, *inputs: Tensor) -> Tensor:
    return core(_SCALE)(*_as_attention(*inputs))


def _nearest(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return _by_scale(lambda at, size: (torch.round(at * size - 0.5) + 0.5) / size)(of, v, s, t, l, w)


def _plain(operator: str) -> Callable[..., Tensor]:
    return lambda of, *inputs: getattr(plain, operator)(*inputs)


def _unmasked(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    """Every sample is multiplied and added, whatever it is: a NaN or infinite location or weight makes a NaN."""
    poison = (l.detach() * 0).sum(-1) + w.detach() * 0
    return of(v, s, t, l, w) + poison.sum((3, 4)).repeat_interleave(v.shape[3], 2)


def _rounded(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return of(v, s, t, l.double().round(), w)  # half to even


def _left_out(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    on = ((l >= 0) & (l < s.flip(-1)[:, None])).all(-1)
    return of(v, s, t, l, torch.where(on, w, 0))


def _between(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return core(_SCALE)(v, s, t, (l.double() + 0.5) / s.flip(-1)[:, None], w)


def out_of_order(operator: str, levels: int) -> Iterator[Suspect]:
    """Other orders of the levels of an attention operator, in weights, locations or both: all orders of up to four levels."""
    orders = itertools.islice(itertools.permutations(range(levels)), 1, _ORDERS) if operator in _ATTENTION else ()
    for order in map(list, orders):
        for of, l, w in (("weights", False, True), ("locations", True, False), ("locations and weights", True, True)):
            words = f"levels of {of} are read in the order {', '.join(map(str, order))}"
            yield Suspect(words, _ATTENTION, _in_order(order, l, w))


def _in_order(order: list[int], locations: bool, weights: bool) -> Callable[..., Tensor]:
    def run(of: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
        return of(v, s, t, l[:, :, :, order] if locations else l, w[:, :, :, order] if weights else w)

    return run


def _kept(keep: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Only the points that a function of their cells chooses."""

    def run(of: Core, feat: Tensor, depth: Tensor, f: Tensor, d: Tensor, cell: Tensor, sizes: Tensor) -> Tensor:
        return of(feat, depth, f, d, torch.where(keep(cell.long()), cell, -1), sizes)

    return run


def _begins(cell: Tensor) -> Tensor:
    """Where a run of one cell begins."""
    return torch.cat([torch.ones(1, dtype=torch.bool), cell.diff() != 0])


def _of_last(numbers: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Where a number of each point is the largest of its cell's."""

    def keep(cell: Tensor) -> Tensor:
        of_point = numbers(cell)
        last = torch.zeros(int(cell.max()) + 1, dtype=torch.long).scatter_reduce(0, cell, of_point, "amax")
        return of_point == last[cell]

    return keep


def _pool_sides(of: Core, feat: Tensor, depth: Tensor, f: Tensor, d: Tensor, cell: Tensor, sizes: Tensor) -> Tensor:
    return of(feat, depth, f, d, cell, sizes[[0, 1, 3, 2]]).transpose(-1, -2)


def _pool_channels_last(of: Core, *inputs: Tensor) -> Tensor:
    out = of(*inputs)
    return out.movedim(1, -1).reshape(out.shape)


KNOWN_MISTAKES = (
    Suspect("x and y are swapped in the locations", _ALL, _swapped),
    Suspect("shapes are read as (W, H)", _ALL, _turned),
    Suspect(
        "samples lie half a pixel too far right and down: location * size, where location * size - 0.5 is the pixel",
        _NORMALISED,
        _by_scale(lambda at, size: at + 0.5 / size),
    ),
    Suspect(
        "samples lie half a pixel too far left and up: 0.5 is subtracted twice",
        _NORMALISED,
        _by_scale(lambda at, size: at - 0.5 / size),
    ),
    Suspect(
        "0 and 1 are the centres of the outer pixels, as with align_corners=True",
        _NORMALISED,
        _by_scale(lambda at, size: (at * (size - 1) + 0.5) / size),
    ),
    Suspect("locations are read as -1..1, the range of grid_sample", _NORMALISED, _by_scale(lambda at, size: (at + 1) / 2)),
    Suspect(
        "samples beyond the border read the border's pixels, where zeros are the rule",
        (_SCALE,),
        _clamped((1, 1)),
    ),
    Suspect(
        "samples beyond the border read the border's pixels in x alone, where zeros are the rule", (_SCALE,), _clamped((1, 0))
    ),
    Suspect(
        "samples beyond the border read the border's pixels in y alone, where zeros are the rule", (_SCALE,), _clamped((0, 1))
    ),
    Suspect("samples are of the nearest pixel, not bilinear", _NORMALISED, _nearest),
    Suspect(
        "points beyond the picture are counted, where only 0 < x < 1 and 0 < y < 1 are", (_AGGREGATION,), _beyond_the_picture
    ),
    Suspect("starts of levels are not used: levels are read as if they lay one after the other", _ALL, _packed),
    Suspect("weights are read with levels and points exchanged", _ATTENTION, _levels_with_points),
    Suspect("locations are read with levels and points exchanged", _ATTENTION, _points_with_levels),
    Suspect("the output has channels before heads", _ATTENTION, _channels_first),
    Suspect("channels take the groups' weights in turn, where groups are blocks of channels", (_AGGREGATION,), _interleaved),
    Suspect(
        "it is grid_sample * weight, without leaving out samples off the map; the vendor's own kernel did so before 7.2",
        (_SCALE,),
        _plain(_SCALE),
    ),
    Suspect(
        "NaN are not masked: a sample off the map must not count, whatever its weight; the vendor's masks them since 7.2",
        (_SCALE,),
        _unmasked,
    ),
    Suspect(
        "locations are rounded half to even, as the vendor's backward does; its forward truncates, and so must both",
        (_GEOMETRIC,),
        _rounded,
    ),
    Suspect("samples off the map are left out, where the border's pixel is the rule", (_GEOMETRIC,), _left_out),
    Suspect("pixels are sampled bilinearly, where whole pixels are the rule", (_GEOMETRIC,), _between),
    Suspect("ranks_depth and ranks_feat are exchanged", _POOL, lambda of, v, e, f, d, *rest: of(v, e, d, f, *rest)),
    Suspect("depth is not used: features are summed as they are", _POOL, lambda of, v, e, *rest: of(v, 0 * e + 1, *rest)),
    Suspect("H and W of the cells are exchanged", _POOL, _pool_sides),
    Suspect("the output has its channels last", _POOL, _pool_channels_last),
    Suspect(
        "a cell has its last point alone: points overwrite one another",
        _POOL,
        _kept(_of_last(lambda cell: torch.arange(len(cell)))),
    ),
    Suspect(
        "a cell has its last run of points alone: each run overwrites the one before, as if points were sorted by cell",
        _POOL,
        _kept(_of_last(lambda cell: _begins(cell).cumsum(0))),
    ),
    Suspect("a run of points of one cell has its first point alone: lengths of intervals are not used", _POOL, _kept(_begins)),
    Suspect("the first point of each run of one cell is left out", _POOL, _kept(lambda cell: ~_begins(cell))),
    Suspect("the last point of each run of one cell is left out", _POOL, _kept(lambda cell: ~_begins(cell.flip(0)).flip(0))),
)
