"""Differences of two results of one computation, and the limits that rounding sets.

`rounding_limit` is for an operator that is compared with float64 truth. Errors are relative to the sum of the absolute values
of the terms, because the rounding error of a sum is proportional to this sum, even if terms cancel. Truth is computed from
inputs that are rounded to the dtype, so only the arithmetic is judged:
- arithmetic is in float32 or float64: a sum of n terms in any order loses at most about n ulps, and typically sqrt(n) ulps. A
  term is a product of at most five factors. 16 + 2 sqrt(n) ulps cover the sum and the products;
- a position is a product and a difference: its error of about an ulp of the map's size moves weight from a corner to the next,
  so the error of the result grows with the largest extent in pixels;
- the result is rounded once to its own dtype: half an ulp of the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ULPS = 16  # the allowed rounding error of a product of at most five factors, in ulps
_LEAST_SCALE = 1e-3  # the least scale of a tensor, as a fraction of the largest magnitude of all of a model's tensors
_TIE = 1e-3  # a query counts as exchanged if it differs by more than this fraction of the output's largest magnitude


def rounding_limit(
    result_dtype: torch.dtype, compute_dtype: torch.dtype, magnitude: Any, scale: float, terms: int, extent: int
) -> Any:
    """Return the allowed difference of each entry from float64 truth.

    Args:
        result_dtype: the dtype of the result.
        compute_dtype: the dtype of the arithmetic.
        magnitude: absolute values of the true result, an array or a tensor; 0 where it is not finite.
        scale: the largest sum of absolute values of terms, or a smaller number, such as the largest true entry.
        terms: the number of terms in a sum.
        extent: the largest side of a map in pixels; 0 if no position is computed.
    """
    rounding = torch.finfo(result_dtype).eps / 2 if result_dtype != compute_dtype else 0.0
    tiny = torch.finfo(result_dtype).tiny * 2.0**-9 if result_dtype == torch.float16 else 0.0
    arithmetic = torch.finfo(compute_dtype).eps * (ULPS + 2 * terms**0.5 + 2 * extent)
    return arithmetic * scale + rounding * magnitude + tiny


def entry_differences(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return absolute differences of entries: infinity where the entries are not the same and one of them is not finite."""
    ours, theirs = _to_floating(ours), _to_floating(theirs)
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    return torch.where(same, 0, (ours - theirs).abs()).nan_to_num(nan=math.inf, posinf=math.inf)


def output_difference(ours: Tensor, theirs: Tensor, least_scale: float = 0.0) -> float:
    """Return the largest difference, divided by the larger of `least_scale` and the largest finite magnitude of `theirs`.

    Return infinity if the shapes differ.
    """
    if ours.shape != theirs.shape:
        return math.inf
    largest, scale = _largest(entry_differences(ours, theirs)), max(largest_magnitude(theirs), least_scale)
    return largest / scale if scale else (math.inf if largest else 0.0)


def largest_magnitude(t: Tensor) -> float:
    """Return the largest finite absolute value; 0 if no value is finite."""
    return _largest(_to_floating(t).abs().nan_to_num(nan=0, posinf=0))


def _largest(t: Tensor) -> float:
    return float(t.max()) if t.numel() else 0.0


def model_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest `output_difference` of a model's tensors. Some gradients are zero except for rounding. So divide the
    difference of a tensor by at least a thousandth of the largest magnitude of all tensors."""
    assert ours.keys() == theirs.keys()
    least_scale = max(map(largest_magnitude, theirs.values())) * _LEAST_SCALE
    return max(output_difference(ours[name], t, least_scale) for name, t in theirs.items())


def queries_off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Return True for queries of outputs [1, queries, ..] that differ by more than rounding. Two-stage models rank queries.
    If two scores nearly tie, a rounding error exchanges their ranks, and both queries get the other rank's embedding.
    If a query is NaN in only one of ours and theirs, it is not a tie: return False, so that `difference_beside_ties` keeps
    the query and returns infinity."""
    off = torch.zeros(next(iter(theirs.values())).shape[1], dtype=torch.bool)
    for name, out in theirs.items():
        difference = (ours[name] - out)[0].reshape(len(off), -1).nan_to_num().abs()
        off |= (difference > _TIE * largest_magnitude(out)).any(1)
    return off


def difference_beside_ties(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, int]:
    """Leave out the queries of `queries_off`. Return (largest difference of the other queries, number of queries left out)."""
    off = queries_off(ours, theirs)
    outputs_beside_ties = [{name: out[:, ~off] for name, out in outputs.items()} for outputs in (ours, theirs)]
    return (model_difference(*outputs_beside_ties) if not off.all() else math.inf), int(off.sum())


def _to_floating(t: Tensor) -> Tensor:
    """Widen 16-bit floats, integers and booleans to floats that can be subtracted without rounding."""
    t = t.detach()
    return t if t.dtype in (torch.float32, torch.float64) else t.float() if t.is_floating_point() else t.double()
