"""The gradient of value: by atomics, or in an order fixed by the inputs.

In deterministic mode (torch.use_deterministic_algorithms) the operator's kernel records the row of value and the coefficient of
every corner of every sample. A stable sort by row brings the corners of a row together, in the order of the samples. Then a
program per row sums the row's corners.

This takes 28 bytes of memory per corner, the buffers of the sort, and the time of the sort. A single program sums a row even if
the row has very many samples.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import launch
from .sampling import ADDED, NOT_NEEDED, RECORDED


@triton.jit
def _ordered_sums(
    order, ends, parts, grad, weights, output,
    PER_SAMPLE: tl.constexpr, PER_ROW: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum coefficient * weight * grad over the corners of a row of value, one after the other. Every program has a row.

    Corner c belongs to sample c // PER_SAMPLE. Sample s belongs to row s // PER_ROW of grad.
    """
    target = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, COLUMNS)
    inside = c < CHANNELS
    total = tl.zeros((COLUMNS,), tl.float32)
    i = tl.load(ends + target)
    end = tl.load(ends + target + 1)
    while i < end:
        corner = tl.load(order + i)
        sample = corner // PER_SAMPLE
        weight = tl.load(weights + sample * GROUPS + c // (CHANNELS // GROUPS), mask=inside, other=0.0).to(tl.float32)
        g = tl.load(grad + sample // PER_ROW * CHANNELS + c, mask=inside, other=0.0).to(tl.float32)
        total += tl.load(parts + corner) * weight * g
        i += 1
    tl.store(output + target * CHANNELS + c, total.to(output.dtype.element_ty), mask=inside)


class Sums:
    """The gradient of `value`: the buffers that the operator's kernel writes, and `how`: what it does with the terms."""

    def __init__(self, value: Tensor, needed: bool, per_sample: int, samples: int) -> None:
        """Allocate memory for `samples` samples of `per_sample` corners."""
        self.value, self.samples = value, samples
        ordered = needed and torch.are_deterministic_algorithms_enabled()
        self.how = (RECORDED if ordered else ADDED if needed else NOT_NEEDED).value
        # sum the gradient of a 16-bit value in float32; `finish` rounds the sum
        like = value if self.how == ADDED.value else value.new_empty(0)
        self.buffer = torch.zeros_like(like, dtype=torch.float32, memory_format=torch.contiguous_format)
        self.targets = self.parts = self.buffer  # placeholders that no kernel accesses
        if ordered:
            self.targets = torch.full((per_sample * samples,), -1, dtype=torch.int64, device=value.device)  # -1: no row
            self.parts = torch.empty_like(self.targets, dtype=torch.float32)

    def finish(self, grad: Tensor, weights: Tensor) -> Tensor:
        """Return the gradient in value's dtype, or an empty tensor. `grad` and `weights` must be contiguous."""
        if self.how == ADDED.value:
            return self.buffer.to(self.value.dtype)
        if self.how == NOT_NEEDED.value:
            return torch.empty(0, dtype=self.value.dtype, device=self.value.device)
        channels = self.value.shape[-1]
        rows = self.value.numel() // channels
        targets, order = torch.sort(self.targets, stable=True)
        ends = torch.searchsorted(targets, torch.arange(rows + 1, device=targets.device))
        output = torch.empty(self.value.shape, dtype=self.value.dtype, device=self.value.device)
        columns, warps = launch.tile(channels, 4, 1, launch.gpu().lanes)[1:]
        per_sample, per_row = self.targets.numel() // self.samples, self.samples * channels // grad.numel()
        options = {"PER_SAMPLE": per_sample, "PER_ROW": per_row, "GROUPS": weights.numel() // self.samples}
        options |= {"CHANNELS": channels, "COLUMNS": columns, "num_warps": warps}
        launch.run(_ordered_sums, rows, (order, ends, self.parts, grad, weights, output), (), options)
        return output
