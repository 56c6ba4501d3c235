"""How the native kernels do a workload: their decisions, not their times."""

from __future__ import annotations

from .. import _native
from .._operators import OPERATORS
from .workloads import Workload

Plans = dict[str, dict[str, str]]  # of each direction: decision -> what was decided


def plans(workload: Workload, dtype: str) -> Plans:
    """The plans of the forward, and of a backward that gives all gradients. An operator that is a composition has the plans of
    its bare operator."""
    operator, args = workload.operator, workload.inputs(dtype)
    composed = not _native.has(operator)
    if composed:
        operator, args = workload.bare(args)
    found = {
        "forward": _native.describe_plan(operator, args),
        "backward": _native.describe_plan(operator, args, [True] * len(OPERATORS[operator].differentiable)),
    }
    return {way: {"composed_over": operator, **plan} for way, plan in found.items()} if composed else found
