"""Judge a recorded call: compare each result with float64 truth, in units of the allowed error. Explain a wrong result: by a
known mistake that gives the same numbers, by a pattern of the errors, or by their place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import RecordedCall
from .error_bound import ErrorBound, compute, compute_by_kernel
from .known_mistakes import list_suspicions

RIGHT, COARSE, WRONG = "right", "coarse", "wrong"
_COMMON = 0.1  # sums in 16 bits move at least this fraction of the entries that are not zero by more than rounding
_STANDARD_ERRORS = 4  # a factor that differs from 1 by more than these is no chance
_ALIKE = 2  # up to this many wrong entries may be the truth times a common factor by chance
_JUMPS = 1e-3  # the fraction of entries for which float32 and float64 may be on different sides of a jump
_SOME = 121  # in a large call, try a suspected mistake on this many wrong queries before computing all
# The axes of the weights: name -> dimension.
_AXES = {
    "pooling": {},
    "attention": {"batch": 0, "head": 2, "level": 3, "point": 4},
    "aggregation": {"batch": 0, "point": 2, "camera": 3, "level": 4, "group": 5},
}
_ZERO = "it is zero everywhere, as if the kernel had not run"


@dataclass
class Judged:
    """One result of a call. Errors are in units of the allowed error: up to 1 is right."""

    result: str
    device: float
    float32: float
    ours: float
    nans: int
    infinities: int
    left_out: int  # number of entries at a jump of the gradient, which are not judged
    verdict: str
    why: str = ""


@dataclass
class Verdict:
    """A call and its results."""

    call: RecordedCall
    nans: int  # number of NaN in the inputs
    infinities: int  # number of infinities in the inputs
    results: list[Judged]
    notes: list[str]

    @property
    def is_wrong(self) -> bool:
        return any(judged.verdict == WRONG for judged in self.results)


def judge(call: RecordedCall) -> Verdict:
    """Compute the call in float64, in float32 and by our kernel, and judge the device's results."""
    bound, ours, results = ErrorBound(call), compute_by_kernel(call), []
    for name, device in call.results.items():
        others = (bound.error(name, t.to(device.dtype), bound.truth[name]) for t in (bound.float32[name], ours[name]))
        errors = [float(t.max()) if t.numel() else 0.0 for t in (bound.errors[name], *others)]
        counts = (*_count_not_finite([device]), int(bound.unsure(name).sum()))
        results.append(Judged(name, *errors, *counts, RIGHT if errors[0] <= 1 else WRONG))  # pyright: ignore
    if any(judged.verdict == WRONG for judged in results):
        reasons = explain(bound)
        narrow = next((t.dtype for t in call.inputs if t.is_floating_point() and t.dtype.itemsize == 2), None)
        for judged in [judged for judged in results if judged.verdict == WRONG]:
            name = judged.result
            truth, wrong = bound.truth[name], bound.wrong[name]
            judged.why = reasons[name] or f"nothing known explains it; {describe_place(call, name, wrong, 'wrong')}"
            is_common = bool(wrong.sum() >= _COMMON * truth.count_nonzero())
            if not reasons[name] and narrow and is_common and find_coarse_factor(bound, name, narrow) == 1:
                words = f"error typical of sums in {str(narrow).removeprefix('torch.')}"
                judged.verdict, judged.why = COARSE, f"{words}; the operator's rules have sums in float32"
    nans, infinities = _count_not_finite(call.inputs)
    notes = [
        f"our own {judged.result} is off by {judged.ours:.3g} units: please report it, with the file"
        for judged in results
        if judged.ours > 1
    ]
    if (nans or infinities) and any(j.verdict == RIGHT and (j.nans or j.infinities) for j in results):
        notes.append("its NaN and infinities come from the inputs: float64 has the same")
    return Verdict(call, nans, infinities, results, notes)


def find_coarse_factor(bound: ErrorBound, name: str, narrow: torch.dtype) -> float | None:
    """Return 1.0 if the errors of a result are those of sums in 16 bits, and so the result is coarse and not wrong.

    An entry's bound is that of `_agreement.rounding_limit` for sums in `narrow` and exact positions: 16 + 2 sqrt(n) ulps for a
    sum of n terms. Return None if an error is larger. A common factor can hide in such errors. But rounding moves entries up as
    often as down, and truncation makes them smaller by up to an ulp. So the factor that fits all entries best must be 1, except
    for an ulp and for four standard errors of the fit, which a few random errors explain. Else return this factor.
    """
    device, truth = bound.call.results[name], bound.truth[name]
    if not bool((bound.error(name, device, truth, narrow) <= 1).all()):
        return None
    finite = device.isfinite() & truth.isfinite()
    a, b = device[finite].double(), truth[finite]
    squares = b.square().sum().clamp_min(1e-300)
    factor = (a * b).sum() / squares
    standard_error = ((a - factor * b).square().mean() / squares).sqrt()
    is_chance = abs(factor - 1) <= torch.finfo(narrow).eps + _STANDARD_ERRORS * standard_error
    return 1.0 if is_chance or not b.any() else float(factor)


