"""How the native kernels do a workload: their decisions, not their times."""

from __future__ import annotations

from mx_driving import _backends
from mx_driving._measure.workloads import Workload
from mx_driving._operator.description import OPERATORS

Plans = dict[str, dict[str, str]]  # of each direction: decision -> what was decided


def plans(workload: Workload, dtype: str) -> Plans:
    """The plans of the forward, and of a backward that gives all gradients."""
    operator, args = workload.operator, workload.inputs(dtype)
    return {
        "forward": _backends.native.describe_plan(operator, args),
        "backward": _backends.native.describe_plan(operator, args, [True] * len(OPERATORS[operator].differentiable)),
    }
