"""Other implementations of a workload: compiled plain torch, and other packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mx_driving._measure.plain import Rival, make_plain
from mx_driving._measure.workloads import MULTI_SCALE, Args, Workload
from mx_driving._operator.description import OPERATORS


def compile_form(form: Callable[..., Tensor], operator: str, args: Args) -> Callable[..., Tensor]:
    """Compile a form with the inputs that the whole model shares, such as index tables, as constants."""
    shared = OPERATORS[operator].shared
    indices = [i for i, a in enumerate(args) if isinstance(a, Tensor) and i not in shared]

    def of_given(*tensors: Tensor) -> Tensor:
        whole: list[Any] = list(args)
        for i, t in zip(indices, tensors, strict=True):
            whole[i] = t
        return form(*whole)

    torch.compiler.reset()
    core = torch.compile(of_given)
    return lambda *args: core(*(args[i] for i in indices))


def peers(workload: Workload, args: Args) -> dict[str, Rival]:
    """Return torch.compile, and torch-ms-deform-attn if it is installed."""
    functions = {"torch.compile": compile_form(make_plain(workload.operator), workload.operator, args)}
    if workload.operator == MULTI_SCALE:
        try:
            from torch_ms_deform_attn.functional import ms_deform_attn  # pyright: ignore

            functions["torch-ms-deform-attn"] = ms_deform_attn
        except ImportError:
            pass
    return {name: Rival(function, args, workload.differentiable) for name, function in functions.items()}
