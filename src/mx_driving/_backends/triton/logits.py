"""Locations and weights of multi_scale_deformable_attn_with_logits on a GPU, and their gradients, a kernel each.

Plain torch takes eight launches for the locations and weights, in most of which a model at batch 1 waits for Python.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._operator import composition
from . import launch
from .softmax import read_pair, store_pair

_ELEMENTS = 512  # of a tile; 1024 take 77 registers, and spill on sm_120
MOST_SAMPLES = 4096  # of a head; more would not fit into registers


@triton.jit
def _tile(rows, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return the program's rows among [bs, queries, heads], its samples' numbers in a row, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    s = tl.arange(0, COLUMNS)[None, :]
    return row, s, (row < rows) & (s < SAMPLES)


@triton.jit
def _steps(
    reference, shapes, row, s, here,
    HEADS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr, REFERENCES: tl.constexpr, BY_POINT: tl.constexpr,
    BOX: tl.constexpr,
):  # fmt: skip
    """Return pointers to the samples' references, and what an offset is multiplied with and divided by, in x and in y."""
    level = s // POINTS
    reference_row = s % POINTS % REFERENCES if BY_POINT else level % REFERENCES
    at = reference + (row // HEADS * REFERENCES + reference_row) * (4 if BOX else 2)
    if BOX:
        by_x = tl.load(at + 2, mask=here, other=0.0).to(tl.float32)
        by_y = tl.load(at + 3, mask=here, other=0.0).to(tl.float32)
        over_x = tl.full((1, 1), 2.0 * POINTS, tl.float32)
        over_y = over_x
    else:
        by_x = tl.full((1, 1), 1.0, tl.float32)
        by_y = by_x
        inside = s < LEVELS * POINTS
        over_x = tl.load(shapes + 2 * level + 1, mask=inside, other=1).to(tl.float32)
        over_y = tl.load(shapes + 2 * level, mask=inside, other=1).to(tl.float32)
    return at, by_x, by_y, over_x, over_y


@triton.jit(do_not_specialize=["rows"])
def _forward(
    reference, offsets, logits, shapes, locations, weights, rows,
    HEADS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr, REFERENCES: tl.constexpr, BY_POINT: tl.constexpr,
    BOX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, s, here = _tile(rows, LEVELS * POINTS, ROWS, COLUMNS)
    sample = row * (LEVELS * POINTS) + s
    at, by_x, by_y, over_x, over_y = _steps(reference, shapes, row, s, here, HEADS, LEVELS, POINTS, REFERENCES, BY_POINT, BOX)
    x, y = read_pair(offsets, sample, here=here)
    x = tl.load(at, mask=here, other=0.0).to(tl.float32) + tl.div_rn(x * by_x, tl.broadcast_to(over_x, (ROWS, COLUMNS)))
    y = tl.load(at + 1, mask=here, other=0.0).to(tl.float32) + tl.div_rn(y * by_y, tl.broadcast_to(over_y, (ROWS, COLUMNS)))
    store_pair(locations, sample, x, y, here)
    tl.store(weights + sample, _softmax(logits, sample, here), mask=here)


@triton.jit
def _softmax(logits, sample, here):
    logit = tl.load(logits + sample, mask=here, other=-float("inf")).to(tl.float32)
    power = tl.exp(logit - tl.max(logit, 1, keep_dims=True))
    power = tl.where(here, power, 0.0)  # of rows that do not exist
    return power / tl.sum(power, 1, keep_dims=True)


@triton.jit
def _finite(t):
    return tl.where(t - t == 0, t, 0.0)


@triton.jit(do_not_specialize=["rows"])
def _differentiate_offsets(
    reference, shapes, grad_locations, grad_offsets, rows,
    HEADS: tl.constexpr, LEVELS: tl.constexpr, POINTS: tl.constexpr, REFERENCES: tl.constexpr, BY_POINT: tl.constexpr,
    BOX: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row, s, here = _tile(rows, LEVELS * POINTS, ROWS, COLUMNS)
    sample = row * (LEVELS * POINTS) + s
    _, by_x, by_y, over_x, over_y = _steps(reference, shapes, row, s, here, HEADS, LEVELS, POINTS, REFERENCES, BY_POINT, BOX)
    x, y = read_pair(grad_locations, sample, here=here)
    store_pair(grad_offsets, sample, x * _finite(by_x) / over_x, y * _finite(by_y) / over_y, here)


@triton.jit(do_not_specialize=["rows"])
def _differentiate_softmax(
    logits, grad_weights, grad_logits, rows, SAMPLES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row, s, here = _tile(rows, SAMPLES, ROWS, COLUMNS)
    sample = row * SAMPLES + s
    weight = tl.where(here, _softmax(logits, sample, here), 0.0)
    grad = tl.load(grad_weights + sample, mask=here, other=0.0).to(tl.float32)
    grad = weight * (grad - tl.sum(weight * grad, 1, keep_dims=True))
    tl.store(grad_logits + sample, grad.to(grad_logits.dtype.element_ty), mask=here)


def _run(kernel: Any, tensors: Sequence[Tensor], logits: Tensor, samples: int, options: dict[str, int]) -> None:
    """Launch a kernel over rows of so many samples."""
    columns = triton.next_power_of_2(samples)
    options |= {"ROWS": max(1, _ELEMENTS // columns), "COLUMNS": columns}
    rows = logits.numel() // samples
    launch.run(kernel, -(-rows // options["ROWS"]), [launch.paired(t) for t in tensors], (rows,), options)


def differentiate_softmax(logits: Tensor, grad_weights: Tensor, samples: int) -> Tensor:
    """Return the gradient of logits, whose rows have so many samples: at most MOST_SAMPLES."""
    gradient = torch.empty_like(logits, memory_format=torch.contiguous_format)
    if logits.numel():
        _run(_differentiate_softmax, (logits, grad_weights, gradient), logits, samples, {"SAMPLES": samples})
    return gradient


class _Samples(composition.MultiScale):
    """What `composition.MultiScale` computes, of inputs in the dtypes that they have."""

    def samples(self) -> tuple[Tensor, Tensor]:
        locations = self.offsets.new_empty(self.offsets.shape, dtype=torch.float32)
        weights = self.offsets.new_empty(self.offsets.shape[:-1], dtype=torch.float32)
        self._run(_forward, self.reference, self.offsets, self.logits, self.shapes, locations, weights)
        return locations, weights

    def gradients(self, mask: Sequence[bool], grad_locations: Tensor, grad_weights: Tensor) -> composition.Gradients:
        grad_offsets = torch.empty_like(self.offsets, memory_format=torch.contiguous_format) if mask[2] else None
        if grad_offsets is not None:
            self._run(_differentiate_offsets, self.reference, self.shapes, grad_locations, grad_offsets)
        return (
            self._grad_reference(grad_locations) if mask[1] else None,
            grad_offsets,
            differentiate_softmax(self.logits, grad_weights, self.levels * self.points) if mask[3] else None,
        )

    def _run(self, kernel: Any, *tensors: Tensor) -> None:
        options = {"HEADS": self.offsets.shape[2], "LEVELS": self.levels, "POINTS": self.points}
        options |= {"REFERENCES": self.reference.shape[2], "BY_POINT": self.by_point, "BOX": self.reference.shape[3] == 4}
        if self.offsets.numel():
            _run(kernel, tensors, self.logits, self.levels * self.points, options)


class Gradients(_Samples):
    """The gradients alone: of a kernel that has made the samples itself."""

    def samples(self) -> tuple[Tensor, Tensor]:
        return self.offsets, self.logits


def make_samples(shapes: Tensor, reference: Tensor, offsets: Tensor, logits: Tensor, axis: str = "level") -> Any:
    """Return the samples that the inputs describe."""
    if offsets.shape[3] * offsets.shape[4] <= MOST_SAMPLES:
        return _Samples(shapes, reference, offsets, logits, axis)
    return composition.MultiScale(shapes, *(t.float() for t in (reference, offsets, logits)), axis)
