"""Describe how the native kernels would compute a call, or a workload."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch

from mx_driving._backends import native
from mx_driving._measure.workloads import Workload
from mx_driving._operator import checks
from mx_driving._operator.description import OPERATORS

Plans = dict[str, dict[str, str]]  # direction -> decision -> its outcome


def describe_plan(operator: str, inputs: Sequence[Any], mask: list[bool] | None = None) -> dict[str, str]:
    """Return the plan of a call from mxd_describe_plan: name of a decision -> the decision.

    Args:
        inputs: the operator's inputs and options.
        mask: output_mask of the backward; None for the forward.
    """
    text = ctypes.create_string_buffer(1024)

    def describe(name: bytes, tensors: list[bytes], numbers: Sequence[int]) -> int:
        pointers = (ctypes.c_char_p * len(tensors))(*(None if t is native._NOT_GIVEN else t for t in tensors))
        return native.loaded().mxd_describe_plan(name, pointers, -torch.get_num_threads(), text, len(text))

    if mask is None:
        native.Kernel(operator, False, describe)(*inputs)
    else:
        grad = torch.empty(checks.output_shape(OPERATORS[operator], inputs), dtype=inputs[0].dtype)
        native.Kernel(operator, True, describe)(grad, *inputs, mask)
    return dict(line.split(": ", 1) for line in text.value.decode().splitlines())


def plans(workload: Workload, dtype: str) -> Plans:
    """Return the plans of the forward, and of a backward with all gradients."""
    operator, args = workload.operator, workload.inputs(dtype)
    return {
        "forward": describe_plan(operator, args),
        "backward": describe_plan(operator, args, [True] * len(OPERATORS[operator].differentiable)),
    }
