"""Geometric kernel attention: the sampling core of MapTR."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from .._operator.description import OPERATORS
from ._arguments import explain_arguments, with_foreign_signatures

__all__ = ["GeometricKernelAttentionFunc", "geometric_kernel_attention", "npu_geometric_kernel_attention"]

_op = torch.ops.mx_driving.geometric_kernel_attention.default  # bound at import, which saves 0.4 us per call


@explain_arguments
def geometric_kernel_attention(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """Weighted sum of pixels of a feature pyramid, read at the given locations without interpolation.

        out[b, q, h] = sum over l, p of  weight[b, q, h, l, p] * value[b, start_l + yi * W_l + xi, h]
        xi = clamp(trunc(x), 0, W_l - 1),  yi = clamp(trunc(y), 0, H_l - 1)

    Args:
        value: [bs, num_keys, num_heads, embed_dims]; the levels one after the other, row by row. float32, float64, float16
            or bfloat16.
        spatial_shapes: [num_levels, 2], (H, W) of each level. int32 or int64.
        level_start_index: [num_levels], the row of num_keys where each level begins; used as given. int32 or int64.
        sampling_locations: [bs, num_queries, num_heads, num_levels, num_points, 2], (x, y) in pixels of each level, x first.
            Floating or integer (MapTR passes int64).
        attention_weights: [bs, num_queries, num_heads, num_levels, num_points]; used as given. Any floating dtype.

    Outside: a location is clamped to the border before it becomes an integer; NaN and -inf go to 0, +inf to the last pixel.

    Gradients: of value and attention_weights, each in its input's dtype; differentiable twice; none for
    sampling_locations. Forward and backward truncate (the vendor's backward rounds half to even, so that on fractional
    locations its gradient belongs to another pixel; on integral locations all agree). A float32 sum stops growing at 2**24
    times its addend: if more than 2**24 contributions meet in one pixel, use float64.

    Returns:
        [bs, num_queries, num_heads * embed_dims], value's dtype (float32 under autocast).

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not allowed.
        ValueError: shapes do not agree, devices differ, or (on a CPU) a level does not fit in num_keys.

    Source: Liao et al., "MapTR", ICLR 2023; same numbers as its CUDA kernel and as the vendor's forward.

    >>> import torch, mx_driving
    >>> value = torch.arange(4.0).view(1, 4, 1, 1)  # one 2 x 2 map
    >>> shapes, start = torch.tensor([[2, 2]]), torch.tensor([0])
    >>> far_right = torch.tensor([9, 0]).view(1, 1, 1, 1, 1, 2)
    >>> mx_driving.geometric_kernel_attention(value, shapes, start, far_right, torch.ones(1, 1, 1, 1, 1))
    tensor([[[1.]]])
    """
    return _op(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)


class GeometricKernelAttentionFunc(_dispatch.functions.OperatorFunction):
    """The operator as the vendor's autograd function: `GeometricKernelAttentionFunc.apply(...)`."""

    public = staticmethod(with_foreign_signatures(geometric_kernel_attention, *OPERATORS["geometric_kernel_attention"].tables))

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
    ) -> Tensor:
        """Save the inputs in ctx, and return the output."""
        inputs = (value, spatial_shapes, level_start_index, sampling_locations, attention_weights)
        return _dispatch.functions.forward(ctx, geometric_kernel_attention, *inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of value and attention_weights, and None for the other inputs."""
        return _dispatch.functions.backward(ctx, "geometric_kernel_attention", grad_output)


@explain_arguments
def npu_geometric_kernel_attention(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """`geometric_kernel_attention` under the vendor's older name."""
    return geometric_kernel_attention(value, spatial_shapes, level_start_index, sampling_locations, attention_weights)
