"""How far apart two results of one computation are, and how far apart rounding may bring them.

`OUTPUT_LIMITS` and `GRADIENT_LIMITS` hold for a replacement beside the code that it replaces, on inputs of any model:
- outputs, the largest difference over the largest magnitude. float32 places a sample on a map of 1,000 pixels to 1e-4 pixels,
  and an output changes by at most its own size for each pixel. In 16 bits, offsets of some pixels are rounded to hundredths of
  a pixel, and logits to as much: of bfloat16 by eight times more than of float16;
- gradients, the norm of the difference over the norm. A gradient of locations jumps where a sample crosses the centre of a
  pixel. In float32, rounding brings up to 1e-3 of all samples to the other side, and their gradients are as large as others.

`rounding_limit` holds for an operator beside float64 truth. Errors are measured against the sum of the absolute values of the
terms, because rounding in a sum is proportional to that, whatever cancels. The inputs are rounded to the dtype before truth is
computed from them, so only arithmetic is judged:
- arithmetic in float32 or float64: a sum of n terms in any order loses at most about n ulps and typically sqrt(n); terms
  are products of at most five factors; 16 ulps + 2 sqrt(n) covers it;
- a position is a product and a difference: its error of about an ulp of the map's size moves coefficients of one corner to the
  next, so the error grows with the largest extent in pixels;
- the result is rounded once to its own dtype: half an ulp of the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

OUTPUT_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
GRADIENT_LIMITS = {torch.float64: 1e-6, torch.float32: 0.05}
ULPS = 16  # that products of at most five factors lose
_NOISE = 1e-4  # gradients that are zero but for rounding are this much smaller than the largest gradient of a call
_LEAST_SCALE = 1e-3  # the same of a model's gradients, where layers add up
_TIE = 1e-3  # a query that differs by more has another query's place


def rounding_limit(
    result_dtype: torch.dtype, compute_dtype: torch.dtype, magnitude: Any, scale: float, terms: int, extent: int
) -> Any:
    """Return the allowed error of each entry beside float64 truth.

    Args:
        result_dtype: of the result.
        compute_dtype: of the arithmetic.
        magnitude: absolute values of the true result, an array or a tensor; 0 where it is not finite.
        scale: the largest sum of absolute values of terms, or a smaller number, such as the largest true entry.
        terms: how many terms a sum has.
        extent: the largest side of a map in pixels; 0 if no position is computed.
    """
    rounding = torch.finfo(result_dtype).eps / 2 if result_dtype != compute_dtype else 0.0
    tiny = torch.finfo(result_dtype).tiny * 2.0**-9 if result_dtype == torch.float16 else 0.0
    arithmetic = torch.finfo(compute_dtype).eps * (ULPS + 2 * terms**0.5 + 2 * extent)
    return arithmetic * scale + rounding * magnitude + tiny


def entry_differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return the absolute difference of each entry. It is infinite where one is not finite and the other is not the same."""
    ours, theirs = _to_floating(ours), _to_floating(theirs)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0, (ours - theirs).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def output_difference(ours: Tensor, theirs: Tensor, least_scale: float = 0.0) -> float:
    """Return the largest difference, as a fraction of the largest finite magnitude of theirs, at least `least_scale`.

    It is infinite if the shapes differ.
    """
    if ours.shape != theirs.shape:
        return math.inf
    largest, scale = _largest(entry_differences(ours, theirs)), max(largest_magnitude(theirs), least_scale)
    return largest / scale if scale else (math.inf if largest else 0.0)


def largest_magnitude(t: Tensor) -> float:
    """Return the largest finite absolute value, 0 if there is none."""
    return _largest(_to_floating(t).abs().nan_to_num(nan=0, posinf=0))


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def model_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference of a model's tensors, each as a fraction of the largest magnitude in its tensor. That
    magnitude is at least a thousandth of the largest in all tensors, because some gradients are zero within rounding."""
    assert ours.keys() == theirs.keys()
    least_scale = max(map(largest_magnitude, theirs.values())) * _LEAST_SCALE
    return max(output_difference(ours[name], t, least_scale) for name, t in theirs.items())


def queries_off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Return which queries of outputs [1, queries, ..] differ by more than rounding. Two-stage models rank queries by a score.
    If two scores nearly tie, a rounding error exchanges their ranks, and both queries get the other rank's embedding.
    A NaN on one side only is no tie: the query is not off, and the difference is infinite."""
    off = torch.zeros(next(iter(theirs.values())).shape[1], dtype=torch.bool)
    for name, out in theirs.items():
        difference = (ours[name] - out)[0].reshape(len(off), -1).nan_to_num().abs()
        off |= (difference > _TIE * largest_magnitude(out)).any(1)
    return off


def difference_beside_ties(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, int]:
    """Return the largest difference of a model's outputs in queries that are not off, and how many queries are off."""
    off = queries_off(ours, theirs)
    outputs_beside_ties = [{name: out[:, ~off] for name, out in outputs.items()} for outputs in (ours, theirs)]
    return (model_difference(*outputs_beside_ties) if not off.all() else math.inf), int(off.sum())


def gradient_differences(ours: list[Tensor], theirs: list[Tensor]) -> list[float]:
    """Return the norm of the difference of each gradient, as a fraction of the norm of theirs."""
    norms = [_norm(t) for t in theirs]
    floor = max((n for n in norms if math.isfinite(n)), default=0.0) * _NOISE
    return [_compare_norms(o, t, max(n, floor)) for o, t, n in zip(ours, theirs, norms, strict=True)]


def _compare_norms(ours: Tensor, theirs: Tensor, scale: float) -> float:
    finite = ours.isfinite() & theirs.isfinite()
    if not torch.equal(ours.isfinite(), finite) or not torch.equal(theirs.isfinite(), finite):
        return math.inf
    difference = _norm(_to_floating(ours) - _to_floating(theirs))
    return difference / scale if scale else (math.inf if difference else 0.0)


def _norm(t: Tensor) -> float:
    return float(torch.linalg.vector_norm(_to_floating(t).nan_to_num(nan=0, posinf=0, neginf=0), dtype=torch.float64))


def _to_floating(t: Tensor) -> Tensor:
    """Return numbers that can be subtracted without rounding: 16 bits, whole numbers and truth values widened."""
    t = t.detach()
    return t if t.dtype in (torch.float32, torch.float64) else t.float() if t.is_floating_point() else t.double()
