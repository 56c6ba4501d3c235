"""Shared code of the public functions that call bev_pool_v3: the operator's inputs, cells of voxels, gradients."""

from __future__ import annotations

import functools
import math
import numbers
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._operator import checks, geometry
from .._operator.description import OPERATORS, POOL
from .._operator.rules import INDEX, INDEX_RULE, fail, need_axes, need_dtype, need_shape, need_tensors, refuse
from ._arguments import explain_arguments

_FIVE_INTS = [int] * 5
_SEQUENCES = (tuple, list, torch.Size)


def inputs_of(depth: Any, feat: Any, ranks_depth: Any, ranks_feat: Any, ranks_bev: Any, bev_feat_shape: Any) -> tuple[Any, ...]:
    """Return the inputs of the operator. The operator takes feat first, because all operators sum rows of their first input.

    With depth and plain ints, run no checks first: this function and the kernel refuse every wrong call, and `check` then finds
    the error for the wrong argument.
    """
    plain = depth is not None and type(bev_feat_shape) in _SEQUENCES and not torch.compiler.is_compiling()
    if not plain or [*map(type, bev_feat_shape)] != _FIVE_INTS:
        bev_feat_shape = _check_tensors(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape)
    B, D, H, W, channels = bev_feat_shape
    if depth is None:
        need_dtype("ranks_bev", ranks_bev, INDEX, INDEX_RULE)
        if ranks_bev.dim() != 2:
            refuse(ValueError, "ranks_bev", "ranks_bev must be 2D when running without depth")  # the vendor's sentence
        need_shape("ranks_bev", ranks_bev, "n, 4", None, 4)
        count = ranks_bev.shape[0]
        rows = feat.numel() // channels if channels else math.prod(feat.shape[:-1])
        if rows * channels != feat.numel() or rows < count:
            fail(ValueError, "feat", f"hold {count} or more rows of C={channels}", f"shape {tuple(feat.shape)}")
        one = torch.ones((), dtype=torch.float64 if feat.dtype == torch.float64 else torch.float32, device=feat.device)
        row, cell = torch.arange(count, dtype=torch.int32, device=feat.device), cells(ranks_bev, B, D, H, W)
        return feat.reshape(rows, channels)[:count], one.expand(count), row, row, cell, B, D, H, W
    shape = feat.shape
    if shape[-1] != channels:
        fail(ValueError, "feat", f"have shape (..., C={channels})", tuple(shape))
    rows = feat if len(shape) == 2 else feat.flatten(0, -2) if len(shape) > 2 else feat.unsqueeze(0)
    elements = depth if depth.dim() == 1 else depth.flatten()
    return rows, elements, ranks_feat, ranks_depth, ranks_bev, B, D, H, W


def _check_tensors(depth: Any, feat: Any, ranks_depth: Any, ranks_feat: Any, ranks_bev: Any, bev_feat_shape: Any) -> list[int]:
    """Check the types of the arguments, and the channels of feat. Return the sizes."""
    sizes = sizes_of("bev_feat_shape", bev_feat_shape, "five", "B, D, H, W, C")
    need_tensors(("feat", feat), ("ranks_bev", ranks_bev))
    if depth is not None:
        need_tensors(("depth", depth), ("ranks_depth", ranks_depth), ("ranks_feat", ranks_feat))
        if feat.dim() == 0 or feat.shape[-1] != sizes[-1]:
            fail(ValueError, "feat", f"have shape (..., C={sizes[-1]})", tuple(feat.shape))
    return sizes


def sizes_of(name: str, argument: Any, count: str, axes: str) -> list[int]:
    """Return the sizes as ints or torch.SymInts. Convert tensors, which BEVFusion passes, and NumPy's integers."""
    sizes = []
    for size in argument if isinstance(argument, (list, tuple)) else ():
        if isinstance(size, (int, torch.SymInt)):
            sizes.append(size)
        elif (isinstance(size, Tensor) and size.dim() == 0 and size.dtype in INDEX) or isinstance(size, numbers.Integral):
            sizes.append(int(size))  # pyright: ignore
    if len(sizes) != len(axes.split(", ")) or len(sizes) != len(argument):
        fail(ValueError, name, f"be {count} ints, ({axes})", argument)
    if any(size < 0 for size in sizes):
        fail(ValueError, name, "have no negative size", tuple(sizes))
    if not torch.compiler.is_compiling() and any(isinstance(size, int) and size >= 2**48 for size in sizes):
        fail(ValueError, name, "have sizes below 2**48", tuple(sizes))
    return sizes


