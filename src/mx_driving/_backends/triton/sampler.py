"""The launches of the sampling operators: the tiles of attention, the gradient of value in a fixed order, the launches of the
forward and the backward, and the gradient of logits."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._operator.composition import empty_gradients
from ..._operator.description import Operator
from . import launch
from .sampling import ADDED, NOT_NEEDED, RECORDED

# ---- The two attention operators: a program computes neighbouring queries of a head, as a tile [rows, channels]. A thread has
# a few neighbouring channels.

# Warps of the forward exchange no data, so a program may have several warps.
_FORWARD_WARPS = 4
# (whether it is the backward, bytes of an element of value) -> most registers of a thread. Without a limit, the float32 forward
# uses only 40 registers and is slower (see launch.plan); the 16-bit forward spills on sm_80; the backward uses 65 to 70
# registers on some targets, too many for half of the GPU's occupancy.
_MOST_REGISTERS = {(False, 2): 64, (False, 4): 56, (True, 2): 64, (True, 4): 64}
# With one warp per program, sums over channels are shuffles, and stores need no exchange through shared memory.
_BACKWARD_WARPS = 1


# Kernels are not specialized for these arguments, so a call with new values compiles nothing.
VARYING = ["queries", "num_keys", "batch_stride", "key_stride", "head_stride"]


@triton.jit
def tile_of(
    value, queries, batch_stride, head_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Return the program's batch, its head, a mask of rows that exist, the rows' indices in [bs, queries, heads], the channels,
    and pointers to these channels in the first row of value.

    Programs are numbered head by head, so that programs that run at the same time read the same part of value.
    """
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    head = (program // blocks) % HEADS
    batch = (program // blocks // HEADS).to(tl.int64)
    first = (program % blocks) * ROWS
    local = tl.arange(0, ROWS)[:, None]
    here = first + local < queries
    # in place of a row past the last query, take the first row of the tile, so that reads need no mask
    row = (batch * queries + first) * HEADS + head + tl.where(here, local, 0) * HEADS
    c = tl.arange(0, COLUMNS)[None, :]
    return batch, head, here, row, c, value + (batch * batch_stride + head * head_stride) * LANE + c


@functools.lru_cache(maxsize=4096)
def plan(
    shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, samples: Sequence[int], gpu: launch.Gpu, backward: bool
) -> launch.Plan:
    """Return the plan of a launch for a value of this shape and stride. `samples` is (heads, levels, points)."""
    (heads, levels, points), channels = samples, shape[3]
    layout = launch.layout(shape, stride, itemsize, channels)
    if backward:
        tile = launch.tile(channels, min(layout.lane, launch.MOST_PER_THREAD), _BACKWARD_WARPS, gpu.lanes)
    else:
        tile = launch.tile(channels, layout.lane, _FORWARD_WARPS, gpu.lanes)
    sizes = {"HEADS": heads, "CHANNELS": channels, "LEVELS": levels, "POINTS": points, "UNROLL": launch.unroll(points)}
    registers = _MOST_REGISTERS.get((backward, itemsize)) if gpu.capped else None
    return launch.plan(layout, tile, tile.rows, heads, registers, **sizes)


# ---- The gradient of value: by atomics, or in an order fixed by the inputs.
#
# In deterministic mode (torch.use_deterministic_algorithms) the operator's kernel records the row of value and the coefficient
# of every corner of every sample. A stable sort by row brings the corners of a row together, in the order of the samples. Then
# a program per row sums the row's corners.
#
# This takes 28 bytes of memory per corner, the buffers of the sort, and the time of the sort. A single program sums a row even
# if the row has very many samples.


@triton.jit
def _ordered_sums(
    order, ends, parts, grad, weights, output,
    PER_SAMPLE: tl.constexpr, PER_ROW: tl.constexpr, GROUPS: tl.constexpr,
    CHANNELS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum coefficient * weight * grad over the corners at a row of value, one after the other. Every program sums one row.

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
    """The gradient of `value`: the buffers that the operator's kernel writes. `how` says what the kernel does with the
    terms."""

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


# ---- The launches.


class Samples(NamedTuple):
    """What a kernel reads to locate and weigh its samples."""

    tensors: Sequence[Tensor]  # locations, or the inputs that define locations; the last tensor is weights or logits
    sizes: Sequence[int]  # (heads, levels, points), or for aggregation (points, cameras, scales, groups)
    flags: Mapping[str, int]  # compile-time flags of the kernel, which say what `tensors` are


class Kernels(NamedTuple):
    """The kernels of an operator, and their launches. The argument `tables` is (value, shapes, starts)."""

    operator: Operator
    forward: Any
    backward: Any
    gradients: tuple[str, ...]  # gradients that the backward computes besides the gradient of value
    plan: Callable[..., launch.Plan]
    tensors: int  # length of Samples.tensors; the bare operator reads only two of them, locations and weights
    flags: Mapping[str, int]  # Samples.flags of the bare operator

    def _bare(self, locations: Tensor, weights: Tensor) -> Samples:
        return Samples((*(locations,) * (self.tensors - 1), weights), weights.shape[2:], self.flags)

    def forward_of(
        self,
        value: Tensor,
        shapes: Tensor,
        starts: Tensor,
        locations: Tensor,
        weights: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        return self.sum_samples((value, shapes, starts), self._bare(locations, weights), dtype)

    def sum_samples(self, tables: Sequence[Tensor], samples: Samples, dtype: torch.dtype | None) -> Tensor:
        """Return the output."""
        value, shapes, starts = tables
        bs, num_keys, *row = value.shape
        weights = samples.tensors[-1]
        queries = weights.shape[1]
        launch.check(*self.operator.tables, shapes, starts, num_keys)
        output = value.new_empty((bs, queries, math.prod(row)), dtype=dtype)
        if not output.numel() or not weights.numel() or not num_keys:
            return output.zero_()
        value = launch.packed(value)
        plan = self.plan(value.shape, value.stride(), value.element_size(), samples.sizes, launch.gpu(), False)
        tensors = (value, shapes.contiguous(), starts.contiguous(), *map(Tensor.contiguous, samples.tensors), output)
        programs = bs * plan.parts * -(-queries // plan.queries)
        launch.run(self.forward, programs, tensors, (queries, num_keys, *plan.strides), plan.options, **samples.flags)
        return output

    def backward_of(
        self, grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, mask: list[bool]
    ) -> tuple[Tensor, ...]:
        inputs = (value, shapes, starts, locations, weights)
        others = empty_gradients([inputs[i] for i in self.operator.differentiable[1:]], mask[1:])
        return self.differentiate(grad, inputs[:3], self._bare(locations, weights), others, mask)

    def differentiate(
        self, grad: Tensor, tables: Sequence[Tensor], samples: Samples, others: Sequence[Tensor], mask: Sequence[int]
    ) -> tuple[Tensor, ...]:
        """Return the gradient of value, and `others`: tensors to which the kernel writes the other gradients. `mask` has an
        entry for value, and an entry for each of `others`."""
        value, shapes, starts = tables
        bs, num_keys, *_ = value.shape
        weights, sparse = samples.tensors[-1].contiguous(), self.operator.kind == "aggregation"
        queries = weights.shape[1]
        launch.check(*self.operator.tables, shapes, starts, num_keys)
        nothing = not (grad.numel() and weights.numel() and num_keys)
        if nothing or sparse:  # kernels of aggregation write no gradients for points outside images
            others = [g.zero_() for g in others]
        if nothing:
            return empty_gradients((value,), mask[:1])[0].zero_(), *others
        value, grad = launch.packed(value), grad.contiguous()
        plan = self.plan(value.shape, value.stride(), value.element_size(), samples.sizes, launch.gpu(), True)
        sums = Sums(value, bool(mask[0]), self.operator.rows, weights.numel() // (samples.sizes[-1] if sparse else 1))
        tensors = (grad, value, shapes.contiguous(), starts.contiguous(), *map(Tensor.contiguous, samples.tensors))
        tensors += (sums.buffer, *others, sums.targets, sums.parts)
        flags = dict(zip(self.gradients, mask[1:], strict=True)) | samples.flags
        programs = bs * plan.parts * -(-queries // plan.queries)
        launch.run(self.backward, programs, tensors, (queries, num_keys, *plan.strides), plan.options, VALUE=sums.how, **flags)
        return sums.finish(grad, weights), *others


# ---- The gradient of logits: a kernel that runs after the operator's backward has written the gradient of weights.

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
    """Return whether a backward needs the weights as a tensor.

    `Sums` reads that tensor in deterministic mode, for the gradient of value. If the rows of logits are too long for
    `_differentiate`, plain torch reads it to differentiate the softmax.
    """
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
