"""The allowed error of each result of a call, and errors in units of the allowed error."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .._agreement import entry_differences, largest_magnitude, rounding_limit
from .._operator import geometry
from .calls import RecordedCall
from .compute import compute

_DRAWS = 4  # rounding errors are random: the device's may be this many times as large as those of our float32
_LATTICE = 16  # ulps; a position this close to a pixel centre may be on the centre's other side in float32


class ErrorBound:
    """The float64 results of a call, and the device's errors in units of the allowed error.

    An entry is wrong if its error is more than one unit. The allowed error is relative to the largest entry, because rounding
    errors grow with the sum of an entry's absolute terms, and the largest of these sums is at least as large as any entry. The
    gradient of a location is a difference. Its allowed error is relative to the terms of the difference: size of the map *
    weight * gradient of the weight. If all entries cancel, the allowed error is a multiple of float32's own error.
    """

    def __init__(self, call: RecordedCall) -> None:
        self.call = call
        self.truth = compute(call, torch.float64)
        if call.description.kind == "pooling":
            feat_terms, depth_terms, cell_terms = (int(t.bincount().max()) if t.numel() else 0 for t in call.inputs[2:])
            terms = {"output": cell_terms, "grad_feat": feat_terms, "grad_depth": depth_terms * call.inputs[0].shape[1]}
        else:
            query_terms = math.prod(call.sampling.weights.shape[2:]) * 4
            terms = {"output": query_terms, "grad_value": max(query_terms, call.sampling.locations.numel() // 2)}
        self._num_terms = terms  # the number of terms in the longest sum of a result
        self._compute = torch.float64 if any(t.dtype == torch.float64 for t in call.inputs) else torch.float32
        has_positions = call.description.rows == 4 and call.sampling.shapes.numel()  # only bilinear samples have positions
        self._extent = int(call.sampling.shapes.max()) if has_positions else 0
        self._scales = {name: largest_magnitude(t) for name, t in self.truth.items()}
        if "grad_locations" in self.truth:
            slopes = call.sampling.shapes.amax(-1)[..., None] * call.sampling.weights * self.truth["grad_weights"]
            self._scales["grad_locations"] = max(largest_magnitude(slopes), self._scales["grad_locations"])
        self.float32 = compute(call, torch.float32) if self._compute == torch.float32 else self.truth
        losses = {name: torch.where(self.unsure(name), 0, self.float32[name].double() - t) for name, t in self.truth.items()}
        self._least = {name: 1e-300 + _DRAWS * largest_magnitude(loss) for name, loss in losses.items()}
        self.errors = {name: self.error(name, t, self.truth[name]) for name, t in call.results.items()}
        self.wrong = {name: errors > 1 for name, errors in self.errors.items()}

    def error(
        self, result: str, got: Tensor, expected: Tensor, compute: torch.dtype | None = None, queries: Tensor | None = None
    ) -> Tensor:
        """Return |got - expected| of each entry, in units of the allowed error; infinite if only one of the two is finite.
        `expected` is the truth, or the result that a suspected mistake would give.

        Args:
            compute: the dtype of the sums; by default the operator's: float64 if an input is float64, else float32.
            queries: the queries of `got` and `expected`; None for all.
        """
        extent = self._extent if compute is None else 0  # if `compute` is given, positions count as exact
        magnitude = torch.where(expected.isfinite(), expected.abs(), 0)
        scale = max(self._scales[result], largest_magnitude(expected))
        num_terms = max(1, self._num_terms.get(result, self.call.inputs[0].shape[-1] * 4))
        limit = rounding_limit(got.dtype, compute or self._compute, magnitude, scale, num_terms, extent)
        rounded, got = expected.to(got.dtype).double(), got.double()
        expected = torch.where(rounded.isinf(), rounded, expected)  # if it overflows in the dtype of `got`, expect infinity
        units = entry_differences(got, expected) / torch.as_tensor(limit, dtype=torch.float64).clamp_min(self._least[result])
        unsure = self.unsure(result)
        unsure = unsure[:, queries] if queries is not None and unsure.dim() else unsure
        return torch.where(unsure & got.isfinite(), 0, units)

    def unsure(self, result: str) -> Tensor:
        """Return True for the gradients of locations that are within rounding of a pixel centre, where the gradient jumps."""
        return self._on_centres if result == "grad_locations" else torch.zeros((), dtype=torch.bool)

    @functools.cached_property
    def _on_centres(self) -> Tensor:
        locations, sizes = self.call.sampling.locations.double(), self.call.sampling.shapes.double().flip(-1)
        sizes = (
            sizes.movedim(-2, 0)[:, None, None, None] if self.call.description.kind == "aggregation" else sizes[None, :, None]
        )
        at = geometry.pixels(locations[None], sizes)
        near = _LATTICE * torch.finfo(self._compute).eps * self._extent
        return ((at - at.round()).abs() <= near).any(0)
