"""Mistakes that hold on a part of a call alone: on some levels, cameras, heads or groups, points, or entries of the batch.

An output, and each gradient, is a sum over the parts of an axis. So the parts are computed one by one, right and with a
suspect's mistake, on a few queries, and what a mistake on any set of parts gives is a sum of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations

import torch
from torch import Tensor

from .calls import Call
from .compute import Core, Results, computed, core
from .known_mistakes import KNOWN_MISTAKES, Suspect

_ATTENTION = {"level": 3, "head": 2, "point": 4, "batch": 0}  # axis -> its place in weights
_GROUPED = {"camera": 3, "level": 4, "group": 5, "point": 2, "batch": 0}
_MOST, _ALL_SETS = 32, 5  # parts of an axis; of more than 5, sets of one part, all but one, and those with wrong entries


def _nothing(of: Core, *inputs: Tensor) -> Tensor:
    return torch.where(torch.tensor(False), of(*inputs), 0)


_LEFT_OUT = Suspect("samples are left out", tuple(name for one in KNOWN_MISTAKES for name in one.operators), _nothing)


def axes(call: Call) -> dict[str, int]:
    """The axes that have several parts, and their places in weights."""
    if not call.row.samples:
        return {}
    shape = call.sampling.weights.shape
    return {name: dim for name, dim in (_GROUPED if call.row.grouped else _ATTENTION).items() if 1 < shape[dim] <= _MOST}


def _sets(count: int) -> Iterator[tuple[int, ...]]:
    sizes = range(1, count) if count <= _ALL_SETS else (1, count - 1)
    return (some for size in sizes for some in combinations(range(count), size))


def _only(form: Core, dim: int, parts: Iterable[int]) -> Core:
    """The form with the weights of these parts; all others are zero."""

    def run(*inputs: Tensor) -> Tensor:
        *others, weights = inputs
        chosen = torch.zeros(weights.shape[dim], dtype=torch.bool)
        chosen[list(parts)] = True
        chosen = chosen.view([-1 if i == dim else 1 for i in range(weights.dim())])
        return form(*others, torch.where(chosen, weights, 0))

    return run


def _mixed(wrong: Core, right: Core, dim: int, parts: tuple[int, ...], count: int) -> Core:
    first, second = _only(wrong, dim, parts), _only(right, dim, set(range(count)) - set(parts))
    return lambda *inputs: first(*inputs) + second(*inputs)


def words(axis: str, parts: Iterable[int]) -> str:
    """Such as "on levels 0 and 2"."""
    *most, last = map(str, parts)
    return f"on {axis}{'s' if most else ''} {', '.join(most) + ' and ' if most else ''}{last}"


def mistakes(
    call: Call, wrong: dict[str, Tensor], few: Tensor, learned: tuple[int, ...], agrees: Callable[[Results], bool]
) -> Iterator[tuple[str, Core]]:
    """Words and form of each mistake on some parts that gives, by `agrees`, the device's results for a few queries.

    Args:
        wrong: the wrong entries of each result.
        few: the queries.
        learned: the inputs whose gradients `agrees` compares.
        agrees: whether results are the device's.
    """
    wide = replace(call, inputs=tuple(t.double() if t.is_floating_point() else t for t in call.inputs))

    def each(form: Core, dim: int, count: int) -> list[Results]:
        return [computed(wide, torch.float64, _only(form, dim, [k]), few, learned) for k in range(count)]

    right = core(call.row.name)
    for axis, dim in axes(call).items():
        count = call.sampling.weights.shape[dim]
        of_right, sets = each(right, dim, count), dict.fromkeys((*_seen(call, wrong, axis, dim), *_sets(count)))
        for suspect in (one for one in (*KNOWN_MISTAKES, _LEFT_OUT) if call.row.name in one.operators):
            form = suspect.form(call.row.name)
            of_wrong = each(form, dim, count)
            for parts in sets:
                of_each = [of_wrong[k] if k in parts else of_right[k] for k in range(count)]
                if agrees({name: torch.stack([one[name] for one in of_each]).sum(0) for name in of_each[0]}):
                    yield f"{words(axis, parts)} alone: {suspect.words}", _mixed(form, right, dim, parts, count)


def holding(call: Call, name: str, wrong: Tensor) -> str:
    """Where the wrong entries of a result are, if not on all parts of each axis, such as ", on level 1"."""
    found = {axis: _hit(call, name, axis, dim, wrong) for axis, dim in axes(call).items()}
    return "".join(f", {words(axis, hit)}" for axis, (hit, count) in found.items() if 0 < len(hit) < count)


def _seen(call: Call, wrong: dict[str, Tensor], axis: str, dim: int) -> Iterator[tuple[int, ...]]:
    """The parts with wrong entries, of each result that has some without."""
    found = (_hit(call, name, axis, dim, entries) for name, entries in wrong.items())
    return (tuple(hit) for hit, count in found if 0 < len(hit) < count)


def _hit(call: Call, name: str, axis: str, dim: int, wrong: Tensor) -> tuple[list[int], int]:
    """The parts of an axis with a wrong entry, and how many parts the result shows; 0 if it is a sum over the axis."""
    count = call.sampling.weights.shape[dim]
    if axis == "batch" or (name in ("grad_weights", "grad_locations") and dim < wrong.dim() - (name == "grad_locations")):
        along = wrong.movedim(dim, 0).flatten(1).any(1)
    elif axis in ("head", "group") and name in ("output", "grad_value"):
        along = wrong.flatten(2).unflatten(2, (count, -1)).movedim(2, 0).flatten(1).any(1)
    elif axis == "level" and name == "grad_value" and not call.row.grouped:
        rows = wrong.movedim(1, 0).flatten(1).any(1)
        ends = call.sampling.starts + call.sampling.shapes.prod(-1)
        ranges = zip(call.sampling.starts.tolist(), ends.tolist(), strict=True)
        along = torch.stack([rows[start:end].any() for start, end in ranges])
    else:
        return [], 0
    return along.nonzero().flatten().tolist(), count
