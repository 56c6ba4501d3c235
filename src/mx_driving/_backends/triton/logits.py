"""The gradient of a row of logits on a GPU: one kernel, after that of the operator, which makes the gradient of weights."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch

_ELEMENTS = 512  # of a tile
MOST_SAMPLES = 4096  # of a row; more would not fit into registers


@triton.jit(do_not_specialize=["rows"])
def _differentiate(logits, grad_weights, grad_logits, rows, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, COLUMNS)[None, :]
    here, at = (row < rows) & (s < SAMPLES), row * SAMPLES + s
    logit = tl.load(logits + at, mask=here, other=-float("inf")).to(tl.float32)
    power = tl.where(here, tl.exp(logit - tl.max(logit, 1, keep_dims=True)), 0.0)
    weight = tl.where(here, power / tl.sum(power, 1, keep_dims=True), 0.0)  # of rows that do not exist
    grad = tl.load(grad_weights + at, mask=here, other=0.0)
    grad = weight * (grad - tl.sum(weight * grad, 1, keep_dims=True))
    tl.store(grad_logits + at, grad.to(grad_logits.dtype.element_ty), mask=here)


def differentiate_softmax(logits: Tensor, grad_weights: Tensor, samples: int) -> Tensor:
    """Return the gradient of logits, whose rows have so many samples: at most MOST_SAMPLES."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.numel():
        columns, rows = triton.next_power_of_2(samples), logits.numel() // samples
        options = {"SAMPLES": samples, "ROWS": max(1, _ELEMENTS // columns), "COLUMNS": columns}
        tensors = logits.contiguous(), grad_weights, gradient
        launch.run(_differentiate, -(-rows // options["ROWS"]), tensors, (rows,), options)
    return gradient
