"""The launches of the sampling operators: shared code of attention and aggregation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._operator.composition import empty_gradients
from ..._operator.description import Operator
from . import deterministic, launch


class Samples(NamedTuple):
    """What a kernel reads to locate and weigh its samples."""

    tensors: Sequence[Tensor]  # locations, or the inputs that define locations; the last tensor is weights or logits
    sizes: Sequence[int]  # (heads, levels, points), or for aggregation (points, cameras, scales, groups)
    flags: Mapping[str, int]  # compile-time flags of the kernel, which say what `tensors` are


class Kernels(NamedTuple):
    """The kernels of an operator, and their launches. `tables` below are value, shapes and starts."""

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
        sums = deterministic.Sums(
            value, bool(mask[0]), self.operator.rows, weights.numel() // (samples.sizes[-1] if sparse else 1)
        )
        tensors = (grad, value, shapes.contiguous(), starts.contiguous(), *map(Tensor.contiguous, samples.tensors))
        tensors += (sums.buffer, *others, sums.targets, sums.parts)
        flags = dict(zip(self.gradients, mask[1:], strict=True)) | samples.flags
        programs = bs * plan.parts * -(-queries // plan.queries)
        launch.run(self.backward, programs, tensors, (queries, num_keys, *plan.strides), plan.options, VALUE=sums.how, **flags)
        return sums.finish(grad, weights), *others
