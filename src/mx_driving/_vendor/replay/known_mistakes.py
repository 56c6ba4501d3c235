"""Known mistakes of implementations: differences of vendors' versions, and usual slips.

Each is the operator with the mistake. `explain.py` looks for one that gives the device's numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._measure import plain
from ..._operator import geometry
from .compute import Core, core_of

_SCALE, _AGGREGATION, _GEOMETRIC = "multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention"
_NORMALISED, _ATTENTION, _POOL = (_SCALE, _AGGREGATION), (_SCALE, _GEOMETRIC), ("bev_pool_v3",)
_ALL = (_SCALE, _AGGREGATION, _GEOMETRIC)
_ORDERS = math.factorial(4)


class Mistake(NamedTuple):
    """Its words, the operators that can have it, and a function of the operator's core and its inputs."""

    words: str
    operators: tuple[str, ...]
    run: Callable[..., Tensor]

    def form(self, operator: str) -> Core:
        return lambda *inputs: self.run(core_of(operator), *inputs)


def _size(shapes: Tensor, locations: Tensor) -> Tensor:
    """Return (width, height) of each sample's map; of scales that share their locations, of the first."""
    size = shapes.flip(-1).to(locations.dtype)
    return size[:, 0] if shapes.dim() == 3 else size[:, None]


