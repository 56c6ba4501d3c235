"""Describe how the native kernels would compute a workload."""

from __future__ import annotations

from mx_driving import _backends
from mx_driving._measure.workloads import Workload
from mx_driving._operator.description import OPERATORS

Plans = dict[str, dict[str, str]]  # direction -> decision -> its outcome


def plans(workload: Workload, dtype: str) -> Plans:
    """Return the plans of the forward, and of a backward with all gradients."""
    operator, args = workload.operator, workload.inputs(dtype)
    return {
        "forward": _backends.native.describe_plan(operator, args),
        "backward": _backends.native.describe_plan(operator, args, [True] * len(OPERATORS[operator].differentiable)),
    }
