"""geometric_kernel_attention_with_logits on a GPU: the bare operator's kernel reads reference points and logits itself.

The forward writes only the output. The backward writes the gradient of weights; a kernel of sampler.py converts it to the
gradient of logits. In deterministic mode plain torch computes the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._operator import composition
from . import geometric_kernel_attention, launch
from .geometric_kernel_attention import kernels
from .sampler import Samples, differentiate_softmax, weights_are_needed

_NAME = "geometric_kernel_attention_with_logits"


def _samples(shapes: Tensor, reference: Tensor, window: Tensor, logits: Tensor) -> Samples:
    sizes = logits.shape[2], shapes.shape[0], window.shape[0]
    return Samples((launch.paired(reference), window, logits), sizes, {"LOGITS": True})


def forward(*inputs: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    return kernels.sum_samples(inputs[:3], _samples(inputs[1], *inputs[3:]), dtype)


def backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients. A first kernel sums over channels, a second kernel computes the gradient of the softmax."""
    *inputs, mask = args
    samples, logits = _samples(inputs[1], *inputs[3:]), inputs[5]
    if weights_are_needed(samples, mask):
        return composition.backward(_NAME, geometric_kernel_attention.backward)(grad, *args)
    of_weights = logits.new_empty(logits.shape if mask[1] else 0, dtype=torch.float32)
    grad_value, *_ = kernels.differentiate(grad, inputs[:3], samples, (of_weights,), mask)
    return grad_value, differentiate_softmax(samples, of_weights) if mask[1] else logits.new_empty(0)
