"""geometric_kernel_attention_with_logits on a GPU: the bare operator's kernel reads reference points and logits itself.

The forward writes nothing but the output. The backward writes the gradient of weights, from which a kernel of logits.py makes
that of logits. The deterministic mode sorts by ready weights, which plain torch makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._operator import composition
from . import attention, geometric_kernel_attention, launch
from .logits import MOST_SAMPLES, differentiate_softmax

_NAME = "geometric_kernel_attention_with_logits"
_FLAGS = {"LOGITS": True}


def _samples(shapes: Tensor, reference: Tensor, window: Tensor, logits: Tensor) -> attention.Samples:
    return attention.Samples((launch.paired(reference), window, logits), (shapes.shape[0], window.shape[0]), _FLAGS)


def forward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    reference: Tensor,
    window: Tensor,
    logits: Tensor,
    dtype: torch.dtype | None = None,
) -> Tensor:
    samples = _samples(shapes, reference, window, logits)
    return geometric_kernel_attention.kernels.sum_samples(value, shapes, starts, samples, dtype)


def backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    reference: Tensor,
    window: Tensor,
    logits: Tensor,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    """Return the gradients. One kernel sums over channels, a second one makes the gradient of the softmax."""
    samples, count = _samples(shapes, reference, window, logits), shapes.shape[0] * window.shape[0]
    ordered = mask[0] and torch.are_deterministic_algorithms_enabled()  # which records ready weights
    if ordered or count > MOST_SAMPLES:
        inputs = value, shapes, starts, reference, window, logits
        return composition.backward(_NAME, geometric_kernel_attention.backward)(grad, *inputs, mask)
    of_weights = logits.new_empty(logits.shape if mask[1] else 0, dtype=torch.float32)
    kernels = geometric_kernel_attention.kernels
    grad_value, *_ = kernels.differentiate(grad, value, shapes, starts, samples, (of_weights,), mask)
    return grad_value, differentiate_softmax(logits, of_weights, count) if mask[1] else logits.new_empty(0)
