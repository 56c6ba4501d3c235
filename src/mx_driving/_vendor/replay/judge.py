"""Judges a recorded call: each result against float64 truth, in units of what its dtype may lose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from ..._operator import limits
from .calls import RecordedCall
from .compute import compute_by_kernel, counted_samples
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
    left_out: int  # entries that nobody can judge
    verdict: str
    why: str = ""


@dataclass
class Verdict:
    """A call and its results. `limit` is the sentence of a limit of the vendor's device that the call breaks."""

    call: RecordedCall
    off_map: float
    nans: int  # in the inputs
    infinities: int
    limit: str
    results: list[Judged]
    notes: list[str] = field(default_factory=list)

    @property
    def is_wrong(self) -> bool:
        return any(judged.verdict == WRONG for judged in self.results)


def judge(call: RecordedCall) -> Verdict:
    """Compute the call in float64, in float32 and by our kernel, and judge the device's results."""
    bound, ours = ErrorBound(call), compute_by_kernel(_in_dtype_of_output(call))
    results = [_judge_result(bound, name, t, ours[name]) for name, t in call.results.items()]
    wrong = [judged.result for judged in results if judged.verdict == WRONG]
    reasons = explain(bound, wrong) if wrong else {}
    for judged in results:
        judged.why = reasons.get(judged.result, "")
        if judged.verdict == WRONG and not judged.why:
            _explain_otherwise(bound, judged)
    limit = limits.first_broken_by(call.row.name, *call.inputs, *call.sizes)
    verdict = Verdict(call, off_map(call), *_count_not_finite(call.inputs), limit, results)
    verdict.notes = [
        f"our own {judged.result} is off by {judged.ours:.3g} units: please report it, with the file"
        for judged in results
        if judged.ours > 1
    ]
    if shared := call.about.get("shared"):
        verdict.notes.append(f"{' and '.join(shared)} are one tensor, which has the sum of their gradients: not judged")
    if (verdict.nans or verdict.infinities) and any(j.verdict == RIGHT and (j.nans or j.infinities) for j in results):
        verdict.notes.append("its NaN and infinities come from the inputs: float64 has the same")
    return verdict


def _in_dtype_of_output(call: RecordedCall) -> RecordedCall:
    """Return the call with 16-bit inputs in the dtype of its output, where that is wider: autocast reads 16 bits, and computes
    and returns float32. The conversion is exact."""
    output = call.results.get("output", call.grad_output)
    if output is None or output.dtype.itemsize <= call.inputs[0].dtype.itemsize:
        return call
    inputs = tuple(t.to(output.dtype) if t.is_floating_point() and t.dtype.itemsize == 2 else t for t in call.inputs)
    return replace(call, inputs=inputs)


def _judge_result(bound: ErrorBound, name: str, device: Tensor, ours: Tensor) -> Judged:
    device_error, float32_error, our_error = (
        _largest(bound.error(name, t.to(device.dtype), bound.truth[name])) for t in (device, bound.float32[name], ours)
    )
    counts = (*_count_not_finite([device]), int(bound.unsure(name).sum()))
    return Judged(name, device_error, float32_error, our_error, *counts, RIGHT if device_error <= 1 else WRONG)


def _explain_otherwise(bound: ErrorBound, judged: Judged) -> None:
    """Explain a result that no known mistake gives: by sums in 16 bits, or by where the wrong entries are."""
    call, name = bound.call, judged.result
    narrow = next((t.dtype for t in call.inputs if t.is_floating_point() and t.dtype.itemsize == 2), None)
    if narrow and _largest(bound.error(name, call.results[name], bound.truth[name], narrow)) <= 1:
        words = f"error typical of sums in {str(narrow).removeprefix('torch.')}; the operator's rules have sums in float32"
        judged.verdict, judged.why = COARSE, words
    else:
        judged.why = f"nothing known explains it; {where(call, name, bound.wrong(name), 'wrong')}"


def _largest(errors: Tensor) -> float:
    return float(errors.max()) if errors.numel() else 0.0


def _count_not_finite(tensors: Sequence[Tensor]) -> tuple[int, int]:
    floating = [t for t in tensors if t.is_floating_point()]
    return sum(int(t.isnan().sum()) for t in floating), sum(int(t.isinf().sum()) for t in floating)


def off_map(call: RecordedCall) -> float:
    """Return the share of samples off their maps; of an aggregation, of points that no camera sees; 0 without maps."""
    if call.row.kind == "pooling":
        return 0.0
    on = counted_samples(call)
    on = on.any(-1) if call.row.kind == "aggregation" else on
    return float((~on).double().mean()) if on.numel() else 0.0
