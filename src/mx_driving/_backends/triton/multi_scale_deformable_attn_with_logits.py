"""multi_scale_deformable_attn_with_logits on a GPU: the bare operator's kernel reads offsets and logits itself.

The forward writes only the output. The backward writes the gradient of weights; a kernel of sampler.py converts it to the
gradient of logits. In deterministic mode plain torch computes the weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._operator import composition
from . import launch, multi_scale_deformable_attn
from .multi_scale_deformable_attn import OF_LOCATIONS, OF_OFFSETS, kernels
from .sampler import Samples, differentiate_softmax, weights_are_needed

_NAME = "multi_scale_deformable_attn_with_logits"


def _samples(reference: Tensor, offsets: Tensor, logits: Tensor, axis: str = "level") -> Samples:
    flags = {"REFERENCES": reference.shape[2], "BY_POINT": axis == "point", "BOX": reference.shape[3] == 4}
    return Samples((launch.paired(reference), launch.paired(offsets), logits), offsets.shape[2:5], flags)


def forward(*inputs: Any, dtype: torch.dtype | None = None) -> Tensor:
    return kernels.sum_samples(inputs[:3], _samples(*inputs[3:]), dtype)


def backward(grad: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Return the gradients. A first kernel sums over channels, a second kernel computes the gradient of the softmax.

    If the gradient of reference points is needed, the first kernel writes the gradient of locations. Plain torch converts it to
    the gradients of reference points and offsets.
    """
    *inputs, axis, mask = args
    shapes, reference, offsets, logits = inputs[1], *inputs[3:]
    samples = _samples(reference, offsets, logits, axis)
    if weights_are_needed(samples, mask):
        return composition.backward(_NAME, multi_scale_deformable_attn.backward)(grad, *args)
    how = OF_LOCATIONS if mask[1] else OF_OFFSETS if mask[2] else 0
    of_samples = offsets.new_empty(offsets.shape if how else 0, dtype=torch.float32 if mask[1] else None)
    of_weights = logits.new_empty(logits.shape if mask[3] else 0, dtype=torch.float32)
    needed = (mask[0], how, mask[3])
    grad_value, *_ = kernels.differentiate(grad, inputs[:3], samples, (of_samples, of_weights), needed)
    gradients = (None, of_samples if how else None, None)
    if mask[1]:
        rule = _Gradients(shapes, reference.float(), offsets.float(), logits, axis)
        gradients = rule.gradients([False, True, mask[2], False], of_samples, of_weights)
    grad_logits = differentiate_softmax(samples, of_weights) if mask[3] else None
    return grad_value, *composition.like_inputs((*gradients[:2], grad_logits), inputs[3:])


class _Gradients(composition.MultiScale):
    """MultiScale without the computation of samples, which the kernel has done. Only its gradients are used."""

    def samples(self) -> tuple[Tensor, Tensor]:
        return self.offsets, self.logits
