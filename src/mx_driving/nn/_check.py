"""Checks of the modules' inputs, in the form of `mx_driving._checks.rules`. They read no data, so that graphs stay whole."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from .._checks.rules import fail, fail_shape, need_axes, need_dtype, need_one_device, need_shape, need_some_sizes, tensors


class Pillars(Protocol):
    """The sizes of an attention module whose queries are pillars."""

    embed_dims: int
    num_levels: int
    num_points: int


def divides(name: str, part: int, whole_name: str, whole: int) -> None:
    if part <= 0 or whole % part != 0:
        fail(ValueError, name, f"divide {whole_name}={whole}", part)


def choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        fail(ValueError, name, "be " + " or ".join(map(repr, choices)), repr(value))


def at_least_one(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            fail(ValueError, name, "be at least 1", count)


def kernel_size(sizes: tuple[int, int]) -> None:
    for i, size in enumerate(sizes):
        at_least_one(**{f"kernel_size[{i}]": size})


def fraction(name: str, part: float) -> None:
    if not 0 <= part < 1:
        fail(ValueError, name, "be a fraction below 1", part)


def fix_scale(t: Tensor, num_learnable_pts: int) -> None:
    """Fixed key points of an anchor. There may be none if the instance's feature places some."""
    if t.numel():
        need_some_sizes("fix_scale", t, "points, 3", None, 3)
    elif num_learnable_pts < 1:
        fail(ValueError, "fix_scale", f"hold a point where num_learnable_pts is {num_learnable_pts}", "none")


def maps(given: Iterable[Tensor], axes: str) -> list[Tensor]:
    """The levels of a pyramid. They may differ only in height and width, the last two of `axes`."""
    if isinstance(given, Tensor):
        fail(TypeError, "maps", "be a list of tensors, one for each level", type(given).__name__)
    levels = list(given)
    if not levels:
        fail(ValueError, "maps", "hold at least one level", "none")
    named = [(f"maps[{i}]", m) for i, m in enumerate(levels)]
    tensors(*named)
    need_axes(*named[0], axes)
    for name, m in named:
        need_some_sizes(name, m, axes, *levels[0].shape[:-2], None, None)
    need_one_device(*named)
    return levels


def queries(
    query: Tensor, points: Tensor, shapes: Tensor, embed_dims: int, levels: int, axis: str, count: int, numbers: tuple[int, ...]
) -> None:
    """An attention module's queries. Each has `count` reference points, one per `axis`; a point has one of these `numbers`."""
    tensors(("query", query), ("reference_points", points), ("spatial_shapes", shapes))
    need_some_sizes("query", query, "bs, num_queries, embed_dims", None, None, embed_dims)
    reference_points(points, numbers)
    axes = f"bs, num_queries, {axis}, " + " or ".join(map(str, numbers))
    need_some_sizes("reference_points", points, axes, query.shape[0], query.shape[1], count, None)
    need_shape("spatial_shapes", shapes, "num_levels, 2", levels, 2)


def pyramid(value: Tensor, starts: Tensor, padding_mask: Tensor | None, bs: int, embed_dims: int, levels: int) -> None:
    """The pyramid that an attention module reads."""
    tensors(("value", value), ("level_start_index", starts))
    need_some_sizes("value", value, "bs, num_keys, embed_dims", bs, None, embed_dims)
    need_shape("level_start_index", starts, "num_levels", levels)
    if padding_mask is not None:
        tensors(("padding_mask", padding_mask))
        need_shape("padding_mask", padding_mask, "bs, num_keys", bs, value.shape[1])
        need_dtype("padding_mask", padding_mask, frozenset((torch.bool,)), "have dtype bool")


def cells(query: Tensor, query_pos: Tensor | None, shapes: Tensor, starts: Tensor, embed_dims: int, levels: int) -> None:
    """The queries of a bird's-eye map, and the tables of what they read."""
    tensors(("query", query), ("spatial_shapes", shapes), ("level_start_index", starts))
    axes = "bs, num_queries, embed_dims"
    need_some_sizes("query", query, axes, None, None, embed_dims)
    if query_pos is not None:
        tensors(("query_pos", query_pos))
        need_shape("query_pos", query_pos, axes, *query.shape)
    need_shape("spatial_shapes", shapes, "num_levels, 2", levels, 2)
    need_shape("level_start_index", starts, "num_levels", levels)


def queue(points: Tensor, value: Tensor | None, query: Tensor, maps: int, levels: int) -> None:
    """A temporal attention's reference points and maps, the previous one first."""
    bs, count, embed_dims = query.shape
    tensors(("reference_points", points))
    axes = f"bs, {maps}, num_queries, num_levels, 2 or 4"
    need_some_sizes("reference_points", points, axes, bs, maps, count, levels, None)
    if points.shape[4] not in (2, 4):
        fail_shape("reference_points", points, axes, (bs, maps, count, levels, None))
    if value is not None:
        tensors(("value", value))
        need_shape("value", value, f"bs, {maps}, num_queries, embed_dims", bs, maps, count, embed_dims)


