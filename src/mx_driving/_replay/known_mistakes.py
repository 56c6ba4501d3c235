"""Known mistakes of implementations: what some versions of the vendor's library do differently, and usual slips.

A mistake is a function of the operator's reference and the operator's arguments. It returns the output with the mistake.
`judge.py` finds the mistake that gives the device's numbers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._measure import plain
from .._operator import geometry
from .._operator.description import AGGREGATION, GEOMETRIC, MULTI_SCALE, POOL
from .calls import RecordedCall
from .error_bound import Core, as_attention, make_core

Mistake = Callable[..., Tensor]
Suspicion = tuple[str, RecordedCall, Core]  # (sentence, call and core that make the mistake)


def _move(move: Callable[[Tensor, Tensor], Tensor]) -> Mistake:
    """Return a mistake that replaces locations by move(locations, (width, height) of their maps)."""

    def run(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
        if s.dim() == 3:
            l = torch.where(geometry.inside(l)[..., None], l, torch.nan)
        v, s, t, l, w = as_attention(v, s, t, l, w)
        return make_core(MULTI_SCALE)(v, s, t, move(l, s.flip(-1)[:, None].to(l.dtype)), w)

    return run


def _clamp(*axes: bool) -> Mistake:
    """Return a mistake that clamps locations along these axes to the centres of the border pixels."""
    along = torch.tensor(axes)
    return _move(lambda at, size: torch.where(along, torch.minimum(torch.maximum(at, 0.5 / size), 1 - 0.5 / size), at))


def _interleave(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    groups = w.shape[-1]
    blocks = v.unflatten(2, (-1, groups)).transpose(2, 3).flatten(2)
    return core(blocks, s, t, l, w).unflatten(2, (groups, -1)).transpose(2, 3).flatten(2)


def _poison(core: Core, v: Tensor, s: Tensor, t: Tensor, l: Tensor, w: Tensor) -> Tensor:
    """Multiply and add every sample, also the samples off the map. A NaN or infinite location or weight makes the sum NaN."""
    poison = (l.detach() * 0).sum(-1) + w.detach() * 0
    return core(v, s, t, l, w) + poison.sum((3, 4)).repeat_interleave(v.shape[3], 2)


def _keep_points(choose: Callable[[Tensor], Tensor]) -> Mistake:
    """Return a mistake that sums only the points for which `choose(cells)` is True."""
    return lambda core, v, e, f, d, cell, *sizes: core(v, e, f, d, torch.where(choose(cell.long()), cell, -1), *sizes)


def _begins(cell: Tensor) -> Tensor:
    """Return True for the first point, and for each point that is in another cell than the point before it."""
    return torch.cat([torch.ones(1, dtype=torch.bool), cell.diff() != 0])


def _has_largest(numbers: Callable[[Tensor], Tensor], cell: Tensor) -> Tensor:
    """Return True for each point whose number in `numbers(cell)` is the largest in its cell."""
    ranks = numbers(cell)
    return ranks == torch.zeros(int(cell.max()) + 1, dtype=torch.long).scatter_reduce(0, cell, ranks, "amax")[cell]


def _channels_last(core: Core, *arguments: Any) -> Tensor:
    out = core(*arguments)
    return out.movedim(1, -1).reshape(out.shape)


_BORDER = "samples beyond the border read the border's pixels{}, where zeros are the rule".format
_MISTAKES: dict[tuple[str, ...], dict[str, Mistake]] = {  # if several explain a result, `explain` names the first
    (MULTI_SCALE, AGGREGATION, GEOMETRIC): {
        "x and y are swapped in the locations": lambda core, v, s, t, l, w: core(v, s, t, l.flip(-1), w),
        "shapes are read as (W, H)": lambda core, v, s, t, l, w: core(v, s.flip(-1), t, l, w),
        "starts of levels are not used: levels are read as if they lay one after the other": (
            lambda core, v, s, t, l, w: core(v, s, geometry.starts_of(s), l, w)
        ),
    },
    (MULTI_SCALE, AGGREGATION): {
        "samples lie half a pixel too far right and down: 0.5 is not subtracted": _move(lambda at, size: at + 0.5 / size),
        "samples lie half a pixel too far left and up: 0.5 is subtracted twice": _move(lambda at, size: at - 0.5 / size),
        "0 and 1 are the centres of the outer pixels, as with align_corners=True": _move(
            lambda at, size: (at * (size - 1) + 0.5) / size
        ),
        "locations are read as -1..1, the range of grid_sample": _move(lambda at, size: (at + 1) / 2),
        "samples are of the nearest pixel, not bilinear": _move(lambda at, size: (torch.round(at * size - 0.5) + 0.5) / size),
    },
    (MULTI_SCALE,): {
        _BORDER(""): _clamp(True, True),
        _BORDER(" in x alone"): _clamp(True, False),
        _BORDER(" in y alone"): _clamp(False, True),
        "it is grid_sample * weight without a mask of samples off the map, as the vendor's before 7.2": (
            lambda core, *inputs: plain.multi_scale_deformable_attn(*inputs)
        ),
        "NaN are not masked: samples off the map must not count; the vendor's masks them since 7.2": _poison,
    },
    (AGGREGATION,): {
        "points beyond the picture count; only 0 < x < 1 and 0 < y < 1 must": (
            lambda core, *inputs: make_core(MULTI_SCALE)(*as_attention(*inputs))
        ),
        "channels take the groups' weights in turn, where groups are blocks of channels": _interleave,
    },
    (MULTI_SCALE, GEOMETRIC): {
        "weights are read with levels and points exchanged": (
            lambda core, v, s, t, l, w: core(v, s, t, l, w.transpose(3, 4).reshape(w.shape))
        ),
        "locations are read with levels and points exchanged": (
            lambda core, v, s, t, l, w: core(v, s, t, l.transpose(3, 4).reshape(l.shape), w)
        ),
        "the output has channels before heads": (
            lambda core, v, *inputs: core(v, *inputs).unflatten(2, v.shape[2:]).transpose(2, 3).flatten(2)
        ),
    },
    (GEOMETRIC,): {
        "locations are rounded half to even, as the vendor's backward does; both must truncate": (
            lambda core, v, s, t, l, w: core(v, s, t, l.double().round(), w)
        ),
        "samples off the map are left out, where the border's pixel is the rule": (
            lambda core, v, s, t, l, w: core(v, s, t, l, torch.where(((l >= 0) & (l < s.flip(-1)[:, None])).all(-1), w, 0))
        ),
        "pixels are sampled bilinearly, where whole pixels are the rule": (
            lambda core, v, s, t, l, w: make_core(MULTI_SCALE)(v, s, t, (l.double() + 0.5) / s.flip(-1)[:, None], w)
        ),
    },
    (POOL,): {
        "ranks_depth and ranks_feat are exchanged": lambda core, v, e, f, d, *rest: core(v, e, d, f, *rest),
        "depth is not used: features are summed as they are": lambda core, v, e, *rest: core(v, 0 * e + 1, *rest),
        "H and W of the cells are exchanged": lambda core, *args: core(*args[:-2], args[-1], args[-2]).transpose(-1, -2),
        "the output has its channels last": _channels_last,
        "a cell has its last point alone: points overwrite one another": _keep_points(
            partial(_has_largest, lambda cell: torch.arange(len(cell)))
        ),
        "a cell has its last run of points alone, as if points were sorted by cell": _keep_points(
            partial(_has_largest, lambda cell: _begins(cell).cumsum(0))
        ),
        "a run of points of one cell has its first point alone: lengths are not used": _keep_points(_begins),
        "the first point of each run of one cell is left out": _keep_points(lambda cell: ~_begins(cell)),
        "the last point of each run of one cell is left out": _keep_points(lambda cell: ~_begins(cell.flip(0)).flip(0)),
    },
}


def list_suspicions(call: RecordedCall) -> Iterator[Suspicion]:
    """Yield the mistakes that an implementation can make on the inputs of a call."""
    if not all(t.numel() for t in call.inputs):
        return  # the known mistakes need inputs with entries
    operator, core = call.description.name, make_core(call.description.name)
    for operators, mistakes in _MISTAKES.items():
        for sentence, mistake in mistakes.items() if operator in operators else ():
            yield sentence, call, partial(mistake, core)
    # In attention, weights, locations or both may be read with the levels in a wrong order. Try at most
    # 23 wrong orders, which are all wrong orders of four levels.
    orders = itertools.permutations(range(len(call.inputs[1]))) if operator in (MULTI_SCALE, GEOMETRIC) else ()
    for order in map(list, itertools.islice(orders, 1, math.factorial(4))):
        for name, i, j in (("weights", ..., order), ("locations", order, ...), ("locations and weights", order, order)):
            sentence = f"levels of {name} are read in the order {', '.join(map(str, order))}"
            yield sentence, call, lambda v, s, t, l, w, i=i, j=j: core(v, s, t, l[:, :, :, i], w[:, :, :, j])
    for i, name in enumerate(call.input_names):  # an input that was not contiguous may be read as if it were
        t, strides = call.inputs[i], call.about.get("strides", {}).get(name, ())
        if len(strides) != t.dim() or 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True)) != t.numel():
            continue
        # the indices of t's entries in the order in which a tensor of these strides has them in memory
        order = torch.full((t.numel(),), -1)
        order.as_strided(t.shape, strides).copy_(torch.arange(t.numel()).view(t.shape))
        if bool((order >= 0).all()):  # a tensor of these strides has neither gaps nor overlaps
            misread = replace(call, inputs=(*call.inputs[:i], t.flatten()[order].view(t.shape), *call.inputs[i + 1 :]))
            yield f"{name} is not contiguous, and is read as if it were", misread, core
