"""Deformable aggregation: the sampling core of Sparse4D and SparseDrive."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import _dispatch
from ._arguments import explain_arguments

__all__ = ["AdsDeformableAggregation", "deformable_aggregation", "npu_deformable_aggregation"]

_op = torch.ops.mx_driving.deformable_aggregation.default  # bound at import, which saves 0.4 us per call


@explain_arguments
def deformable_aggregation(
    feature_maps: Tensor, spatial_shape: Tensor, scale_start_index: Tensor, sample_locations: Tensor, weight: Tensor
) -> Tensor:
    """Weighted sum of bilinear samples at an anchor's points, over cameras and scales. Each group of channels has its weights.

        out[b, a, ch] = sum over p, cam, scale of
            weight[b, a, p, cam, scale, ch // (c / group)] * sample(map (cam, scale) of feature_maps[b], location[b, a, p, cam])

    The last axis of sample_locations is (x, y), **x first**. The vendor's document says "y, x"; its kernels, its tests and
    Sparse4D all read x first, and so does this operator.

    Args:
        feature_maps: [bs, num_feat, c]; the maps of all cameras and scales, row by row. float32, float64, float16 or
            bfloat16.
        spatial_shape: [cam, scale, 2], (H, W) of each map. int32 or int64.
        scale_start_index: [cam, scale], the row of num_feat where each map begins; used as given. int32 or int64.
        sample_locations: [bs, anchor, pts, cam, 2], (x, y) normalised: 0..1 is the image. Any floating dtype.
        weight: [bs, anchor, pts, cam, scale, group]; group divides c, and group g weighs channels
            g * c / group ... (g + 1) * c / group - 1. Used as given, no softmax. Any floating dtype.

    Outside: a (point, camera) pair counts only when 0 < x < 1 and 0 < y < 1, strictly; 0, 1, NaN and infinity contribute
    exactly 0 to the output and to every gradient. Within, a corner beyond the border counts as zero.

    Gradients: of feature_maps, sample_locations and weight, each in its input's dtype; differentiable twice. Sums are in
    float32 (float64 if an input is float64), and bitwise repeatable on a CPU for any number of threads; on a GPU,
    feature_maps's gradient is repeatable under torch.use_deterministic_algorithms(True). A float32 sum stops growing at 2**24
    times its addend: if more than 2**24 contributions meet in one pixel, use float64.

    Returns:
        [bs, anchor, c], feature_maps' dtype (float32 under autocast).

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not allowed.
        ValueError: shapes do not agree, devices differ, group does not divide c, or (on a CPU) a map does not fit in num_feat.

    Source: Lin et al., "Sparse4D v2/v3", 2023; same numbers as its CUDA kernel and as the vendor's operator.

    >>> import torch, mx_driving
    >>> maps = torch.arange(4.0).view(1, 4, 1)  # one camera, one 2 x 2 map, one channel
    >>> shape, start = torch.tensor([[[2, 2]]]), torch.tensor([[0]])
    >>> right = torch.tensor([0.75, 0.5]).view(1, 1, 1, 1, 2)
    >>> mx_driving.deformable_aggregation(maps, shape, start, right, torch.ones(1, 1, 1, 1, 1, 1))
    tensor([[[2.]]])
    """
    return _op(feature_maps, spatial_shape, scale_start_index, sample_locations, weight)


@explain_arguments
def npu_deformable_aggregation(
    feature_maps: Tensor, spatial_shape: Tensor, scale_start_index: Tensor, sample_locations: Tensor, weight: Tensor
) -> Tensor:
    """`deformable_aggregation` under the vendor's older name."""
    return deformable_aggregation(feature_maps, spatial_shape, scale_start_index, sample_locations, weight)


class AdsDeformableAggregation(_dispatch.functions.OperatorFunction):
    """The operator as the vendor's autograd function: `AdsDeformableAggregation.apply(...)`."""

    public = staticmethod(deformable_aggregation)

    @staticmethod
    def forward(
        ctx: Any,
        feature_maps: Tensor,
        spatial_shape: Tensor,
        scale_start_index: Tensor,
        sample_locations: Tensor,
        weight: Tensor,
    ) -> Tensor:
        """Save the inputs in ctx, and return the output."""
        inputs = (feature_maps, spatial_shape, scale_start_index, sample_locations, weight)
        return _dispatch.functions.forward(ctx, deformable_aggregation, *inputs)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of feature_maps, sample_locations and weight, and None for the other inputs."""
        return _dispatch.functions.backward(ctx, "deformable_aggregation", grad_output)
