"""What the two attention operators have in common: which rows a program owns, and the launches.

A program owns neighbouring queries of one head, as a tile [rows, channels]; a thread has a few neighbouring channels of a row.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..._operator.description import Operator, empty_gradients
from . import deterministic, launch

# Four warps to a program: the forward exchanges nothing between them.
_FORWARD_WARPS = 4
# Of a thread, by whether it is the backward and by the bytes of an element of value; no others are limited. Without a limit the
# float32 forward takes 40, and the backward 65 to 70 on some targets or with logits, too many for half of the occupancy.
_MOST_REGISTERS = {(False, 4): 56, (True, 2): 64, (True, 4): 64}
# One warp to a program: sums over channels are shuffles, and stores need no exchange through shared memory.
_BACKWARD_WARPS = 1


# A kernel is not compiled anew for other values of these.
VARYING = ["queries", "num_keys", "batch_stride", "key_stride", "head_stride"]


@triton.jit
def tile_of(
    value, queries, batch_stride, head_stride,
    HEADS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, LANE: tl.constexpr,
):  # fmt: skip
    """Return the program's batch, head, which rows of its tile exist, their numbers among [bs, queries, heads], its channels,
    and pointers to these channels of value's first row.

    Programs are numbered head by head, so that those that run together read the same part of value.
    """
    blocks = tl.cdiv(queries, ROWS)
    program = tl.program_id(0)
    head = (program // blocks) % HEADS
    batch = (program // blocks // HEADS).to(tl.int64)
    first = (program % blocks) * ROWS
    local = tl.arange(0, ROWS)[:, None]
    here = first + local < queries
    # rows that do not exist repeat the first one, so that reads need no mask
    row = (batch * queries + first) * HEADS + head + tl.where(here, local, 0) * HEADS
    c = tl.arange(0, COLUMNS)[None, :]
    return batch, head, here, row, c, value + (batch * batch_stride + head * head_stride) * LANE + c


class Samples(NamedTuple):
    """What a kernel reads of samples."""

    tensors: tuple[Tensor, Tensor, Tensor]  # reference points, locations or offsets, weights or logits; a bare kernel reads two
    sizes: Sequence[int]  # levels, points
    flags: Mapping[str, int]  # of the kernel


class Kernels(NamedTuple):
    """The kernels of an operator, and their launches."""

    operator: Operator
    forward: Any
    backward: Any
    gradients: tuple[str, ...]  # that the backward makes besides that of value
    flags: Mapping[str, int]  # of the bare operator

    def forward_of(
        self,
        value: Tensor,
        shapes: Tensor,
        starts: Tensor,
        locations: Tensor,
        weights: Tensor,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        samples = Samples((locations, locations, weights), locations.shape[3:5], self.flags)
        return self.sum_samples(value, shapes, starts, samples, dtype)

    def sum_samples(self, value: Tensor, shapes: Tensor, starts: Tensor, samples: Samples, dtype: torch.dtype | None) -> Tensor:
        """Return the output."""
        bs, num_keys, heads, channels = value.shape
        weights = samples.tensors[2]
        queries = weights.shape[1]
        launch.check(*self.operator.tables, shapes, starts, num_keys)
        output = value.new_empty((bs, queries, heads * channels), dtype=dtype)
        if not output.numel() or not weights.numel() or not num_keys:
            return output.zero_()
        value = launch.packed(value)
        plan = _plan(value.shape, value.stride(), value.element_size(), samples.sizes, launch.gpu(), False)
        tensors = (value, shapes.contiguous(), starts.contiguous(), *(t.contiguous() for t in samples.tensors), output)
        programs = bs * heads * -(-queries // plan.rows)
        launch.run(self.forward, programs, tensors, (queries, num_keys, *plan.strides), plan.options, **samples.flags)
        return output

    def backward_of(
        self, grad: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, mask: list[bool]
    ) -> tuple[Tensor, ...]:
        inputs = (value, shapes, starts, locations, weights)
        others = empty_gradients([inputs[i] for i in self.operator.differentiable[1:]], mask[1:])
        samples = Samples((locations, locations, weights), locations.shape[3:5], self.flags)
        return self.differentiate(grad, value, shapes, starts, samples, others, mask)

    def differentiate(
        self,
        grad: Tensor,
        value: Tensor,
        shapes: Tensor,
        starts: Tensor,
        samples: Samples,
        others: Sequence[Tensor],
        mask: Sequence[int],
    ) -> tuple[Tensor, ...]:
        """Return the gradient of value, and `others` after the kernel has written them. `mask` has a number for each."""
        bs, num_keys, heads, _ = value.shape
        weights = samples.tensors[2].contiguous()
        queries = weights.shape[1]
        launch.check(*self.operator.tables, shapes, starts, num_keys)
        if not grad.numel() or not weights.numel() or not num_keys:
            return tuple(g.zero_() for g in (*empty_gradients((value,), mask[:1]), *others))
        value = launch.packed(value)
        plan = _plan(value.shape, value.stride(), value.element_size(), samples.sizes, launch.gpu(), True)
        grad = grad.contiguous()
        sums = deterministic.Sums(value, bool(mask[0]), self.operator.rows * weights.numel())
        tensors = (grad, value, shapes.contiguous(), starts.contiguous())
        tensors += (samples.tensors[0].contiguous(), samples.tensors[1].contiguous(), weights)
        tensors += (sums.buffer, *others, sums.targets, sums.parts)
        flags = {"VALUE": sums.how, **dict(zip(self.gradients, mask[1:], strict=True)), **samples.flags}
        programs = bs * heads * -(-queries // plan.rows)
        launch.run(self.backward, programs, tensors, (queries, num_keys, *plan.strides), plan.options, **flags)
        return (sums.finish(grad, weights, math.prod(samples.sizes)), *others)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...], stride: tuple[int, ...], itemsize: int, samples: Sequence[int], gpu: launch.Gpu, backward: bool
) -> launch.Plan:
    """Return the plan for a value of this layout, sampled at `samples` = (levels, points)."""
    heads, channels = shape[2:]
    layout = launch.layout(shape, stride, itemsize, channels)
    if backward:
        tile = launch.tile(channels, min(layout.lane, launch.MOST_HELD), _BACKWARD_WARPS, gpu.lanes)
    else:
        tile = launch.tile(channels, layout.lane, _FORWARD_WARPS, gpu.lanes)
    levels, points = samples
    sizes = {"HEADS": heads, "CHANNELS": channels, "LEVELS": levels, "POINTS": points, "UNROLL": launch.unroll(points)}
    registers = _MOST_REGISTERS.get((backward, itemsize)) if gpu.capped else None
    return launch.plan(layout, tile, registers, **sizes)