def cells(voxels: Tensor, B: int, D: int, H: int, W: int) -> Tensor:
    """Return the cells of voxels (h, w, d, b); -1 for a voxel outside the grid, because its number could be that of another
    cell."""
    (h, w, d, b), outside = _clamp_voxels(voxels, H, W, D, B)
    cell = ((b * D + d) * H + h) * W + w
    return cell - outside * (cell + 1)


def points_inside(geom_xyz: Tensor, voxel_num: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return the points of geom_xyz [B, ..., 3] inside the grid (X, Y, Z), in memory order, and their cells in [B, Y, X].

    Under vmap, return all points, because the number of points inside the grid varies along the vmapped axis. Points outside
    the grid then get the first cell of an extra scene.
    """
    need_dtype("geom_xyz", geom_xyz, INDEX, INDEX_RULE)
    voxels = geom_xyz.flatten(1, -2)
    if voxels.is_meta:
        none = voxels.new_empty(0, dtype=torch.int64)
        return none, none
    (B, count, _), (X, Y, _) = voxels.shape, voxel_num
    (x, y, _), outside = _clamp_voxels(voxels, *voxel_num)
    if _torch_private.is_batched(geom_xyz):
        batch = torch.arange(B, device=voxels.device)[:, None]
        cells = torch.where(outside == 0, (batch * Y + y) * X + x, B * Y * X)
        return torch.arange(B * count, device=voxels.device), cells.flatten()
    batch, point = (1 - outside).nonzero(as_tuple=True)
    return batch * count + point, (batch * Y + y[batch, point]) * X + x[batch, point]


def _clamp_voxels(voxels: Tensor, *sizes: int) -> tuple[list[Tensor], Tensor]:
    """Return the columns of voxels, clamped to their sizes, and a flag: 1 if a coordinate of the voxel was outside, else 0."""
    clamped, outside = zip(
        *(geometry.clamp_index(column, size) for column, size in zip(voxels.unbind(-1), sizes, strict=True)), strict=True
    )
    return list(clamped), torch.stack(outside).sum(0).clamp(max=1)


def check(
    depth: Any, feat: Any, ranks_depth: Any, ranks_feat: Any, ranks_bev: Any, bev_feat_shape: Any, voxels: str = "ranks_bev"
) -> None:
    """Repeat the checks of the kernel of bev_pool_v3. Without depth, errors call ranks_bev by the name `voxels`."""
    shape = _check_tensors(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape)
    inputs = inputs_of(depth, feat, ranks_depth, ranks_feat, ranks_bev, shape)
    if depth is None and checks.is_readable(ranks_bev):
        B, D, H, W = inputs[5:]
        with _torch_private.outside_transforms():
            outside = _clamp_voxels(ranks_bev, H, W, D, B)[1]
            if outside.any():
                at = int(outside.argmax())
                fail(ValueError, f"{voxels}[{at}]", f"lie in (H={H}, W={W}, D={D}, B={B})", tuple(ranks_bev[at].tolist()))
    checks.check_call(OPERATORS[POOL], *inputs)


def _check_gradients(grad_out: Any, depth: Any, feat: Any, ranks_depth: Any, ranks_feat: Any, ranks_bev: Any) -> None:
    need_tensors(("grad_out", grad_out))
    need_axes("grad_out", grad_out, "B, D, H, W, C")
    check(depth, feat, ranks_depth, ranks_feat, ranks_bev, tuple(grad_out.shape))


@functools.partial(explain_arguments, check=_check_gradients)
def gradients(
    grad_out: Tensor, depth: Any, feat: Tensor, ranks_depth: Any, ranks_feat: Any, ranks_bev: Tensor
) -> tuple[Tensor | None, Tensor]:
    """Return the gradients of depth and feat. grad_out is [B, D, H, W, C]."""
    inputs = inputs_of(depth, feat, ranks_depth, ranks_feat, ranks_bev, tuple(grad_out.shape))
    mask = [True, depth is not None]
    grad_feat, grad_depth = torch.ops.mx_driving.bev_pool_v3_backward(grad_out.permute(0, 4, 1, 2, 3), *inputs, mask)
    if depth is not None:
        return grad_depth.view(depth.shape), grad_feat.view(feat.shape)
    if rest := feat.numel() - grad_feat.numel():  # feat has rows without a point; their gradient is 0
        grad_feat = torch.nn.functional.pad(grad_feat.flatten(), (0, rest))
    return None, grad_feat.view(feat.shape)
