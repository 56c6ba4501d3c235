"""Tries a core before it is replaced. A core with other numbers than the operator's is left alone, whatever its name.

There is no table of versions. A version that nobody has seen either gives the same numbers or is left alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._forms import AUTOGRAD, FUNCTION, Form, levels

_SIZES = [(5, 4), (3, 6)]
_COUNTS = [2, 4]


def objection(form: Form, core: Any) -> str | None:
    """Why the core must stay, or None when it gives the operator's outputs and gradients on small random inputs.

    An autograd function is not tried: its compiled extension may be missing, which is a reason to replace it.
    """
    if form.kind == AUTOGRAD:
        return None
    if form.kind == FUNCTION and core.__closure__:
        return "it is a closure, whose code cannot be exchanged"
    replacement = form.replacement if form.kind == FUNCTION else lambda *args: form.replacement(None, *args)
    try:
        original = core if form.kind == FUNCTION else core()
        for inputs in _inputs(form):
            difference = _difference(original, replacement, inputs)
            if not difference < 1e-4:  # float32 sums of 12 terms of size 1; a NaN is an objection too
                return f"its result on a small example differs from the operator's by {difference:.1e}"
    except Exception as error:  # an unknown core may raise anything
        return f"it does not run on a small example: {type(error).__name__}: {error}"
    return None


def _inputs(form: Form) -> list[tuple[Any, ...]]:
    """Arguments for the form; some locations lie outside the map."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, device="cpu", dtype=torch.float32)

    keys = sum(h * w for h, w in _SIZES)
    value = rand(2, keys, 3, 4) - 0.5
    if "num_points_list" in form.parameters:
        locations, weights = rand(2, 5, 3, sum(_COUNTS), 2) * 1.4 - 0.2, rand(2, 5, 3, sum(_COUNTS))
        return [(value, _SIZES, locations, weights, _COUNTS, method) for method in ("default", "discrete")]
    locations, weights = rand(2, 5, 3, 2, 2, 2) * 1.4 - 0.2, rand(2, 5, 3, 2, 2)
    if form.kind == FUNCTION:
        return [(value, _SIZES, locations, weights)]
    shapes, starts = levels(_SIZES, value.device)
    return [(value, shapes, _SIZES, starts, locations, weights, 64)]


def _difference(original: Callable[..., Tensor], replacement: Callable[..., Tensor], inputs: tuple[Any, ...]) -> float:
    """The largest difference of outputs and of the gradients of all floating inputs."""
    with torch.inference_mode(False), torch.enable_grad():
        theirs, ours = (_results(run, inputs) for run in (original, replacement))
    if any(a.shape != b.shape for a, b in zip(theirs, ours, strict=True)):
        return float("inf")
    return max(float((a - b).abs().max()) for a, b in zip(theirs, ours, strict=True))


def _results(run: Callable[..., Tensor], inputs: tuple[Any, ...]) -> list[Tensor]:
    inputs = tuple(i.clone().requires_grad_() if isinstance(i, Tensor) and i.is_floating_point() else i for i in inputs)
    leaves = [i for i in inputs if isinstance(i, Tensor) and i.requires_grad]
    out = run(*inputs)
    direction = torch.linspace(-1, 1, out.numel(), device="cpu").view(out.shape)
    found = torch.autograd.grad(out, leaves, direction, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(i) if g is None else g for i, g in zip(leaves, found, strict=True))]
