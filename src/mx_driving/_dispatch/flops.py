"""FLOPs for torch.utils.flop_counter: products and sums over channels, counted as for matrix products.

Samples off the map count, too. Coordinates and coefficients do not count: their work does not grow with the number of
channels.

Importing the counter registers the formulas. We do not import the counter: it imports Triton if installed, which takes ten
times as long as importing this package.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from .._operator.description import OPERATORS, Operator
from .._replacing import when_imported


def _row_flops(operator: Operator, value: torch.Size, weights: torch.Size) -> int:
    """Return two FLOPs, a product and a sum, for each channel of each row that is read. `weights` may be logits' shape."""
    samples = math.prod(weights[:-1] if operator.kind == "aggregation" else weights)
    return 2 * operator.rows * samples * value[-1]


def _register(operator: Operator) -> None:
    from torch.utils.flop_counter import register_flop_formula

    packet = getattr(torch.ops.mx_driving, operator.name)
    packet_backward = getattr(torch.ops.mx_driving, operator.name + "_backward")
    # ranks_bev has an element for each row of feat that is read
    weights = operator.weights if operator.kind != "pooling" else operator.inputs.index("ranks_bev")

    def forward(*inputs: Any, out_shape: Any = None, **_: Any) -> int:
        return _row_flops(operator, inputs[0], inputs[weights])

    def backward(grad: Any, *rest: Any, **_: Any) -> int:
        """Count the FLOPs of a forward once for the gradient of value, and once for all other gradients: these share the
        products of grad_output and rows."""
        *inputs, mask = rest
        return _row_flops(operator, inputs[0], inputs[weights]) * (bool(mask[0]) + any(mask[1:]))

    register_flop_formula(packet)(forward)
    register_flop_formula(getattr(torch.ops.mx_driving, operator.name + "_autocast"))(forward)
    register_flop_formula(packet_backward)(backward)


def register() -> None:
    """Register the formulas of all operators as soon as the counter is imported."""
    when_imported("torch.utils.flop_counter", _register_all)


def _register_all() -> None:
    for operator in OPERATORS.values():
        _register(operator)