def pillars(points: Tensor, value: Tensor, mask: Tensor, query: Tensor, num_points: int) -> None:
    """A spatial attention's reference points, cameras, and which points the cameras see."""
    bs, count, embed_dims = query.shape
    tensors(("reference_points", points), ("value", value), ("bev_mask", mask))
    need_some_sizes("value", value, "bs, cam, num_keys, embed_dims", bs, None, None, embed_dims)
    cams, axes = value.shape[1], "bs, cam, num_queries, num_Z_anchors"
    need_some_sizes("reference_points", points, axes + ", 2", bs, cams, count, None, 2)
    divides("num_Z_anchors", points.shape[3], "num_points", num_points)
    need_shape("bev_mask", mask, axes, *points.shape[:4])
    need_dtype("bev_mask", mask, frozenset((torch.bool,)), "have dtype bool")


def pictures(
    counts: Sequence[int] | None, query: Tensor, points: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, module: Pillars
) -> None:
    """The queries of pictures, as many in each; or one picture's after the other's, `counts` of each."""
    tensors(("query", query), ("reference_points", points), ("value", value))
    tensors(("spatial_shapes", shapes), ("level_start_index", starts))
    need_some_sizes("value", value, "bs, num_keys, embed_dims", None, None, module.embed_dims)
    need_shape("spatial_shapes", shapes, "num_levels, 2", module.num_levels, 2)
    need_shape("level_start_index", starts, "num_levels", module.num_levels)
    bs, total, axes = value.shape[0], None, "bs, num_queries"
    if counts is not None:
        if len(counts) != bs or any(count < 0 for count in counts):
            fail(ValueError, "counts", f"hold a number from 0 on for each of {bs} pictures", list(counts))
        bs, total, axes = 1, sum(counts), "1, sum(counts)"
    need_some_sizes("query", query, f"{axes}, embed_dims", bs, total, module.embed_dims)
    need_some_sizes("reference_points", points, f"{axes}, num_Z_anchors, 2", bs, query.shape[1], None, 2)
    divides("num_Z_anchors", points.shape[2], "num_points", module.num_points)


def anchors(instance_feature: Tensor, anchor: Tensor, anchor_embed: Tensor, embed_dims: int) -> None:
    """An aggregation module's anchors."""
    tensors(("instance_feature", instance_feature), ("anchor", anchor), ("anchor_embed", anchor_embed))
    need_some_sizes("instance_feature", instance_feature, "bs, anchor, embed_dims", None, None, embed_dims)
    bs, count, _ = instance_feature.shape
    need_some_sizes("anchor", anchor, "bs, anchor, 8 or more", bs, count, None)
    if anchor.shape[2] < 8:
        fail_shape("anchor", anchor, "bs, anchor, 8 or more", (bs, count, None))
    need_shape("anchor_embed", anchor_embed, "bs, anchor, embed_dims", bs, count, embed_dims)


def cameras(projection_mat: Tensor, image_wh: Tensor | None, bs: int, cams: int | None) -> None:
    """An aggregation module's cameras. If cams is None, there may be any number of them."""
    tensors(("projection_mat", projection_mat))
    axes = "bs, cam, 3 or 4, 4"
    need_some_sizes("projection_mat", projection_mat, axes, bs, cams, None, 4)
    if projection_mat.shape[2] not in (3, 4):  # the last row is not read
        fail_shape("projection_mat", projection_mat, axes, (bs, cams, None, 4))
    if image_wh is not None:
        tensors(("image_wh", image_wh))
        need_shape("image_wh", image_wh, "bs, cam, 2", bs, projection_mat.shape[1], 2)


def feature_maps(maps: Tensor, shapes: Tensor, starts: Tensor, bs: int, cams: int, scales: int, embed_dims: int) -> None:
    """The maps that an aggregation module reads."""
    tensors(("feature_maps", maps), ("spatial_shape", shapes), ("scale_start_index", starts))
    need_some_sizes("feature_maps", maps, "bs, num_feat, embed_dims", bs, None, embed_dims)
    need_shape("spatial_shape", shapes, "cam, scale, 2", cams, scales, 2)
    need_shape("scale_start_index", starts, "cam, scale", cams, scales)


def reference_points(t: Tensor, numbers: tuple[int, ...]) -> None:
    """The last axis of reference points has one of these sizes."""
    if t.dim() != 4 or t.shape[-1] not in numbers:
        rule = "have 4 axes, the last of " + " or ".join(map(str, numbers)) + " numbers"
        fail(ValueError, "reference_points", rule, tuple(t.shape))
