"""How the native kernels do a workload: their decisions, not their times."""

from __future__ import annotations

import torch

from .. import _native
from .workloads import Workload

Plans = dict[str, dict[str, str]]  # of each direction: decision -> what was decided


def plans(workload: Workload, dtype: str) -> Plans:
    """The plans of the forward, and of a backward that gives all gradients."""
    args = workload.make(torch.Generator().manual_seed(0))
    args = [a.to(getattr(torch, dtype)) if a.is_floating_point() else a for a in args]
    return {
        "forward": _native.describe_plan(workload.operator, args),
        "backward": _native.describe_plan(workload.operator, args, [True] * len(workload.differentiable)),
    }
