"""Small inputs in float64, which finite differences need, and what the tests of derivatives share."""

from __future__ import annotations

import cases
import logits_cases
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS

SMALL = {
    MULTI_SCALE: lambda: cases.multi_scale(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    AGGREGATION: lambda: cases.aggregation(2, 2, 2, 4, 2, [[(3, 4), (1, 1)], [(2, 2), (1, 3)]]),
    GEOMETRIC: lambda: cases.geometric(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    MULTI_SCALE_LOGITS: lambda: logits_cases.multi_scale(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    AGGREGATION_LOGITS: lambda: logits_cases.aggregation(2, 2, 3, 4, 2, [[(3, 4), (1, 1)], [(2, 2), (1, 3)]]),
    GEOMETRIC_LOGITS: lambda: logits_cases.geometric(2, 2, 3, 2, [(3, 4), (2, 1)], (1, 2)),
}


def inputs_of(operator, wanted=None):
    wanted = cases.DIFFERENTIABLE[operator] if wanted is None else wanted
    return tuple(a.requires_grad_(i in wanted) if cases.is_floating(a) else a for i, a in enumerate(SMALL[operator]()))


def loss_of(function):
    return lambda *chosen: function(*chosen).square().sum()


def chosen(args, in_dims, k):
    return tuple(a if d is None else a.select(d, k) for a, d in zip(args, in_dims, strict=True))
