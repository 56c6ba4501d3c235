"""What is right about a recorded call: each result against float64 truth, in units of what its dtype may lose."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .._operators import LOCATIONS, SHAPES, VALUE, WEIGHTS
from ..measure.tolerance import allowed
from .calls import Call
from .compute import Results, by_kernel, computed, counts, scales
from .explain import explain, where

RIGHT, COARSE, WRONG = "right", "coarse", "wrong"
_LATTICE = 16  # ulps of a position: nearer to a pixel's centre, float32 and float64 may be on different sides of it


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

    @property
    def word(self) -> str:
        words = [judged.verdict for judged in self.results]
        return next(word for word in (WRONG, COARSE, RIGHT) if word in words)


class Yardstick:
    """Truth, and what each result of a call may lose."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.truth = computed(call, torch.float64)
        self._scales = scales(call)
        row, value, weights = call.row, call.inputs[VALUE], call.inputs[WEIGHTS]
        of_query = weights[0, :1].numel() * 4
        samples = call.inputs[LOCATIONS].numel() // 2
        self._terms = {"output": of_query, "grad_value": max(of_query, samples)}
        self._compute = torch.float64 if any(t.dtype == torch.float64 for t in call.inputs) else torch.float32
        self._channels = value.shape[-1] * 4
        self._extent = 0 if row.integer_locations or not call.inputs[SHAPES].numel() else int(call.inputs[SHAPES].max())

    def limit(self, result: str, dtype: torch.dtype, expected: Tensor, compute: torch.dtype | None = None) -> Tensor:
        """What each entry may differ by from `expected`, the truth or a suspect's. `compute`: the dtype of the sums; by the
        operator's rules float64 as soon as an input is, else float32."""
        extent = self._extent if compute is None else 0  # 16 bits hold no position of a map
        magnitude = torch.where(expected.isfinite(), expected.abs(), 0)
        scale = max(self._scales[result], float(magnitude.max()) if magnitude.numel() else 0.0)
        terms = max(1, self._terms.get(result, self._channels))
        return allowed(dtype, compute or self._compute, magnitude, scale, terms, extent)

    def error(self, result: str, got: Tensor, expected: Tensor, compute: torch.dtype | None = None) -> Tensor:
        """The error of each entry in units; infinite where one is NaN or infinite and the other is not."""
        limit = self.limit(result, got.dtype, expected, compute).clamp_min(1e-300)
        rounded, got = expected.to(got.dtype).double(), got.double()
        expected = torch.where(rounded.isinf(), rounded, expected)  # it overflows in this dtype
        same = (got == expected) | (got.isnan() & expected.isnan())
        units = ((got - expected).abs() / limit).nan_to_num(math.inf, math.inf)
        units = torch.where(same, 0, units)
        return torch.where(self.unsure(result), 0, units)

    def unsure(self, result: str) -> Tensor:
        """Where a location lies on the centre of a pixel but for rounding: its gradient jumps there."""
        if result != "grad_locations":
            return torch.zeros((), dtype=torch.bool)
        locations, sizes = self.call.inputs[LOCATIONS].double(), self.call.inputs[SHAPES].double().flip(-1)
        sizes = sizes.movedim(-2, 0)[:, None, None, None] if self.call.row.grouped else sizes[None, :, None]
        near = _LATTICE * torch.finfo(self._compute).eps * self._extent
        at = locations[None] * sizes - 0.5 if self.call.row.grouped else locations * sizes - 0.5
        on = (at - at.round()).abs() <= near
        return on.any(0) if self.call.row.grouped else on


def judge(call: Call) -> Verdict:
    """Compute the call in float64, in float32 and by our kernel, and say what the device's results are worth."""
    yardstick = Yardstick(call)
    float32, ours = computed(call, None), by_kernel(call)
    verdict = Verdict(call, off_map(call), *_not_finite(call.inputs), [])
    for name, got in call.results.items():
        verdict.results.append(_result(yardstick, name, got, float32, ours))
    wrong = [judged.result for judged in verdict.results if judged.verdict == WRONG]
    reasons = explain(yardstick, wrong) if wrong else {}
    for judged in verdict.results:
        judged.why = reasons.get(judged.result, "")
        if judged.verdict == WRONG and not judged.why:
            _as_coarse(yardstick, judged, call.results[judged.result])
        if judged.ours > 1:
            verdict.notes.append(f"our own {judged.result} is off by {judged.ours:.3g} units: please report it, with the file")
    inputs = verdict.nans or verdict.infinities
    if inputs and any(j.verdict == RIGHT and (j.nans or j.infinities) for j in verdict.results):
        verdict.notes.append("its NaN and infinities come from the inputs: float64 has the same")
    return verdict


def _result(yardstick: Yardstick, name: str, got: Tensor, float32: Results, ours: Results) -> Judged:
    truth = yardstick.truth[name]
    device, of_float32, of_ours = (
        _largest(yardstick.error(name, t.to(got.dtype), truth)) for t in (got, float32[name], ours[name])
    )
    nans, infinities = _not_finite([got])
    judged = Judged(name, device, of_float32, of_ours, nans, infinities, RIGHT, int(yardstick.unsure(name).sum()))
    if not judged.device <= 1:
        judged.verdict = WRONG
    return judged


def _as_coarse(yardstick: Yardstick, judged: Judged, got: Tensor) -> None:
    """The words for what nothing explains: sums in 16 bits, or where the wrong entries are."""
    narrow, errors = _narrow(yardstick.call), yardstick.error(judged.result, got, yardstick.truth[judged.result])
    if narrow and _largest(yardstick.error(judged.result, got, yardstick.truth[judged.result], narrow)) <= 1:
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
    """The share of samples that are not on their maps; of an aggregation, of points that no camera sees."""
    on = counts(call)
    on = on.any(-1) if call.row.grouped else on
    return float((~on).double().mean()) if on.numel() else 0.0
