"""Multi-scale deformable attention: the sampling core of Deformable-DETR, BEVFormer and their relatives."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from .._operator.description import OPERATORS
from ._arguments import explain_arguments, with_foreign_signatures

__all__ = ["MultiScaleDeformableAttnFunction", "multi_scale_deformable_attn", "npu_multi_scale_deformable_attn_function"]

_op = torch.ops.mx_driving.multi_scale_deformable_attn.default  # bound at import, which saves 0.4 us per call


@explain_arguments
def multi_scale_deformable_attn(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
) -> Tensor:
    """Weighted sum of bilinear samples from a feature pyramid.

        out[b, q, h] = sum over l, p of  weight[b, q, h, l, p] * sample(level l of value[b, :, h], location[b, q, h, l, p])

    A location (x, y) is normalised: the pixel coordinate is x * W - 0.5, so that 0 and 1 are the outer edges of the map.

    Args:
        value: [bs, num_keys, num_heads, embed_dims]; the levels one after the other, row by row. float32, float64, float16
            or bfloat16.
        value_spatial_shapes: [num_levels, 2], (H, W) of each level. int32 or int64.
        value_level_start_index: [num_levels], the row of num_keys where each level begins; used as given, so levels may
            overlap or leave gaps. int32 or int64.
        sampling_locations: [bs, num_queries, num_heads, num_levels, num_points, 2], (x, y), x first. Any floating dtype.
        attention_weights: [bs, num_queries, num_heads, num_levels, num_points]; used as given, no softmax. Any floating
            dtype.

    Outside: a corner beyond the border counts as zero; a NaN or infinite location samples nothing, and a sample that is
    off the map contributes exactly 0 to the output and to every gradient, even where other inputs are NaN.

    Gradients: of value, sampling_locations and attention_weights, each in its input's dtype; differentiable twice. Sums are in
    float32 (float64 if an input is float64), and bitwise repeatable on a CPU for any number of threads; on a GPU, value's
    gradient is repeatable under torch.use_deterministic_algorithms(True). A float32 sum stops growing at 2**24 times its
    addend: if more than 2**24 contributions meet in one pixel, use float64.

    Returns:
        [bs, num_queries, num_heads * embed_dims], value's dtype (float32 under autocast).

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not allowed.
        ValueError: shapes do not agree, devices differ, or (on a CPU) a level does not fit in num_keys.

    Source: Zhu et al., "Deformable DETR", ICLR 2021; same numbers as its CUDA kernel and as the vendor's operator since 7.2.

    >>> import torch, mx_driving
    >>> value = torch.arange(4.0).view(1, 4, 1, 1)  # one 2 x 2 map
    >>> shapes, start = torch.tensor([[2, 2]]), torch.tensor([0])
    >>> centre = torch.full((1, 1, 1, 1, 1, 2), 0.5)
    >>> mx_driving.multi_scale_deformable_attn(value, shapes, start, centre, torch.ones(1, 1, 1, 1, 1))
    tensor([[[1.5000]]])
    """
    return _op(value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)


_with_foreign_signatures = with_foreign_signatures(
    multi_scale_deformable_attn, *OPERATORS["multi_scale_deformable_attn"].tables
)


@explain_arguments
def npu_multi_scale_deformable_attn_function(
    value: Tensor, shape: Tensor, offset: Tensor, locations: Tensor, weights: Tensor, im2col_step: int = 64
) -> Tensor:
    """The vendor's older name of `multi_scale_deformable_attn`. Calls warn DeprecationWarning, except under torch.compile.

    The index tables may be lists. im2col_step is ignored; mmcv's function has this argument.
    """
    if not torch.compiler.is_compiling():
        sentence = "npu_multi_scale_deformable_attn_function is deprecated: call mx_driving.multi_scale_deformable_attn"
        warnings.warn(sentence, DeprecationWarning, stacklevel=3)  # explain_arguments adds a frame
    return _with_foreign_signatures(value, shape, offset, locations, weights)


class MultiScaleDeformableAttnFunction(_dispatch.functions.OperatorFunction):
    """The operator as the vendor's autograd function: `MultiScaleDeformableAttnFunction.apply(...)`."""

    public = staticmethod(_with_foreign_signatures)

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: Any = None,
    ) -> Tensor:
        """Save the inputs in ctx, and return the output. Ignore mmcv's im2col_step."""
        inputs = (value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights)
        return _dispatch.functions.forward(ctx, multi_scale_deformable_attn, *inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of value, sampling_locations and attention_weights, and None for the other inputs."""
        return _dispatch.functions.backward(ctx, "multi_scale_deformable_attn", grad_output)
