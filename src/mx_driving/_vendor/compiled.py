"""The functions of the vendor's compiled extension for our operators, under their present and older names.

As in the vendor's extension, autograd and autocast do not apply; gradients are separate functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._dispatch.functions import backward_as_compiled
from .._foreign import stand_ins
from .._foreign.absent import explain_missing
from .._foreign_functions import Function
from .._operator.description import AGGREGATION, GEOMETRIC, MULTI_SCALE
from ..ops._arguments import explain_arguments

# operator -> the names of its forward functions, and the names of its backward functions
_NAMES = {
    MULTI_SCALE: (
        "multi_scale_deformable_attn npu_multi_scale_deformable_attn_function",
        "multi_scale_deformable_attn_backward multi_scale_deformable_attn_grad",
    ),
    AGGREGATION: ("npu_deformable_aggregation", "npu_deformable_aggregation_backward"),
    GEOMETRIC: (
        "geometric_kernel_attention npu_geometric_kernel_attention npu_geometric_kernel_attention_func",
        "geometric_kernel_attention_backward npu_geometric_kernel_attention_backward",
    ),
}
_WRITES = Function("", "geometric_kernel_attention_forward", GEOMETRIC, "value shapes starts locations weights output=")
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    _WRITES.name: torch.no_grad()(stand_ins.stand_in(_WRITES)),
    **{"npu_bev_pool": stand_ins.bev_pool_forward, "npu_bev_pool_backward": stand_ins.bev_pool_backward},
    **{"npu_bev_pool_v2": stand_ins.bev_pool_v2_forward, "npu_bev_pool_v3": stand_ins.bev_pool_v3_forward},
    **dict.fromkeys(("npu_bev_pool_v2_backward", "npu_bev_pool_v3_backward"), stand_ins.bev_pool_v3_backward),
}
for _operator, (_forwards, _backwards) in _NAMES.items():
    _backward = explain_arguments(backward_as_compiled(_operator, tuple))
    _FUNCTIONS |= dict.fromkeys(_forwards.split(), torch.no_grad()(stand_ins.FORWARDS[_operator]))
    _FUNCTIONS |= dict.fromkeys(_backwards.split(), torch.no_grad()(_backward))

globals().update(_FUNCTIONS)
__all__ = sorted(_FUNCTIONS)  # pyright: ignore[reportUnsupportedDunderAll]
__getattr__ = explain_missing("mx_driving._C")
