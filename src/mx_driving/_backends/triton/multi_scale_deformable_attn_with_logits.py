"""multi_scale_deformable_attn_with_logits on a GPU: the bare operator's kernel reads offsets and logits itself.

The forward writes nothing but the output. The backward writes the gradient of weights, from which a kernel of logits.py makes
that of logits. In the deterministic mode, which sorts by ready weights, logits.py makes locations and weights first.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._operator import composition
from . import attention, launch, multi_scale_deformable_attn
from .logits import MOST_SAMPLES, Gradients, make_samples
from .multi_scale_deformable_attn import OF_LOCATIONS, OF_OFFSETS

_NAME = "multi_scale_deformable_attn_with_logits"


def _samples(reference: Tensor, offsets: Tensor, logits: Tensor, axis: str) -> attention.Samples:
    flags = {"REFERENCES": reference.shape[2], "BY_POINT": axis == "point", "BOX": reference.shape[3] == 4}
    tensors = launch.paired(reference), launch.paired(offsets), logits
    return attention.Samples(tensors, offsets.shape[3:5], flags)


def forward(
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    reference: Tensor,
    offsets: Tensor,
    logits: Tensor,
    axis: str = "level",
    dtype: torch.dtype | None = None,
) -> Tensor:
    samples = _samples(reference, offsets, logits, axis)
    return multi_scale_deformable_attn.kernels.sum_samples(value, shapes, starts, samples, dtype)


def backward(
    grad: Tensor,
    value: Tensor,
    shapes: Tensor,
    starts: Tensor,
    reference: Tensor,
    offsets: Tensor,
    logits: Tensor,
    axis: str,
    mask: list[bool],
) -> tuple[Tensor, ...]:
    """Return the gradients. One kernel sums over channels, a second one makes the gradient of the softmax.

    The gradients of reference points and offsets together need that of locations, in float32. A third kernel makes that of
    offsets from it.
    """
    inputs = value, shapes, starts, reference, offsets, logits
    ordered = mask[0] and torch.are_deterministic_algorithms_enabled()  # which records ready weights
    if ordered or offsets.shape[3] * offsets.shape[4] > MOST_SAMPLES:
        return composition.backward(_NAME, multi_scale_deformable_attn.backward, make_samples)(grad, *inputs, axis, mask)
    how = OF_LOCATIONS if mask[1] else OF_OFFSETS if mask[2] else 0
    of_samples = offsets.new_empty(offsets.shape if how else 0, dtype=torch.float32 if mask[1] else None)
    of_weights = logits.new_empty(logits.shape if mask[3] else 0, dtype=torch.float32)
    samples = _samples(reference, offsets, logits, axis)
    grad_value, *_ = multi_scale_deformable_attn.kernels.differentiate(
        grad, value, shapes, starts, samples, (of_samples, of_weights), (mask[0], how, mask[3])
    )
    later = [False, mask[1], mask[1] and mask[2], mask[3]]
    gradients = Gradients(shapes, reference, offsets, logits, axis).gradients(later, of_samples, of_weights)
    if how == OF_OFFSETS:
        gradients = gradients[0], of_samples, gradients[2]
    return grad_value, *composition.like_inputs(gradients, inputs[3:])
