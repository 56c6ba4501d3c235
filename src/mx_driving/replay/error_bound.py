"""What each result of a call may lose, and how much of that an error is."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .. import _geometry
from .._measure.tolerance import allowed
from . import _pools
from .calls import Call
from .compute import computed, scales

_LATTICE = 16  # ulps of a position: nearer to a pixel's centre, float32 and float64 may be on different sides of it


def _terms(call: Call) -> dict[str, int]:
    of_query = math.prod(call.sampling.weights.shape[2:]) * 4
    return {"output": of_query, "grad_value": max(of_query, call.sampling.locations.numel() // 2)}


class ErrorBound:
    """Truth, and what each result of a call may lose."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.truth = computed(call, torch.float64)
        self._scales = scales(call)
        row, value = call.row, call.inputs[0]
        self._terms = _terms(call) if row.samples else _pools.terms(*call.inputs)
        self._compute = torch.float64 if any(t.dtype == torch.float64 for t in call.inputs) else torch.float32
        self._channels = value.shape[-1] * 4
        positions = row.samples and not row.integer_locations and call.sampling.shapes.numel()
        self._extent = int(call.sampling.shapes.max()) if positions else 0

    def limit(self, result: str, dtype: torch.dtype, expected: Tensor, compute: torch.dtype | None = None) -> Tensor:
        """What each entry may differ by from `expected`, the truth or a suspect's. `compute`: the dtype of the sums; by the
        operator's rules float64 as soon as an input is, else float32."""
        extent = self._extent if compute is None else 0  # 16 bits hold no position of a map
        magnitude = torch.where(expected.isfinite(), expected.abs(), 0)
        scale = max(self._scales[result], float(magnitude.max()) if magnitude.numel() else 0.0)
        terms = max(1, self._terms.get(result, self._channels))
        return allowed(dtype, compute or self._compute, magnitude, scale, terms, extent)

    def error(
        self, result: str, got: Tensor, expected: Tensor, compute: torch.dtype | None = None, queries: Tensor | None = None
    ) -> Tensor:
        """The error of each entry in units; infinite where one is NaN or infinite and the other is not. `queries`: those that
        `got` and `expected` have, where they do not have all."""
        limit = self.limit(result, got.dtype, expected, compute).clamp_min(1e-300)
        rounded, got = expected.to(got.dtype).double(), got.double()
        expected = torch.where(rounded.isinf(), rounded, expected)  # it overflows in this dtype
        same = (got == expected) | (got.isnan() & expected.isnan())
        units = ((got - expected).abs() / limit).nan_to_num(math.inf, math.inf)
        units = torch.where(same, 0, units)
        unsure = self.unsure(result)
        unsure = unsure[:, queries] if queries is not None and unsure.dim() else unsure
        return torch.where(unsure & got.isfinite(), 0, units)

    def wrong(self, result: str) -> Tensor:
        """The device's entries that are off by more than their dtype may lose."""
        return self.error(result, self.call.results[result], self.truth[result]) > 1

    def unsure(self, result: str) -> Tensor:
        """Where a location lies on the centre of a pixel but for rounding: its gradient jumps there."""
        return self._on_centres if result == "grad_locations" else torch.zeros((), dtype=torch.bool)

    @functools.cached_property
    def _on_centres(self) -> Tensor:
        locations, sizes = self.call.sampling.locations.double(), self.call.sampling.shapes.double().flip(-1)
        sizes = sizes.movedim(-2, 0)[:, None, None, None] if self.call.row.grouped else sizes[None, :, None]
        near = _LATTICE * torch.finfo(self._compute).eps * self._extent
        at = _geometry.pixels(locations[None] if self.call.row.grouped else locations, sizes)
        on = (at - at.round()).abs() <= near
        return on.any(0) if self.call.row.grouped else on