def _count_not_finite(tensors: Sequence[Tensor]) -> tuple[int, int]:
    floating = [t for t in tensors if t.is_floating_point()]
    return sum(int(t.isnan().sum()) for t in floating), sum(int(t.isinf().sum()) for t in floating)


def explain(bound: ErrorBound) -> dict[str, str]:
    """Return {wrong result: the sentence that explains it, or ""}."""
    call, wrong = bound.call, [name for name, entries in bound.wrong.items() if entries.any()]
    if not any(bool(call.results[name].any()) for name in wrong):
        return dict.fromkeys(wrong, _ZERO)
    reasons: dict[str, str] = {}
    for sentence, suspect, core in list_suspicions(call):
        unexplained = [name for name in wrong if name not in reasons]
        if not unexplained:
            break
        by_query = [name for name in unexplained if call.is_by_query(name)]
        if call.num_queries > _SOME and by_query:  # try some wrong queries before all
            queries = bound.wrong[by_query[0]].movedim(1, 0).flatten(1).any(1).nonzero().flatten()[:_SOME]
            results = compute(suspect, torch.float64, core, queries)
            if not any(_agrees(bound, name, results[name], queries) for name in by_query):
                continue
        results = compute(suspect, torch.float64, core)
        explained = [name for name in unexplained if _agrees(bound, name, results[name])]
        # If all wrong entries are zero, `_describe_error` has the better explanation.
        if any(bool(call.results[name][bound.wrong[name]].any()) for name in explained):
            reasons.update(dict.fromkeys(explained, sentence))
    return {name: reasons.get(name) or _describe_error(bound, name) for name in wrong}


def _agrees(bound: ErrorBound, name: str, suspected: Tensor, queries: Tensor | None = None) -> bool:
    """Return whether the suspected numbers equal the device's. A small fraction may differ, because entries may lie at a jump
    of a gradient."""
    device, wrong = bound.call.results[name], bound.wrong[name]
    if queries is not None:
        device, wrong = device[:, queries], wrong[:, queries]
    different = bound.error(name, device, suspected, queries=queries) > 1
    is_rare = bool(different.sum() <= _JUMPS * different.numel())
    return is_rare and bool((different & wrong).sum() <= _JUMPS * wrong.sum())


def _describe_error(bound: ErrorBound, name: str) -> str:
    """Describe errors of a known pattern: NaN, zeros, truth times a factor, or another unit. Return "" for other errors."""
    call, device, truth, wrong = bound.call, bound.call.results[name], bound.truth[name], bound.wrong[name]

    def is_right(expected: Tensor) -> bool:
        return bool((bound.error(name, device, expected) <= 1).all())

    stray = ~device.isfinite() & truth.isfinite()
    if stray.any() and not wrong[~stray].any():
        kind = "NaN" if bool(device[stray].isnan().all()) else "NaN or infinite"
        return f"{describe_place(call, name, stray, kind)}, while the inputs give numbers; all other entries are right"
    if not device.any():
        return _ZERO
    factor = float((device.double() * truth)[wrong].sum() / truth[wrong].square().sum().clamp_min(1e-300))
    if factor and is_right(truth * factor):
        return f"it is {factor:.4g} times the truth"
    if name == "grad_locations":
        size = call.sampling.shapes.flip(-1).double()
        if is_right(truth / (size[:, 0] if call.description.kind == "aggregation" else size[:, None])):
            return "it is the gradient in pixels; it must be in fractions of the map"
    if not device[wrong].any():
        return f"all wrong entries are zero: {describe_place(call, name, wrong, 'wrong')}"
    if wrong.sum() > _ALIKE and is_right(torch.where(wrong, truth * factor, truth)):
        return describe_place(call, name, wrong, f"{factor:.4g} times the truth")
    return ""


def describe_place(call: RecordedCall, name: str, entries: Tensor, state: str) -> str:
    """Return "<number> of <total> entries are <state>" and the box of their indices. Add for each axis the indices that have
    such entries, such as "level 1", unless all its indices have them."""
    indices = entries.nonzero()
    box = zip(indices.amin(0).tolist(), indices.amax(0).tolist(), strict=True)
    text = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in box)
    parts = ""
    for axis, dim in _AXES[call.description.kind].items():
        count = call.sampling.weights.shape[dim]
        if axis == "batch" or (name in ("grad_weights", "grad_locations") and dim < entries.dim() - (name == "grad_locations")):
            by_part = entries.movedim(dim, 0)
        elif axis in ("head", "group") and name in ("output", "grad_value"):
            by_part = entries.flatten(2).unflatten(2, (count, -1)).movedim(2, 0)
        else:
            continue  # the result is a sum over this axis
        numbers = [str(i) for i in by_part.flatten(1).any(1).nonzero().flatten().tolist()]
        if 0 < len(numbers) < count:
            listed = " and ".join(filter(None, [", ".join(numbers[:-1]), numbers[-1]]))
            parts += f", at {axis}{'s' * (len(numbers) > 1)} {listed}"
    return f"{len(indices)} of {entries.numel()} entries are {state}, in [{text}]{parts}"
