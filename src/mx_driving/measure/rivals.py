"""Other implementations of a workload: plain torch, plain torch compiled, other packages."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from . import plain
from .report import OURS
from .workloads import MULTI_SCALE, Workload


def rivals(workload: Workload, args: tuple[Tensor, ...], peers: bool) -> dict[str, Callable[..., Tensor]]:
    """Implementations by name, ours first."""
    form = getattr(plain, workload.operator)
    found = {OURS: getattr(torch.ops.mx_driving, workload.operator).default, "plain torch": form}
    if peers:
        torch.compiler.reset()
        shapes, starts = args[1], args[2]  # a model's never change: people let the compiler see constants
        core = torch.compile(lambda value, locations, weights: form(value, shapes, starts, locations, weights))
        found["torch.compile"] = lambda value, _shapes, _starts, locations, weights: core(value, locations, weights)
    if peers and workload.operator == MULTI_SCALE:
        try:
            from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore
        except ImportError:
            return found
        found["torch-ms-deform-attn"] = ms_deform_attn
    return found
