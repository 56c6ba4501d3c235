"""Autograd functions that call a compiled extension: a form for each of AUTOGRAD_FUNCTIONS (_foreign_functions.py).

A compiled file for CUDA may end the process if it gets memory of a CPU, so such a function cannot be tried. Either its code is
known (known.py), or `patch` checks its name, its parameters, and the name and module of the compiled function that its forward
calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._foreign.stand_ins import differentiable
from .._foreign_functions import AUTOGRAD_FUNCTIONS, AutogradFunction, find_autograd_function
from .._operator.description import AGGREGATION, POOL
from ._forms import AUTOGRAD, ExactForm
from ._parameters import Parameters
from ._pools import have_pool_dtypes, make_frustum, make_image, make_lifted, make_runs, make_sorted_rows, make_sorted_xyzb


@dataclass(frozen=True)
class OverExtension(ExactForm):
    """The form of one of AUTOGRAD_FUNCTIONS."""

    foreign: AutogradFunction
    casts: str = ""  # the dtype to which the original code converts all inputs, or "value" for the dtype of value
    kind = AUTOGRAD

    @property
    def parameters(self) -> tuple[str, ...]:
        return tuple(self.foreign.parameters.split())

    @property
    def example(self) -> Callable[[], tuple[Any, ...]] | None:
        """The function that makes the arguments of a trial. None: a trial uses the examples of a core."""
        if self.foreign.operator == AGGREGATION:
            return _make_aggregation
        words = self.foreign.words.split()
        return next((make for word, make in _EXAMPLES.items() if word in words), None)

    def fits(self, name: str, kind: str, parameters: Parameters) -> bool:
        return super().fits(name, kind, parameters) and find_autograd_function(name, parameters.all) is self.foreign

    def answer(self, module: Any, arguments: dict[str, Any]) -> Any:
        if self.foreign.operator == POOL:  # Pooling operators sum points: refuse a call with another `method`.
            named = dict(zip(self.foreign.words.split(), arguments.values(), strict=True))
            if named.get("method", "sum") != "sum" or not have_pool_dtypes(named):
                return None
        return differentiable(self.foreign)(*arguments.values())


def _make_aggregation() -> tuple[Tensor, ...]:
    """Return features of 2 cameras with 2 levels each, and 5 anchors of 3 points, in 2 groups."""
    generator = torch.Generator().manual_seed(0)
    shapes, starts = torch.tensor([[[3, 4], [2, 2]]] * 2), torch.tensor([[0, 12], [16, 28]])
    sides = ((2, 32, 4), (2, 5, 3, 2, 2), (2, 5, 3, 2, 2, 2))
    features, places, weights = (torch.rand(side, generator=generator) for side in sides)
    return features - 0.5, shapes.int(), starts.int(), 1.4 * places - 0.2, weights


# A word of `AutogradFunction.words` that only one layout of pools has -> the function that makes an example of this layout.
_EXAMPLES = {
    **{"ranks_bev": make_lifted, "geom_feat": make_sorted_rows, "geom_xyzb": make_sorted_xyzb},
    **{"depth": make_image, "voxel_num": make_frustum, "places": make_runs},
}
_NAMES = ("attention", "attention_without_starts", "geometric", "aggregation")
_POOL_NAMES = ("lifted", "sorted_rows", "sorted_xyzb", "lift_splat_function", "fiery", "frustum", "image")
# The name that a user writes in patch(forms=...) -> the form.
EXTENSIONS = dict(zip((*_NAMES, *_POOL_NAMES), map(OverExtension, AUTOGRAD_FUNCTIONS), strict=True))
