"""Why a result is wrong: the suspect that gives the same, or what the error itself looks like."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from . import _parts
from .calls import Call
from .compute import Core, Results, computed, core
from .error_bound import ErrorBound
from .known_mistakes import KNOWN_MISTAKES, out_of_order

_ALIKE = 2  # numbers that have a common factor by chance
_JUMPS = 1e-3  # the fraction of entries where float32 and float64 may be on different sides of a jump
_WORST = 121  # queries that a suspect is tried on first, when a call has many
_FEW = 8  # queries that mistakes on a part of a call are tried on first: there are many


def explain(bound: ErrorBound, wrong: list[str]) -> dict[str, str]:
    """A sentence for each wrong result that something explains."""
    if not any(bool(bound.call.results[name].any()) for name in wrong):
        return dict.fromkeys(wrong, "it is zero everywhere, as if the kernel had not run")
    found = _tried(bound, _trials(bound.call), wrong)
    left = [name for name in wrong if name not in found]
    looks = {name: words for name in left if (words := _looks_like(bound, name))}
    if len(looks) < len(left):
        found.update(_tried(bound, _partial_trials(bound, left), left))
    return {**looks, **found}


class _Trial(NamedTuple):
    words: str
    call: Call
    form: Core


def _tried(bound: ErrorBound, trials: Iterator[_Trial], wrong: list[str]) -> dict[str, str]:
    """The words of the first trial that explains it, for each result that one explains."""
    found: dict[str, str] = {}
    for trial in trials:
        left = [name for name in wrong if name not in found]
        if not left:
            break
        found.update(dict.fromkeys(_explained(bound, trial, left), trial.words))
    return found


def _trials(call: Call) -> Iterator[_Trial]:
    if not all(t.numel() for t in call.inputs):
        return  # no mistake reads anything else
    levels = out_of_order(call.row.name, len(call.sampling.shapes)) if call.row.samples else ()
    for suspect in (*KNOWN_MISTAKES, *levels):
        if call.row.name in suspect.operators:
            yield _Trial(suspect.words, call, suspect.form(call.row.name))
    for place, strides in call.about.get("strides", {}).items():
        at = call.places.index(place) if place in call.places else -1
        order = _memory(call.inputs[at], strides)
        if at >= 0 and order is not None:
            read = call.inputs[at].flatten()[order].view(call.inputs[at].shape)
            inputs = tuple(read if i == at else t for i, t in enumerate(call.inputs))
            words = f"{place} is not contiguous, and is read as if it were"
            yield _Trial(words, replace(call, inputs=inputs), core(call.row.name))


def _partial_trials(bound: ErrorBound, wrong: list[str]) -> Iterator[_Trial]:
    """Mistakes on parts of a call. Queries say which: a call without them, or with a wrong grad_value alone, has none."""
    of_queries = [name for name in wrong if bound.call.by_query(name)]
    if of_queries and all(t.numel() for t in bound.call.inputs):
        few, entries = _worst(bound, of_queries, _FEW), {name: bound.wrong(name) for name in wrong}
        agrees = functools.partial(_any_agrees, bound, of_queries, few)
        for words, form in _parts.mistakes(bound.call, entries, few, _places(bound.call, of_queries), agrees):
            yield _Trial(words, bound.call, form)


def _explained(bound: ErrorBound, trial: _Trial, wrong: list[str]) -> list[str]:
    """The wrong results that the trial gives too. Of a large call, it must first do so for the worst queries."""
    of_queries = [name for name in wrong if bound.call.by_query(name)]
    if trial.call.queries > _WORST and of_queries:
        some = _worst(bound, of_queries, _WORST)
        tried = computed(trial.call, torch.float64, trial.form, some, _places(bound.call, of_queries))
        if not _any_agrees(bound, of_queries, some, tried):
            return []
    tried = computed(trial.call, torch.float64, trial.form)
    found = [name for name in wrong if _agrees(bound, name, tried[name])]
    plain = [name for name in found if not bound.call.results[name][bound.wrong(name)].any()]
    return found if len(found) > len(plain) else []  # to be zero explains itself


def _places(call: Call, results: list[str]) -> tuple[int, ...]:
    """The inputs of which these are gradients."""
    return tuple(call.places.index(name.removeprefix("grad_")) for name in results if name != "output")


def _any_agrees(bound: ErrorBound, names: list[str], queries: Tensor, tried: Results) -> bool:
    return any(_agrees(bound, name, tried[name], queries) for name in names)


def _agrees(bound: ErrorBound, name: str, tried: Tensor, queries: Tensor | None = None) -> bool:
    """Whether the trial gives the device's numbers. Of the entries that differ from the float64 result it must explain all
    but a few, which may lie where a gradient jumps."""
    got, truth = bound.call.results[name], bound.truth[name]
    if queries is not None:
        got, truth = got[:, queries], truth[:, queries]
    wrong, left = (bound.error(name, got, expected, queries=queries) > 1 for expected in (truth, tried))
    return bool(left.sum() <= _JUMPS * left.numel()) and bool((left & wrong).sum() <= _JUMPS * wrong.sum())


def _worst(bound: ErrorBound, names: list[str], count: int) -> Tensor:
    errors: Tensor = sum(_by_query(bound, name) for name in names)  # pyright: ignore
    return errors.topk(min(count, len(errors))).indices.sort().values


def _by_query(bound: ErrorBound, name: str) -> Tensor:
    error = bound.error(name, bound.call.results[name], bound.truth[name]).clamp_max(1e9)
    return error.movedim(1, 0).flatten(1).amax(1)


def _looks_like(bound: ErrorBound, name: str) -> str:
    """What the error itself says."""
    got, truth = bound.call.results[name], bound.truth[name]
    errors = bound.error(name, got, truth)
    stray = ~got.isfinite() & truth.isfinite()
    if stray.any() and bool((errors[~stray] <= 1).all()):
        kind = "NaN" if bool(got[stray].isnan().all()) else "NaN or infinite"
        return f"{where(stray, kind)}, while the inputs give numbers; all other entries are right"
    wide = got.double()
    if not wide.any():
        return "it is zero everywhere, as if the kernel had not run"
    usable = wide.isfinite() & truth.isfinite()
    factor = float((wide * truth)[usable].sum() / (truth * truth)[usable].sum().clamp_min(1e-300))
    if factor and bool((bound.error(name, got, truth * factor) <= 1).all()):
        return f"it is {factor:.4g} times the truth"
    if name == "grad_locations":
        size = bound.call.sampling.shapes.flip(-1).double()
        size = size[:, 0] if bound.call.row.grouped else size[:, None]
        if bool((bound.error(name, got, truth / size) <= 1).all()):
            return "it is the gradient in pixels; it must be in fractions of the map"
    return _partly(bound, name, errors > 1)


def _partly(bound: ErrorBound, name: str, wrong: Tensor) -> str:
    """What all wrong entries have in common, where the others are right."""
    got, truth = bound.call.results[name].double(), bound.truth[name]
    held = _parts.holding(bound.call, name, wrong)
    if not got[wrong].any():
        return f"all wrong entries are zero: {where(wrong, 'wrong')}{held}"
    factor = float((got * truth)[wrong].sum() / (truth * truth)[wrong].sum().clamp_min(1e-300))
    scaled = torch.where(wrong, truth * factor, truth)
    if wrong.sum() > _ALIKE and bool((bound.error(name, bound.call.results[name], scaled) <= 1).all()):
        return f"{where(wrong, f'{factor:.4g} times the truth')}{held}"
    return ""


def where(wrong: Tensor, what: str) -> str:
    """How many entries are so, and in which part of the tensor."""
    places = wrong.nonzero()
    low, high = places.amin(0).tolist(), places.amax(0).tolist()
    box = ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in zip(low, high, strict=True))
    return f"{len(places)} of {wrong.numel()} entries are {what}, in [{box}]"


def _memory(t: Tensor, strides: list[int]) -> Tensor | None:
    """The order of entries in the memory of a tensor that was not contiguous; None if it had gaps or overlaps."""
    if len(strides) != t.dim() or 1 + sum((n - 1) * s for n, s in zip(t.shape, strides, strict=True)) != t.numel():
        return None
    memory = torch.full((t.numel(),), -1)
    memory.as_strided(t.shape, strides).copy_(torch.arange(t.numel()).view(t.shape))
    return memory if bool((memory >= 0).all()) else None
