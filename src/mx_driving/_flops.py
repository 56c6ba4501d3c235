"""What torch.utils.flop_counter counts: products and sums over channels, as it does for matrix products.

A sample is counted whether or not it turns out to be on the map, and what is done once per sample (coordinates, shares) is
not: it is no part of the work that grows with channels.

The formulas are registered when that module is imported: it imports Triton where that is installed, which takes ten times
as long as importing this package.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ._operators import OPERATORS, Operator
from ._when_imported import when_imported


def _row_flops(operator: Operator, value: torch.Size, weights: torch.Size) -> int:
    """Multiply and add once per row and channel."""
    samples = math.prod(weights[:-1] if operator.grouped else weights)
    return 2 * operator.rows * samples * value[-1]


def _register(operator: Operator) -> None:
    from torch.utils.flop_counter import register_flop_formula

    packet = getattr(torch.ops.mx_driving, operator.name)
    packet_backward = getattr(torch.ops.mx_driving, operator.name + "_backward")

    def forward(value: Any, shapes: Any, starts: Any, locations: Any, weights: Any, out_shape: Any = None, **_: Any) -> int:
        return _row_flops(operator, value, weights)

    def backward(grad: Any, value: Any, shapes: Any, starts: Any, locations: Any, weights: Any, mask: Any, **_: Any) -> int:
        """Once to add to value's rows, once for the products with them that both other gradients are made of."""
        return _row_flops(operator, value, weights) * (bool(mask[0]) + any(mask[1:]))

    register_flop_formula(packet)(forward)
    register_flop_formula(packet_backward)(backward)


def register() -> None:
    """All operators, when the counter is imported."""
    when_imported("torch.utils.flop_counter", _register_all)


def _register_all() -> None:
    for operator in OPERATORS.values():
        _register(operator)
