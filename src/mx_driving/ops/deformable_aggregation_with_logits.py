"""Deformable aggregation from the outputs of the linear layers."""

from __future__ import annotations

import torch
from torch import Tensor

from ._arguments import explain_arguments

__all__ = ["deformable_aggregation_with_logits"]

_op = torch.ops.mx_driving.deformable_aggregation_with_logits.default  # bound at import, which saves 0.4 us per call


@explain_arguments
def deformable_aggregation_with_logits(
    feature_maps: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    key_points: Tensor,
    projection: Tensor,
    logits: Tensor,
    image_size: Tensor | None = None,
    pair_scale: Tensor | None = None,
) -> Tensor:
    """`deformable_aggregation` at key points in space, projected into the cameras, with weights from logits.

        (u, v, d)                  = projection[b, cam, :3] (key_point[b, a, p], 1)
        location[b, a, p, cam]     = (u, v) / max(d, 1e-5) / image_size[b, cam]
        weight[b, a, p, cam, s, g] = softmax of logits[b, a, ..., g] over cam, s and p together * pair_scale[b, a, cam, p]

    Args:
        feature_maps: [bs, num_feat, c]; the maps of all cameras and scales, row by row. float32, float64, float16 or
            bfloat16.
        spatial_shape: [cam, scale, 2], (H, W) of each map. int32 or int64.
        scale_start_index: [cam, scale], the row of num_feat where each map begins; used as given. int32 or int64.
        key_points: [bs, anchor, pts, 3], (x, y, z) in metres. Any floating dtype.
        projection: [bs, cam, 4, 4], from space to a picture; its last row is not read. Any floating dtype.
        logits: [bs, anchor, cam, scale, pts, group], the order of Sparse4D's linear layer; group divides c. Any floating
            dtype.
        image_size: [bs, cam, 2], (width, height) of the pictures in projection's pixels, or None when projection gives 0..1.
            Any floating dtype.
        pair_scale: [bs, anchor, cam, pts], a factor of the weights, or None. Dropout of pairs in training passes 0 or
            1 / (1 - p). Any floating dtype.

    Outside: as for `deformable_aggregation`: a camera sees a point if 0 < x < 1 and 0 < y < 1, strictly, and never NaN or
    infinity. A camera that does not see a point contributes exactly 0, but its logits count in softmax. A logit of -inf gives a
    weight of 0.

    Gradients: of feature_maps, key_points, projection and logits, each in its input's dtype; differentiable twice. A point
    nearer than 1e-5 has no gradient along its depth. Autograd saves only the inputs, neither locations nor weights. Arithmetic
    is in float32 (float64 if an input is float64), and bitwise repeatable on a CPU for any number of threads.

    Returns:
        [bs, anchor, c], feature_maps' dtype (float32 under autocast).

    Raises:
        TypeError: an argument is not a tensor, or has a dtype that is not allowed.
        ValueError: shapes do not agree, devices differ, group does not divide c, or (on a CPU) a map does not fit in num_feat.

    Source: Lin et al., "Sparse4D v2/v3", 2023; same numbers as its module around the CUDA kernel.

    >>> import torch, mx_driving
    >>> maps = torch.arange(4.0).view(1, 4, 1)  # one camera, one 2 x 2 map, one channel
    >>> shape, start = torch.tensor([[[2, 2]]]), torch.tensor([[0]])
    >>> point = torch.tensor([1.5, 1.0, 2.0]).view(1, 1, 1, 3)  # seen at (0.75, 0.5)
    >>> camera, logits = torch.eye(4)[None, None], torch.zeros(1, 1, 1, 1, 1, 1)
    >>> mx_driving.deformable_aggregation_with_logits(maps, shape, start, point, camera, logits)
    tensor([[[2.]]])
    """
    return _op(feature_maps, spatial_shape, scale_start_index, key_points, projection, logits, image_size, pair_scale)
