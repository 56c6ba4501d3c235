"""Measure differences between the outputs of two models, and find queries that change places."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._agreement import largest_magnitude, output_difference


def largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference, as a fraction of the largest magnitude in its tensor. That magnitude is taken to be at
    least a thousandth of the largest in all tensors, because some gradients are zero within rounding."""
    assert ours.keys() == theirs.keys()
    floor = max(map(largest_magnitude, theirs.values())) * 1e-3
    return max(output_difference(ours[name], t, floor) for name, t in theirs.items())


def queries_off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Return which queries of outputs [1, queries, ..] differ by more than rounding. Two-stage models rank queries by a score.
    If two scores nearly tie, a rounding error exchanges their ranks, and both queries get the other rank's embedding.
    A NaN on one side only is no tie: the query is not off, and `largest` is infinite."""
    off = torch.zeros(next(iter(theirs.values())).shape[1], dtype=torch.bool)
    for name, out in theirs.items():
        difference = (ours[name] - out)[0].reshape(len(off), -1).nan_to_num().abs()
        off |= (difference > 1e-3 * largest_magnitude(out)).any(1)
    return off


def difference_beside_ties(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, int]:
    """Return the largest difference in queries that are not off, and how many queries are off."""
    off = queries_off(ours, theirs)
    outputs_beside_ties = [{name: out[:, ~off] for name, out in outputs.items()} for outputs in (ours, theirs)]
    return (largest(*outputs_beside_ties) if not off.all() else math.inf), int(off.sum())
