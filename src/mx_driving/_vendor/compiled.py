"""The functions of the vendor's compiled extension for the operators here, under their present and older names.

Like the vendor's, they know neither autograd nor autocast; gradients are separate functions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .._dispatch.functions import as_compiled, backward_as_compiled
from .._operator.rules import explain_missing
from ..ops import _extension
from ..ops._arguments import explain_arguments
from ..ops.geometric_kernel_attention import geometric_kernel_attention as _geometric
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn as _multi_scale
from ..ops.npu_deformable_aggregation import deformable_aggregation as _aggregation

__all__ = [
    "geometric_kernel_attention",
    "geometric_kernel_attention_backward",
    "geometric_kernel_attention_forward",
    "multi_scale_deformable_attn",
    "multi_scale_deformable_attn_backward",
    "multi_scale_deformable_attn_grad",
    "npu_bev_pool",
    "npu_bev_pool_backward",
    "npu_bev_pool_v2",
    "npu_bev_pool_v2_backward",
    "npu_bev_pool_v3",
    "npu_bev_pool_v3_backward",
    "npu_deformable_aggregation",
    "npu_deformable_aggregation_backward",
    "npu_geometric_kernel_attention",
    "npu_geometric_kernel_attention_backward",
    "npu_geometric_kernel_attention_func",
    "npu_multi_scale_deformable_attn_function",
]


def _make_backward(operator: str) -> Callable[..., tuple[Tensor, ...]]:
    return torch.no_grad()(explain_arguments(backward_as_compiled(operator, tuple)))


multi_scale_deformable_attn = torch.no_grad()(as_compiled(_multi_scale))
multi_scale_deformable_attn_backward = _make_backward("multi_scale_deformable_attn")
npu_deformable_aggregation = torch.no_grad()(as_compiled(_aggregation))
npu_deformable_aggregation_backward = _make_backward("deformable_aggregation")
geometric_kernel_attention = torch.no_grad()(as_compiled(_geometric))
geometric_kernel_attention_backward = _make_backward("geometric_kernel_attention")


@explain_arguments
def geometric_kernel_attention_forward(
    value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor, output: Tensor
) -> None:
    """Writes to the caller's output."""
    _extension.write_outputs([geometric_kernel_attention(value, shapes, starts, locations, weights)], {"output": output})


npu_multi_scale_deformable_attn_function = multi_scale_deformable_attn
multi_scale_deformable_attn_grad = multi_scale_deformable_attn_backward
npu_geometric_kernel_attention = npu_geometric_kernel_attention_func = geometric_kernel_attention
npu_geometric_kernel_attention_backward = geometric_kernel_attention_backward

npu_bev_pool, npu_bev_pool_backward = _extension.bev_pool_forward, _extension.bev_pool_backward
npu_bev_pool_v2, npu_bev_pool_v3 = _extension.bev_pool_v2_forward, _extension.bev_pool_v3_forward
npu_bev_pool_v2_backward = npu_bev_pool_v3_backward = _extension.bev_pool_v3_backward

__getattr__ = explain_missing("mx_driving._C")
