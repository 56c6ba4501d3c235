"""Why a result is wrong: the suspect that gives the same, or what the error itself looks like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from .._operators import LOCATIONS, SHAPES
from .calls import PLACES, Call
from .compute import SOME, Core, computed, core
from .error_bound import ErrorBound
from .known_mistakes import KNOWN_MISTAKES

_JUMPS = 1e-3  # the share of entries where float32 and float64 may be on different sides of a jump
_WORST = 121  # queries that a suspect is tried on first, when a call has many


def explain(bound: ErrorBound, wrong: list[str]) -> dict[str, str]:
    """A sentence for each wrong result that something explains."""
    if not any(bool(bound.call.results[name].any()) for name in wrong):
        return dict.fromkeys(wrong, "it is zero everywhere, as if the kernel had not run")
    found: dict[str, str] = {}
    for trial in _trials(bound.call):
        left = [name for name in wrong if name not in found]
        if not left:
            break
        found.update(dict.fromkeys(_explained(bound, trial, left), trial.words))
    for name in wrong:
        if name not in found and (words := _looks_like(bound, name)):
            found[name] = words
    return found


class _Trial(NamedTuple):
    words: str
    call: Call
    form: Core


def _trials(call: Call) -> Iterator[_Trial]:
    if not all(t.numel() for t in call.inputs):
        return  # no mistake reads anything else
    for suspect in KNOWN_MISTAKES:
        if call.row.name in suspect.operators:
            yield _Trial(suspect.words, call, suspect.form(call.row.name))
    for place, strides in call.about.get("strides", {}).items():
        at = PLACES.index(place) if place in PLACES else -1
        order = _memory(call.inputs[at], strides)
        if at >= 0 and order is not None:
            read = call.inputs[at].flatten()[order].view(call.inputs[at].shape)
            inputs = tuple(read if i == at else t for i, t in enumerate(call.inputs))
            words = f"{place} is not contiguous, and is read as if it were"
            yield _Trial(words, replace(call, inputs=inputs), core(call.row.name))


def _explained(bound: ErrorBound, trial: _Trial, wrong: list[str]) -> list[str]:
    """The wrong results that the trial gives too. Of a large call, it must first do so for the worst queries."""
    of_queries = [name for name in wrong if name != "grad_value"]
    if trial.call.inputs[LOCATIONS].shape[1] > SOME and of_queries:
        some = _worst(bound, of_queries)
        tried = computed(trial.call, torch.float64, trial.form, some)
        if not any(_agrees(bound, name, tried[name], some) for name in of_queries):
            return []
    tried = computed(trial.call, torch.float64, trial.form)
    return [name for name in wrong if _agrees(bound, name, tried[name])]


def _agrees(bound: ErrorBound, name: str, tried: Tensor, queries: Tensor | None = None) -> bool:
    """Whether the trial gives the device's numbers: what the truth has wrong is right, but for a jump here and there."""
    got, truth = bound.call.results[name], bound.truth[name]
    if queries is not None:  # in all others there is nothing to see
        whole = got.double().clone()
        whole[:, queries] = tried
        tried = whole
    wrong, left = bound.error(name, got, truth) > 1, bound.error(name, got, tried) > 1
    if queries is not None:
        wrong, left = wrong[:, queries], left[:, queries]
    return bool(left.sum() <= _JUMPS * left.numel()) and bool((left & wrong).sum() <= _JUMPS * wrong.sum())


def _worst(bound: ErrorBound, names: list[str]) -> Tensor:
    errors: Tensor = sum(_by_query(bound, name) for name in names)  # pyright: ignore
    return errors.topk(_WORST).indices.sort().values


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
        size = bound.call.inputs[SHAPES].flip(-1).double()
        size = size[:, 0] if bound.call.row.grouped else size[:, None]
        if bool((bound.error(name, got, truth / size) <= 1).all()):
            return "it is the gradient of pixels, where that of shares of the map is asked for"
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