def _move(move: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    """Move locations by a function of them and of their maps' sizes. Scales of an aggregation are summed one by one."""

    def run(core: Core, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        if shapes.dim() == 2:
            return core(value, shapes, starts, move(locations, _size(shapes, locations)), weights)
        total = torch.zeros((), dtype=value.dtype)
        for s in range(shapes.shape[1]):
            tables = shapes[:, s : s + 1], starts[:, s : s + 1]
            moved = torch.where(geometry.inside(locations)[..., None], move(locations, _size(tables[0], locations)), torch.nan)
            total = total + core(value, *tables, moved, weights[:, :, :, :, s : s + 1])
        return total

    return run


def _clamp(axes: tuple[int, int]) -> Callable[..., Tensor]:
    """Move locations to the border's pixels, along these axes."""
    along = torch.tensor(axes, dtype=torch.bool)
    return _move(lambda at, size: torch.where(along, torch.minimum(torch.maximum(at, 0.5 / size), 1 - 0.5 / size), at))


def _shift(pixels: float) -> Callable[..., Tensor]:
    return _move(lambda at, size: at + pixels / size)


_align_corners = _move(lambda at, size: (at * (size - 1) + 0.5) / size)
_nearest = _move(lambda at, size: (torch.round(at * size - 0.5) + 0.5) / size)


def _pack_levels(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return core(v, s, geometry.starts_of(s), l, w)


def _exchange_in_weights(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return core(v, s, t, l, w.transpose(3, 4).reshape(w.shape))


def _exchange_in_locations(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return core(v, s, t, l.transpose(3, 4).reshape(l.shape), w)


def _round(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return core(v, s, t, l.double().round(), w)


def _channels_first(core: Core, v: Tensor, *inputs: Tensor) -> Tensor:
    return core(v, *inputs).unflatten(2, v.shape[2:]).transpose(2, 3).flatten(2)


def _interleave(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    groups = w.shape[-1]
    blocks = v.unflatten(2, (-1, groups)).transpose(2, 3).flatten(2)
    return core(blocks, s, t, l, w).unflatten(2, (groups, -1)).transpose(2, 3).flatten(2)


def _count_points_beyond(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    """An aggregation as attention: groups are heads, maps of all cameras are levels."""
    groups, scales = w.shape[-1], s.shape[1]
    at = l.permute(0, 1, 3, 2, 4)[:, :, None, :, None].expand(-1, -1, groups, -1, scales, -1, -1).flatten(3, 4)
    weights = w.permute(0, 1, 5, 3, 4, 2).flatten(3, 4)
    return core_of(_SCALE)(v.unflatten(2, (groups, -1)), s.flatten(0, 1), t.flatten(), at, weights)


def _poison(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    """Multiply and add every sample, whatever it is: a NaN or infinite location or weight makes a NaN."""
    poison = (l.detach() * 0).sum(-1) + w.detach() * 0
    return core(v, s, t, l, w) + poison.sum((3, 4)).repeat_interleave(v.shape[3], 2)


def _leave_out_off_map(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    on = ((l >= 0) & (l < s.flip(-1)[:, None])).all(-1)
    return core(v, s, t, l, torch.where(on, w, 0))


def _interpolate(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    return core_of(_SCALE)(v, s, t, (l.double() + 0.5) / s.flip(-1)[:, None], w)


def _reorder(order: list[int], locations: bool, weights: bool) -> Callable[..., Tensor]:
    return lambda core, v, s, t, l, w: core(v, s, t, l[:, :, :, order] if locations else l, w[:, :, :, order] if weights else w)


def _orders_of_levels(levels: int) -> Iterator[Mistake]:
    """Yield other orders of the levels, in weights, locations or both: all orders of up to four levels."""
    for order in map(list, itertools.islice(itertools.permutations(range(levels)), 1, _ORDERS)):
        for name, l, w in (("weights", False, True), ("locations", True, False), ("locations and weights", True, True)):
            words = f"levels of {name} are read in the order {', '.join(map(str, order))}"
            yield Mistake(words, _ATTENTION, _reorder(order, l, w))


def _keep_points(choose: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Sum only the points that a function of their cells chooses."""
    return lambda core, feat, depth, f, d, cell, sizes: core(
        feat, depth, f, d, torch.where(choose(cell.long()), cell, -1), sizes
    )


def _begins(cell: Tensor) -> Tensor:
    """Return True where a run of one cell begins."""
    return torch.cat([torch.ones(1, dtype=torch.bool), cell.diff() != 0])


def _has_largest(numbers: Tensor, cell: Tensor) -> Tensor:
    """Choose the points whose number is the largest of their cell's."""
    return numbers == torch.zeros(int(cell.max()) + 1, dtype=torch.long).scatter_reduce(0, cell, numbers, "amax")[cell]


def _is_last_point(cell: Tensor) -> Tensor:
    return _has_largest(torch.arange(len(cell)), cell)


def _is_in_last_run(cell: Tensor) -> Tensor:
    return _has_largest(_begins(cell).cumsum(0), cell)


def _swap_sides(core: Core, *inputs: Any) -> Tensor:
    *others, sizes = inputs
    return core(*others, sizes[[0, 1, 3, 2]]).transpose(-1, -2)


def _channels_last(core: Core, *inputs: Tensor) -> Tensor:
    out = core(*inputs)
    return out.movedim(1, -1).reshape(out.shape)


def _plain(core: Core, *inputs: Tensor) -> Tensor:
    return plain.multi_scale_deformable_attn(*inputs)


_BORDER = "samples beyond the border read the border's pixels{}, where zeros are the rule".format
KNOWN_MISTAKES = (
    Mistake("x and y are swapped in the locations", _ALL, lambda core, v, s, t, l, w: core(v, s, t, l.flip(-1), w)),
    Mistake("shapes are read as (W, H)", _ALL, lambda core, v, s, t, l, w: core(v, s.flip(-1), t, l, w)),
    Mistake("samples lie half a pixel too far right and down: 0.5 is not subtracted", _NORMALISED, _shift(0.5)),
    Mistake("samples lie half a pixel too far left and up: 0.5 is subtracted twice", _NORMALISED, _shift(-0.5)),
    Mistake("0 and 1 are the centres of the outer pixels, as with align_corners=True", _NORMALISED, _align_corners),
    Mistake("locations are read as -1..1, the range of grid_sample", _NORMALISED, _move(lambda at, size: (at + 1) / 2)),
    Mistake(_BORDER(""), (_SCALE,), _clamp((1, 1))),
    Mistake(_BORDER(" in x alone"), (_SCALE,), _clamp((1, 0))),
    Mistake(_BORDER(" in y alone"), (_SCALE,), _clamp((0, 1))),
    Mistake("samples are of the nearest pixel, not bilinear", _NORMALISED, _nearest),
    Mistake("points beyond the picture count; only 0 < x < 1 and 0 < y < 1 must", (_AGGREGATION,), _count_points_beyond),
    Mistake("starts of levels are not used: levels are read as if they lay one after the other", _ALL, _pack_levels),
    Mistake("weights are read with levels and points exchanged", _ATTENTION, _exchange_in_weights),
    Mistake("locations are read with levels and points exchanged", _ATTENTION, _exchange_in_locations),
    Mistake("the output has channels before heads", _ATTENTION, _channels_first),
    Mistake("channels take the groups' weights in turn, where groups are blocks of channels", (_AGGREGATION,), _interleave),
    Mistake("it is grid_sample * weight without a mask of samples off the map, as the vendor's before 7.2", (_SCALE,), _plain),
    Mistake("NaN are not masked: samples off the map must not count; the vendor's masks them since 7.2", (_SCALE,), _poison),
    Mistake("locations are rounded half to even, as the vendor's backward does; both must truncate", (_GEOMETRIC,), _round),
    Mistake("samples off the map are left out, where the border's pixel is the rule", (_GEOMETRIC,), _leave_out_off_map),
    Mistake("pixels are sampled bilinearly, where whole pixels are the rule", (_GEOMETRIC,), _interpolate),
    Mistake("ranks_depth and ranks_feat are exchanged", _POOL, lambda core, v, e, f, d, *rest: core(v, e, d, f, *rest)),
    Mistake("depth is not used: features are summed as they are", _POOL, lambda core, v, e, *rest: core(v, 0 * e + 1, *rest)),
    Mistake("H and W of the cells are exchanged", _POOL, _swap_sides),
    Mistake("the output has its channels last", _POOL, _channels_last),
    Mistake("a cell has its last point alone: points overwrite one another", _POOL, _keep_points(_is_last_point)),
    Mistake("a cell has its last run of points alone, as if points were sorted by cell", _POOL, _keep_points(_is_in_last_run)),
    Mistake("a run of points of one cell has its first point alone: lengths are not used", _POOL, _keep_points(_begins)),
    Mistake("the first point of each run of one cell is left out", _POOL, _keep_points(lambda cell: ~_begins(cell))),
    Mistake("the last point of each run of one cell is left out", _POOL, _keep_points(lambda c: ~_begins(c.flip(0)).flip(0))),
)


def mistakes_of(operator: str, inputs: Sequence[Tensor]) -> Iterator[Mistake]:
    """Yield the mistakes that an implementation of an operator can make on these inputs."""
    yield from (mistake for mistake in KNOWN_MISTAKES if operator in mistake.operators)
    if operator in _ATTENTION:
        yield from _orders_of_levels(len(inputs[1]))
