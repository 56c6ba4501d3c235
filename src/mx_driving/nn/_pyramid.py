"""Feature pyramids in the layout of the operators, and the values that attention modules read from them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .._operator.checks import check_shapes
from .._operator.rules import fail, need_dtype, need_one_device
from ._layers import BOOL, check_layer_dtype


def flatten_levels(maps: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten the levels of a feature pyramid, one after the other, row by row.

    Args:
        maps: a list of levels, each [bs, c, H, W] with its own H and W.

    Returns:
        value [bs, num_keys, c], spatial_shapes [num_levels, 2] and level_start_index [num_levels], both int64.

    Raises:
        TypeError, ValueError: maps is not a list of such tensors, or a level has no pixels.

    >>> value, shapes, starts = flatten_levels([torch.zeros(1, 8, 4, 6), torch.zeros(1, 8, 2, 3)])
    >>> tuple(value.shape), shapes.tolist(), starts.tolist()
    ((1, 30, 8), [[4, 6], [2, 3]], [0, 24])
    """
    maps = _check_maps(maps, "bs, c, H, W")
    value = torch.cat([m.flatten(2) for m in maps], 2).transpose(1, 2)
    shapes, starts = _tables([m.shape[-2:] for m in maps], value.device)
    return value, shapes, starts


def flatten_cameras(maps: Iterable[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Flatten the feature pyramids of several cameras: all levels of the first camera, then of the second, and so on.

    Args:
        maps: a list of levels, each [bs, cam, c, H, W] with its own H and W.

    Returns:
        feature_maps [bs, num_feat, c], spatial_shape [cam, scale, 2] and scale_start_index [cam, scale], both int64.

    Raises:
        TypeError, ValueError: as for `flatten_levels`.

    >>> maps, shape, start = flatten_cameras([torch.zeros(1, 2, 8, 4, 6), torch.zeros(1, 2, 8, 2, 3)])
    >>> tuple(maps.shape), tuple(shape.shape), start.tolist()
    ((1, 60, 8), (2, 2, 2), [[0, 24], [30, 54]])
    """
    maps = _check_maps(maps, "bs, cam, c, H, W")
    cams = maps[0].shape[1]
    by_camera = torch.cat([m.flatten(3) for m in maps], 3).transpose(2, 3)
    shapes, starts = _tables([m.shape[-2:] for m in maps], by_camera.device)
    first = torch.arange(cams, device=starts.device)[:, None] * by_camera.shape[2]
    return by_camera.flatten(1, 2), shapes.expand(cams, -1, -1), first + starts


def _check_maps(levels: Iterable[Tensor], axes: str) -> list[Tensor]:
    """Check the levels of a pyramid, and return them as a list. Only the axes H and W may differ from level to level."""
    if isinstance(levels, Tensor) or not isinstance(levels, Iterable):
        fail(TypeError, "maps", "be a list of tensors, one for each level", type(levels).__name__)
    levels = list(levels)
    if not levels:
        fail(ValueError, "maps", "hold at least one level", "none")
    sizes: dict[str, int] = {}
    for i, level in enumerate(levels):
        sizes = check_shapes(sizes, **{f"maps[{i}]": (level, axes)})
        if 0 in (sizes.pop("H"), sizes.pop("W")):
            fail(ValueError, f"maps[{i}]", "have a height and a width of at least 1", tuple(level.shape))
        need_one_device(("maps[0]", levels[0]), (f"maps[{i}]", level))
    return levels


def project_values(value_proj: nn.Module, value: Tensor, padding_mask: Tensor | None, num_heads: int) -> Tensor:
    """Return value_proj(value) as [bs, num_keys, num_heads, c / num_heads], with zeros for padding."""
    check_layer_dtype(value_proj, value=value)
    if padding_mask is not None:
        need_dtype("padding_mask", padding_mask, *BOOL)
    return split_heads(value_proj(value), padding_mask, num_heads)


def split_heads(rows: Tensor, padding_mask: Tensor | None, num_heads: int) -> Tensor:
    """Return projected rows [bs, num_keys, c] as [bs, num_keys, num_heads, c / num_heads], with zeros for padding."""
    if padding_mask is not None:
        rows = torch.where(padding_mask[..., None], 0, rows)  # masked_fill is slower, most of all in the backward
    return rows.unflatten(2, (num_heads, -1))


def _tables(sizes: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    starts = [0]
    for height, width in sizes[:-1]:
        starts.append(starts[-1] + height * width)
    return torch.tensor([list(s) for s in sizes], device=device), torch.tensor(starts, device=device)
