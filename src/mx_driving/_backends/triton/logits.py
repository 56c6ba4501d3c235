"""The gradient of logits on a GPU: a kernel that runs after the operator's backward has written the gradient of weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .sampler import Samples

_ELEMENTS = 512  # elements of a tile
_MOST_SAMPLES = 4096  # most logits of a row; a longer row would not fit into registers


@triton.jit(do_not_specialize=["rows"])
def _differentiate(logits, grad_weights, grad_logits, rows, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, COLUMNS)[None, :]
    here, at = (row < rows) & (s < SAMPLES), row * SAMPLES + s
    logit = tl.load(logits + at, mask=here, other=-float("inf")).to(tl.float32)
    power = tl.where(here, tl.exp(logit - tl.max(logit, 1, keep_dims=True)), 0.0)
    weight = tl.where(here, power / tl.sum(power, 1, keep_dims=True), 0.0)  # 0 past the last row, where the sum is 0
    grad = tl.load(grad_weights + at, mask=here, other=0.0)
    grad = weight * (grad - tl.sum(weight * grad, 1, keep_dims=True))
    tl.store(grad_logits + at, grad.to(grad_logits.dtype.element_ty), mask=here)


def weights_are_needed(samples: Samples, mask: Sequence[bool]) -> bool:
    """Return whether a backward needs the weights as a tensor: deterministic.py reads them, and so does plain torch, which
    differentiates the softmax of rows of logits that are too long for this kernel."""
    return (mask[0] and torch.are_deterministic_algorithms_enabled()) or math.prod(samples.sizes[1:]) > _MOST_SAMPLES


def differentiate_softmax(samples: Samples, grad_weights: Tensor) -> Tensor:
    """Return the gradient of logits."""
    logits, count = samples.tensors[-1].contiguous(), math.prod(samples.sizes[1:])
    gradient = torch.empty_like(logits)
    if logits.numel():
        columns, rows = triton.next_power_of_2(count), logits.numel() // count
        options = {"SAMPLES": count, "ROWS": max(1, _ELEMENTS // columns), "COLUMNS": columns}
        launch.run(_differentiate, -(-rows // options["ROWS"]), (logits, grad_weights, gradient), (rows,), options)
    return gradient
