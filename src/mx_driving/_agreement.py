"""How far apart two results of one computation are, and how far apart rounding may bring them.

The limits hold for a replacement beside the code that it replaces, on inputs of any model:
- outputs, the largest difference over the largest magnitude. float32 places a sample on a map of 1,000 pixels to 1e-4 pixels,
  and an output changes by at most its own size for each pixel. In 16 bits, offsets of some pixels are rounded to hundredths of
  a pixel, and logits to as much: of bfloat16 by eight times more than of float16;
- gradients, the norm of the difference over the norm. A gradient of locations jumps where a sample crosses the centre of a
  pixel. In float32, rounding brings up to 1e-3 of all samples to the other side, and their gradients are as large as others.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

OUTPUT_LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
GRADIENT_LIMITS = {torch.float64: 1e-6, torch.float32: 0.05}
_NOISE = 1e-4  # gradients that are zero but for rounding are this much smaller than the largest gradient of a call


def output_difference(ours: Tensor, theirs: Tensor, least_scale: float = 0.0) -> float:
    """Return the largest difference, as a fraction of the largest finite magnitude of theirs, at least `least_scale`.

    It is infinite if the shapes differ, or if an entry that is not finite is not the same in both.
    """
    if ours.shape != theirs.shape:
        return math.inf
    ours, theirs = _to_floating(ours), _to_floating(theirs)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    difference = torch.where(same, 0, (ours - theirs).abs()).nan_to_num(nan=math.inf, posinf=math.inf)
    largest, scale = float(difference.max()) if difference.numel() else 0.0, max(largest_magnitude(theirs), least_scale)
    return largest / scale if scale else (math.inf if largest else 0.0)


def largest_magnitude(t: Tensor) -> float:
    """Return the largest finite absolute value, 0 if there is none."""
    return float(_to_floating(t).abs().nan_to_num(nan=0, posinf=0).max()) if t.numel() else 0.0


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
