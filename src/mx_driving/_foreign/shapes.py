"""Convert inputs of compiled extensions to the shapes of the operators. The extensions do not check shapes.

`deformable_aggregation_ext` is the name of two interfaces. In the older interface (Sparse4D v1 and v2, GaussianFormer, Far3D)
feature maps have an axis of cameras. Far3D passes attention weights with levels and points in one axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .._operator import checks, geometry
from .._operator.description import AGGREGATION, SamplingInputs
from .._operator.rules import INDEX, INDEX_RULE, fail, need_dtype, need_shape, need_tensors

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def sampling_inputs(operator: str, facts: Mapping[str, Any]) -> Inputs:
    """Return the inputs of a sampling operator. `facts`: our name of an argument -> argument. If "starts" is
    missing, the maps lie one after the other without gaps."""
    if facts.get("starts") is None and isinstance(facts["shapes"], Tensor):
        facts = {**facts, "starts": geometry.starts_of(facts["shapes"])}
    value, shapes, starts, locations, weights = (facts[name] for name in SamplingInputs._fields)
    if operator == AGGREGATION:
        return aggregation_inputs(value, shapes, starts, locations, weights)
    if isinstance(shapes, Tensor) and shapes.dim() == 2 and shapes.shape[1] == 3:
        fact = f"{tuple(shapes.shape)}: three sizes, of volumes, and the operator samples maps"
        fail(ValueError, "value_spatial_shapes", "have shape (num_levels, 2), (H, W) of each level", fact)
    # The weights of attention may be [bs, num_queries, num_heads, num_levels * num_points].
    if isinstance(weights, Tensor) and isinstance(locations, Tensor) and (weights.dim(), locations.dim()) == (4, 6):
        sides = locations.shape[:-1]
        if weights.shape == (*sides[:3], sides[3] * sides[4]):
            weights = weights.reshape(sides)
    return value, shapes, starts, locations, weights


def aggregation_inputs(
    feature_maps: Tensor, spatial_shape: Tensor, scale_start_index: Tensor, sample_locations: Tensor, weights: Tensor
) -> Inputs:
    """Return the inputs of `deformable_aggregation`. In the older interface, feature maps are [bs, cam, num_feat, c],
    tables [scale, 2] and [scale] for all cameras, locations [bs, pts, cam, 2], weights [bs, pts, cam, scale, group]. Make
    every point of the older interface an anchor of one point."""
    inputs = (feature_maps, spatial_shape, scale_start_index, sample_locations, weights)
    if not isinstance(feature_maps, Tensor) or feature_maps.dim() != 4:
        if isinstance(spatial_shape, Tensor) and spatial_shape.dim() == 2 and isinstance(feature_maps, Tensor):
            fact = (
                f"{tuple(spatial_shape.shape)}, as the older interface has it, beside feature_maps {tuple(feature_maps.shape)}"
            )
            fail(ValueError, "spatial_shape", "have shape (cam, scale, 2) where feature_maps are [bs, num_feat, c]", fact)
        return inputs
    need_tensors(("spatial_shape", spatial_shape), ("scale_start_index", scale_start_index))
    need_tensors(("sample_locations", sample_locations), ("weights", weights))
    need_dtype("scale_start_index", scale_start_index, INDEX, INDEX_RULE)
    bs, cameras, rows, _ = feature_maps.shape
    if spatial_shape.dim() == 3:
        fact = (
            f"{tuple(feature_maps.shape)}, as the older interface has them, beside spatial_shape {tuple(spatial_shape.shape)}"
        )
        fail(ValueError, "feature_maps", "have shape (bs, num_feat, c) where spatial_shape is [cam, scale, 2]", fact)
    need_shape("spatial_shape", spatial_shape, "scale, 2", None, 2)
    scales = spatial_shape.shape[0]
    need_shape("scale_start_index", scale_start_index, "scale", scales)
    need_shape("sample_locations", sample_locations, "bs, pts, cam, 2", bs, None, cameras, 2)
    need_shape("weights", weights, "bs, pts, cam, scale, group", bs, sample_locations.shape[1], cameras, scales, None)
    if checks.is_readable(spatial_shape) and checks.is_readable(scale_start_index):
        # The operator sees the maps of all cameras as one table, and would not notice a level that runs into the next camera.
        checks.check_levels("spatial_shape", "scale_start_index", spatial_shape, scale_start_index, rows)
    first = torch.arange(cameras, dtype=torch.int64, device=scale_start_index.device)[:, None] * rows
    tables = spatial_shape.expand(cameras, -1, -1), scale_start_index + first
    return feature_maps.flatten(1, 2), *tables, sample_locations.unsqueeze(2), weights.unsqueeze(2)
