"""How far the outputs of two models are apart, and which queries change places."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def largest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the largest difference, as a fraction of the largest magnitude in its tensor. That magnitude counts as at least a
    thousandth of the largest in all tensors, because some gradients are zero but for rounding."""
    assert ours.keys() == theirs.keys()
    scales = {name: float(t.abs().nan_to_num(nan=0, posinf=0).max()) for name, t in theirs.items()}
    floor = max(scales.values()) * 1e-3
    return max(_difference(ours[name], theirs[name]) / max(scale, floor) for name, scale in scales.items())


def _difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference. It is infinite if only one entry is finite, or if both are different infinities."""
    difference = float((a - b).abs().max())
    if math.isfinite(difference):  # nearly always, in a third of the time
        return difference
    return float(torch.where(a == b, 0, (a - b).abs()).nan_to_num(nan=torch.inf, posinf=torch.inf).max())


def queries_off(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> Tensor:
    """Return which queries of outputs [1, queries, ..] differ by more than rounding. Two-stage models rank their queries by a
    score: where two nearly tie, one rounding error decides which comes first, and both get another place's embedding."""
    off = torch.zeros(next(iter(theirs.values())).shape[1], dtype=torch.bool)
    for name, out in theirs.items():
        scale = float(out[out.isfinite()].abs().max())
        off |= ((ours[name] - out)[0].reshape(len(off), -1) / scale).nan_to_num().abs().amax(1) > 1e-3
    return off


def difference_beside_ties(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, int]:
    """Return the largest difference in queries that are not off, and how many queries are off."""
    off = queries_off(ours, theirs)
    outputs_beside_ties = [{name: out[:, ~off] for name, out in outputs.items()} for outputs in (ours, theirs)]
    return (largest(*outputs_beside_ties) if not off.all() else math.inf), int(off.sum())
