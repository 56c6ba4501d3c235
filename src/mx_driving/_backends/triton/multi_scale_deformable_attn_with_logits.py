"""multi_scale_deformable_attn_with_logits on a GPU: the bare operator's kernel reads offsets and logits itself.

The forward writes nothing but the output. The backward writes the gradient of weights, from which a kernel of logits.py makes
that of logits. The deterministic mode sorts by ready weights, which plain torch makes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..._operator import composition
from . import attention, launch, multi_scale_deformable_attn
from .logits import MOST_SAMPLES, differentiate_softmax
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

    The gradients of reference points and offsets together need that of locations, from which plain torch makes both.
    """
    inputs = value, shapes, starts, reference, offsets, logits
    ordered = mask[0] and torch.are_deterministic_algorithms_enabled()  # which records ready weights
    if ordered or offsets.shape[3] * offsets.shape[4] > MOST_SAMPLES:
        return composition.backward(_NAME, multi_scale_deformable_attn.backward)(grad, *inputs, axis, mask)
    how = OF_LOCATIONS if mask[1] else OF_OFFSETS if mask[2] else 0
    of_samples = offsets.new_empty(offsets.shape if how else 0, dtype=torch.float32 if mask[1] else None)
    of_weights = logits.new_empty(logits.shape if mask[3] else 0, dtype=torch.float32)
    samples = _samples(reference, offsets, logits, axis)
    grad_value, *_ = multi_scale_deformable_attn.kernels.differentiate(
        grad, value, shapes, starts, samples, (of_samples, of_weights), (mask[0], how, mask[3])
    )
    gradients = (None, of_samples if how else None, None)
    if mask[1]:
        later = [False, True, mask[2], False]
        gradients = _Gradients(shapes, reference.float(), offsets.float(), logits, axis).gradients(
            later, of_samples, of_weights
        )
    grad_logits = differentiate_softmax(logits, of_weights, offsets.shape[3] * offsets.shape[4]) if mask[3] else None
    return grad_value, *composition.like_inputs((*gradients[:2], grad_logits), inputs[3:])


class _Gradients(composition.MultiScale):
    """The gradients alone: of a kernel that has made the samples itself."""

    def samples(self) -> tuple[Tensor, Tensor]:
        return self.offsets, self.logits
