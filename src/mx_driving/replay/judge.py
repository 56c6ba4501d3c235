"""What is right about a recorded call: each result against float64 truth, in units of what its dtype may lose."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._checks import limits
from .calls import Call, given
from .compute import Results, by_kernel, computed, counts
from .error_bound import ErrorBound
from .explain import explain, where

RIGHT, COARSE, WRONG = "right", "coarse", "wrong"


@dataclass
class Judged:
    """One result of a call. Errors are in units of what the dtype may lose: up to 1 is right."""

    result: str
    device: float
    float32: float
    ours: float
    nans: int
    infinities: int
    verdict: str
    left_out: int = 0  # entries that nobody can judge
    why: str = ""


@dataclass
class Verdict:
    """A call and its results."""

    call: Call
    off_map: float
    nans: int  # in the inputs
    infinities: int
    results: list[Judged]
    notes: list[str] = field(default_factory=list)
    limit: str = ""  # of the vendor's device, that the call passes

    @property
    def word(self) -> str:
        words = [judged.verdict for judged in self.results]
        return next(word for word in (WRONG, COARSE, RIGHT) if word in words)


def judge(call: Call) -> Verdict:
    """Compute the call in float64, in float32 and by our kernel, and say what the device's results are worth."""
    bound = ErrorBound(call)
    wide = _as_computed(call)
    float32, ours = computed(wide, None), by_kernel(wide)
    verdict = Verdict(
        call,
        off_map(call),
        *_not_finite(call.inputs),
        [],
        limit=limits.first_broken_by(call.row.name, *given(call.row, call.inputs)),
    )
    for name, got in call.results.items():
        verdict.results.append(_result(bound, name, got, float32, ours))
    wrong = [judged.result for judged in verdict.results if judged.verdict == WRONG]
    reasons = explain(bound, wrong) if wrong else {}
    for judged in verdict.results:
        judged.why = reasons.get(judged.result, "")
        if judged.verdict == WRONG and not judged.why:
            _as_coarse(bound, judged, call.results[judged.result])
        if judged.ours > 1:
            verdict.notes.append(f"our own {judged.result} is off by {judged.ours:.3g} units: please report it, with the file")
    if shared := call.about.get("shared"):
        verdict.notes.append(f"{' and '.join(shared)} are one tensor, which has the sum of their gradients: not judged")
    inputs = verdict.nans or verdict.infinities
    if inputs and any(j.verdict == RIGHT and (j.nans or j.infinities) for j in verdict.results):
        verdict.notes.append("its NaN and infinities come from the inputs: float64 has the same")
    return verdict


def _as_computed(call: Call) -> Call:
    """Return the call with 16-bit inputs in the dtype of its output, where that is wider: autocast reads 16 bits, and computes
    and returns float32. The conversion is exact."""
    output = call.results.get("output", call.grad_output)
    if output is None or output.dtype.itemsize <= call.inputs[0].dtype.itemsize:
        return call
    inputs = tuple(t.to(output.dtype) if t.is_floating_point() and t.dtype.itemsize == 2 else t for t in call.inputs)
    return replace(call, inputs=inputs)


def _result(bound: ErrorBound, name: str, got: Tensor, float32: Results, ours: Results) -> Judged:
    truth = bound.truth[name]
    device, of_float32, of_ours = (
        _largest(bound.error(name, t.to(got.dtype), truth)) for t in (got, float32[name], ours[name])
    )
    nans, infinities = _not_finite([got])
    judged = Judged(name, device, of_float32, of_ours, nans, infinities, RIGHT, int(bound.unsure(name).sum()))
    if not judged.device <= 1:
        judged.verdict = WRONG
    return judged


def _as_coarse(bound: ErrorBound, judged: Judged, got: Tensor) -> None:
    """The words for what nothing explains: sums in 16 bits, or where the wrong entries are."""
    narrow, errors = _narrow(bound.call), bound.error(judged.result, got, bound.truth[judged.result])
    if narrow and _largest(bound.error(judged.result, got, bound.truth[judged.result], narrow)) <= 1:
        kind = str(narrow).removeprefix("torch.")
        judged.verdict, judged.why = COARSE, f"as inexact as sums in {kind}; by the operator's rules they are in float32"
    else:
        judged.why = "nothing known explains it; " + where(errors > 1, "wrong")


def _narrow(call: Call) -> torch.dtype | None:
    """The 16-bit dtype among the inputs."""
    return next((t.dtype for t in call.inputs if t.is_floating_point() and t.dtype.itemsize == 2), None)


def _largest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def _not_finite(tensors: tuple[Tensor, ...] | list[Tensor]) -> tuple[int, int]:
    floating = [t for t in tensors if t.is_floating_point()]
    return sum(int(t.isnan().sum()) for t in floating), sum(int(t.isinf().sum()) for t in floating)


def off_map(call: Call) -> float:
    """The share of samples that are not on their maps; of an aggregation, of points that no camera sees; 0 without maps."""
    if not call.row.samples:
        return 0.0
    on = counts(call)
    on = on.any(-1) if call.row.grouped else on
    return float((~on).double().mean()) if on.numel() else 0.0
