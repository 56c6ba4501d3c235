"""Feature pyramids in the layout of the operators, and checks of the pyramids that attention modules read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from . import _check


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
    maps = _check.maps(maps, "bs, c, H, W")
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
    maps = _check.maps(maps, "bs, cam, c, H, W")
    cams = maps[0].shape[1]
    by_camera = torch.cat([m.flatten(3) for m in maps], 3).transpose(2, 3)
    shapes, starts = _tables([m.shape[-2:] for m in maps], by_camera.device)
    first = torch.arange(cams, device=starts.device)[:, None] * by_camera.shape[2]
    return by_camera.flatten(1, 2), shapes.expand(cams, -1, -1), first + starts


def check_pyramid(
    sizes: dict[str, int], value: Tensor, level_start_index: Tensor, padding_mask: Tensor | None, value_proj: nn.Module
) -> None:
    """Check the pyramid that an attention module reads. `sizes` has the axes of the module's queries."""
    _check.shapes(
        sizes,
        value=(value, "bs, num_keys, embed_dims"),
        level_start_index=(level_start_index, "num_levels"),
        padding_mask=(padding_mask, "bs, num_keys or None"),
    )
    _check.layer_dtype(value_proj, value=value)
    if padding_mask is not None:
        _check.mask("padding_mask", padding_mask)


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
