"""Differences of two results of one computation, and the limits that rounding sets.

`rounding_limit` is for an operator that is compared with float64 truth. Errors are relative to the sum of the absolute values
of the terms, because the rounding error of a sum is proportional to this sum, even if terms cancel. Truth is computed from
inputs that are rounded to the dtype, so only the arithmetic is judged:
- arithmetic is in float32 or float64: a sum of n terms in any order loses at most about n ulps, and typically sqrt(n) ulps. A
  term is a product of at most five factors. 16 + 2 sqrt(n) ulps cover the sum and the products;
- a position is a product and a difference: its error of about an ulp of the map's size moves weight from a corner to the next,
  so the error of the result grows with the largest extent in pixels;
- the result is rounded once to its own dtype: half an ulp of the result. Take the ulp at the entry's power of two, not the
  dtype's largest relative error: so a factor of 1.001 is found, which moves some bfloat16 entries over a rounding boundary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

ULPS = 16  # the allowed rounding error of a product of at most five factors, in ulps
_LEAST_SCALE = 1e-3  # the least scale of a tensor, as a fraction of the largest magnitude of all of a model's tensors
_CHANGED = 1e-3  # a query has changed if it differs by more than this fraction of the output's largest magnitude
_MOST_TIES = 50  # ties may change the ranks of two queries, or of one query in so many


def rounding_limit(
    result_dtype: torch.dtype, compute_dtype: torch.dtype, magnitude: Any, scale: float, terms: int, extent: int
) -> Any:
    """Return the allowed difference of each entry from float64 truth: a float64 tensor, or a float if the two dtypes are equal.

    Args:
        result_dtype: the dtype of the result.
        compute_dtype: the dtype of the arithmetic.
        magnitude: absolute values of the true result, a number or a tensor; 0 where it is not finite.
        scale: the largest sum of absolute values of terms, or a smaller number, such as the largest true entry.
        terms: the number of terms in a sum.
        extent: the largest side of a map in pixels; 0 if no position is computed.
    """
    arithmetic = torch.finfo(compute_dtype).eps * (ULPS + 2 * terms**0.5 + 2 * extent) * scale
    if result_dtype == compute_dtype:
        return arithmetic
    info = torch.finfo(result_dtype)
    computed = torch.as_tensor(magnitude, dtype=torch.float64) + arithmetic
    exponent = torch.frexp(computed.clamp_min(info.tiny)).exponent - 1  # subnormal numbers have the ulp of the least normal one
    limit = arithmetic + torch.ldexp(torch.full_like(computed, info.eps / 2), exponent)
    is_rounded_twice = compute_dtype == torch.float64 and info.bits == 16  # torch converts float64 to 16 bits through float32
    return limit + computed * torch.finfo(torch.float32).eps / 2 if is_rounded_twice else limit


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
    difference of a tensor by at least a thousandth of the largest magnitude of all tensors. Return infinity if one of the two
    lacks a tensor."""
    if not _are_alike(ours, theirs):
        return math.inf
    least_scale = max(map(largest_magnitude, theirs.values())) * _LEAST_SCALE
    return max(output_difference(ours[name], t, least_scale) for name, t in theirs.items())


def _are_alike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Return whether both have tensors of the same names, shapes and dtypes. Return False if a tensor of `ours` is None."""
    pairs = [(ours.get(name), t) for name, t in theirs.items()]
    return ours.keys() == theirs.keys() and all(
        isinstance(mine, Tensor) and (mine.shape, mine.dtype) == (t.shape, t.dtype) for mine, t in pairs
    )


def difference_beside_ties(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, int]:
    """Return the largest difference of outputs [bs, queries, ..], and the number of queries left out because of near ties.

    Two-stage models rank queries by scores. If two scores nearly tie, a rounding error exchanges their ranks. Ranks that nearly
    tie are neighbours. So a tie changes at least two queries side by side, or the last query alone, whose rival has no rank.
    Leave out a run of changed queries if it has the same queries in another order. Some models add an embedding of the rank, so
    that a tie gives both queries new numbers. Therefore also leave out a changed pair, or the last query alone, if its numbers
    are finite and at most twice as large as those of all queries. Leave out no query if ties would explain all queries, or more
    than two and more than one of 50: rounding does not cause so many.
    """
    first = next(iter(theirs.values()))
    if not _are_alike(ours, theirs):
        return math.inf, 0
    if len(first) > 1:
        items = [[{name: out[[i]] for name, out in outs.items()} for outs in (ours, theirs)] for i in range(len(first))]
        differences, counts = zip(*(difference_beside_ties(*item) for item in items), strict=True)
        return max(differences), sum(counts)
    # `rows` has the numbers of each query, as fractions of the largest magnitude of their output
    scales = {name: largest_magnitude(out) or 1.0 for name, out in theirs.items()}
    rows = [
        torch.cat([(_to_floating(out[0]).double() / scales[name]).flatten(1) for name, out in outs.items()], 1)
        for outs in (ours, theirs)
    ]
    changed = (entry_differences(*rows) > _CHANGED).any(1)
    most = max(2, len(changed) // _MOST_TIES)
    left_out = torch.zeros_like(changed)
    runs = torch.cat([changed.new_zeros(1), changed, changed.new_zeros(1)]).diff().nonzero().flatten().view(-1, 2).tolist()
    for begin, end in runs:
        if end - begin > most:
            continue
        mine, original = (side[begin:end] for side in rows)
        distances = torch.stack([entry_differences(row.expand_as(original), original).amax(1) for row in mine])
        is_permuted = bool((distances.amin(1) <= _CHANGED).all()) and len(set(distances.argmin(1).tolist())) == end - begin
        is_pair_or_last = end - begin == 2 or begin == len(changed) - 1
        is_of_usual_size = bool(distances.isfinite().all()) and largest_magnitude(mine) <= 2
        left_out[begin:end] = is_permuted or (is_pair_or_last and is_of_usual_size)
    if int(left_out.sum()) > most or bool(left_out.all()):
        left_out[:] = False
    kept = [{name: out[:, ~left_out] for name, out in outs.items()} for outs in (ours, theirs)]
    return model_difference(*kept), int(left_out.sum())


def _to_floating(t: Tensor) -> Tensor:
    """Widen 16-bit floats, integers and booleans to floats that can be subtracted without rounding."""
    t = t.detach()
    return t if t.dtype in (torch.float32, torch.float64) else t.float() if t.is_floating_point() else t.double()
