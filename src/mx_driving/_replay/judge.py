"""Judge a recorded call: compare each result with float64 truth, in units of the allowed error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .calls import RecordedCall
from .compute import compute_by_kernel
from .error_bound import ErrorBound
from .explain import describe_place, explain

RIGHT, COARSE, WRONG = "right", "coarse", "wrong"
# Sums in 16 bits move at least this fraction of the entries that are not zero by more than rounding, up as often as down: the
# best common factor is within so many ulps of 1.
_COMMON, _BIAS = 0.1, 2


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
    bound, ours = ErrorBound(call), compute_by_kernel(call)
    results = [_judge_result(bound, name, ours[name]) for name in call.results]
    if any(judged.verdict == WRONG for judged in results):
        reasons = explain(bound)
        for judged in results:
            if judged.verdict == WRONG:
                judged.why = reasons[judged.result] or _explain_otherwise(bound, judged)
    nans, infinities = _count_not_finite(call.inputs)
    notes = [
        f"our own {judged.result} is off by {judged.ours:.3g} units: please report it, with the file"
        for judged in results
        if judged.ours > 1
    ]
    if (nans or infinities) and any(j.verdict == RIGHT and (j.nans or j.infinities) for j in results):
        notes.append("its NaN and infinities come from the inputs: float64 has the same")
    return Verdict(call, nans, infinities, results, notes)


def _judge_result(bound: ErrorBound, name: str, ours: Tensor) -> Judged:
    device, truth = bound.call.results[name], bound.truth[name]
    others = (bound.error(name, t.to(device.dtype), truth) for t in (bound.float32[name], ours))
    errors = [float(t.max()) if t.numel() else 0.0 for t in (bound.errors[name], *others)]
    counts = (*_count_not_finite([device]), int(bound.unsure(name).sum()))
    return Judged(name, *errors, *counts, RIGHT if errors[0] <= 1 else WRONG)  # pyright: ignore


def _explain_otherwise(bound: ErrorBound, judged: Judged) -> str:
    """Explain a wrong result that `explain` does not explain: by sums in 16 bits, or by the indices of the wrong entries."""
    call, name = bound.call, judged.result
    device, truth, wrong = call.results[name], bound.truth[name], bound.wrong[name]
    narrow = next((t.dtype for t in call.inputs if t.is_floating_point() and t.dtype.itemsize == 2), None)
    if narrow and bool((bound.error(name, device, truth, narrow) <= 1).all()):
        is_common = bool(wrong.sum() >= _COMMON * truth.count_nonzero())
        factor = float((device.double() * truth).nansum() / truth.square().nansum().clamp_min(1e-300))
        if is_common and abs(factor - 1) <= _BIAS * torch.finfo(narrow).eps:
            judged.verdict = COARSE
            return f"error typical of sums in {str(narrow).removeprefix('torch.')}; the operator's rules have sums in float32"
    return f"nothing known explains it; {describe_place(call, name, wrong, 'wrong')}"


def _count_not_finite(tensors: Sequence[Tensor]) -> tuple[int, int]:
    floating = [t for t in tensors if t.is_floating_point()]
    return sum(int(t.isnan().sum()) for t in floating), sum(int(t.isinf().sum()) for t in floating)
