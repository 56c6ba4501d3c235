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

from ._when_imported import when_imported

# rows of the table that a sample reads
_ROWS = {"multi_scale_deformable_attn": 4, "deformable_aggregation": 4, "geometric_kernel_attention": 1}


def _row_flops(name: str, table: torch.Size, weights: torch.Size) -> int:
    """Multiply and add once per row and channel."""
    samples = math.prod(weights[:-1] if name == "deformable_aggregation" else weights)
    return 2 * _ROWS[name] * samples * table[-1]


def _register(name: str) -> None:
    from torch.utils.flop_counter import register_flop_formula

    packet = getattr(torch.ops.mx_driving, name)
    packet_backward = getattr(torch.ops.mx_driving, name + "_backward")

    def forward(table: Any, shapes: Any, starts: Any, locations: Any, weights: Any, out_shape: Any = None, **_: Any) -> int:
        return _row_flops(name, table, weights)

    def backward(grad: Any, table: Any, shapes: Any, starts: Any, locations: Any, weights: Any, mask: Any, **_: Any) -> int:
        """Once to add to the table's rows, once for the products with them that both other gradients are made of."""
        return _row_flops(name, table, weights) * (bool(mask[0]) + any(mask[1:]))

    register_flop_formula(packet)(forward)
    register_flop_formula(packet_backward)(backward)


def register() -> None:
    """All operators, when the counter is imported."""
    when_imported("torch.utils.flop_counter", _register_all)


def _register_all() -> None:
    for name in _ROWS:
        _register(name)
