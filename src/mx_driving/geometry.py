"""From a camera's calibration to the inputs of the operators: projections, sample locations, and the ranks of bev_pool_v3.

Frames are right-handed and in metres. A camera looks along its z axis, with x to the right of its picture and y down. Pixels
are (u, v): (0, 0) is the corner of the picture and (0.5, 0.5) the centre of the first pixel, as the operators count.

A result has the common dtype of the tensors, also under autocast. Tensors of whole numbers count as torch's default dtype.
16-bit tensors are converted to float32 for the computation, and the result is rounded once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._operator import rules
from ._operator.composition import without_autocast

__all__ = ["augmentation_matrix", "bev_ranks", "frustum", "image_locations", "projection_matrix", "unproject"]


@without_autocast
def projection_matrix(
    intrinsics: Tensor, rotation: Tensor, translation: Tensor, augmentation: Tensor | None = None, *, first_pixel: float = 0.0
) -> Tensor:
    """Return the matrix that takes points (x, y, z, 1) to pixels: depth * (u, v, 1).

        projection = A S K [R | t]

    Pass the matrix to :func:`mx_driving.deformable_aggregation_with_logits` as `projection`, and the size of the picture as
    `image_size`. S moves pixels so that the corner of the picture is (0, 0).

    Args:
        intrinsics: K [..., 3, 3].
        rotation: R [..., 3, 3], from the frame of the points to the camera's: x_camera = R x + t. For a pose that takes the
            camera to the vehicle, as in nuScenes, R is the transpose of the pose's rotation.
        translation: t [..., 3]; -R @ position for such a pose.
        augmentation: A [..., 3, 3] of :func:`augmentation_matrix`, or None.
        first_pixel: the coordinate of the first pixel's centre in K: 0 (OpenCV, nuScenes) or 0.5.

    Returns:
        [..., 4, 4]; its last row is (0, 0, 0, 1).

    >>> import torch
    >>> from mx_driving import geometry
    >>> K = torch.tensor([[100.0, 0, 49.5], [0, 100, 24.5], [0, 0, 1]])
    >>> geometry.projection_matrix(K, torch.eye(3), torch.zeros(3)) @ torch.tensor([0.0, 0, 2, 1])
    tensor([100.,  50.,   2.,   1.])
    """
    dtype, intrinsics, rotation, translation = _inputs(
        ("intrinsics", intrinsics, (3, 3)), ("rotation", rotation, (3, 3)), ("translation", translation, (3,))
    )
    depth = intrinsics[..., 2:, :]  # S adds a multiple of this row to u and v
    matrix = torch.cat([intrinsics[..., :2, :] + (0.5 - first_pixel) * depth, depth], -2)
    if augmentation is not None:
        matrix = _inputs(("augmentation", augmentation, (3, 3)))[1].to(matrix) @ matrix
    matrix = matrix @ torch.cat([rotation, translation[..., None]], -1)
    last = torch.tensor([[0.0, 0, 0, 1]]).to(matrix).expand(*matrix.shape[:-2], 1, 4)
    return torch.cat([matrix, last], -2).to(dtype)


def augmentation_matrix(
    scale: float | Sequence[float] = 1.0,
    crop: Sequence[float] = (0.0, 0.0),
    flip_width: float | None = None,
    degrees: float = 0.0,
    size: Sequence[float] | None = None,
) -> Tensor:
    """Return the matrix that moves pixels as the usual augmentations of a picture do: scale, then crop, then flip, then turn.

    Args:
        scale: the factor of the picture, or the factors of its width and of its height.
        crop: pixels (left, top) that are cut off after the scale.
        flip_width: the width of the cropped picture if it is mirrored, else None.
        degrees: the angle of the turn about the picture's centre, counter-clockwise on the screen as in ``PIL.Image.rotate``.
        size: (width, height) of the cropped picture; needed if degrees is not 0.

    Returns:
        float64 [3, 3], for pixels (u, v, 1).
    """
    x_scale, y_scale = _numbers(
        "scale", 2, scale if isinstance(scale, Sequence) or getattr(scale, "ndim", 0) else (scale, scale)
    )
    left, top = _numbers("crop", 2, crop)
    matrix = torch.tensor([[x_scale, 0, -left], [0, y_scale, -top], [0, 0, 1]], dtype=torch.float64)
    if flip_width is not None:
        matrix = torch.tensor([[-1, 0, flip_width], [0, 1, 0], [0, 0, 1]], dtype=torch.float64) @ matrix
    if degrees:
        if size is None:
            raise ValueError("size must be the (width, height) of a picture that is turned; got None")
        angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
        (cos, sin), (x, y) = (angle.cos(), angle.sin()), (side / 2 for side in _numbers("size", 2, size))
        turn = [[cos, sin, x - cos * x - sin * y], [-sin, cos, y + sin * x - cos * y], [0, 0, 1]]
        matrix = torch.tensor(turn, dtype=torch.float64) @ matrix
    return matrix


@without_autocast
def image_locations(points: Tensor, projection: Tensor, image_size: Tensor) -> tuple[Tensor, Tensor]:
    """Project points into each camera. The locations serve as `sample_locations` of :func:`mx_driving.deformable_aggregation`.

    Args:
        points: [..., 3].
        projection: [cam, 4, 4] of :func:`projection_matrix`.
        image_size: [2] or [cam, 2], (width, height) of the pictures in pixels.

    Returns:
        locations [..., cam, 2], (x, y) of 0..1 across the picture, (-1, -1) for a point that is not in front of the camera;
        and depths [..., cam] in metres.
    """
    dtype, points, projection, image_size = _inputs(
        ("points", points, (3,)), ("projection", projection, (4, 4)), ("image_size", image_size, (2,))
    )
    projected = torch.einsum("cij,...j->...ci", projection[:, :3, :3], points) + projection[:, :3, 3]
    depth = projected[..., 2]
    plane = projected[..., :2] / depth.clamp(min=1e-5)[..., None] / image_size
    return torch.where((depth > 1e-5)[..., None], plane, -1).to(dtype), depth.to(dtype)


@without_autocast
def frustum(image_size: tuple[int, int], feature_size: tuple[int, int], depths: Tensor) -> Tensor:
    """Return the centre of each feature of a camera, at each depth, as (u, v, depth).

    Args:
        image_size: (width, height) of the picture.
        feature_size: (width, height) of the map of features.
        depths: [D] in metres.

    Returns:
        [D, H, W, 3] in the dtype of depths: the pixel (u, v) at the centre of each feature, and its depth.
    """
    dtype, depths = _inputs(("depths", depths, ("D",)))
    sides, counts = _numbers("image_size", 2, image_size), _numbers("feature_size", 2, feature_size)
    u, v = ((torch.arange(n).to(depths) + 0.5) * (side / n) for side, n in zip(sides, counts, strict=True))
    d, v, u = torch.meshgrid(depths, v, u, indexing="ij")
    return torch.stack([u, v, d], -1).to(dtype)


@without_autocast
def unproject(pixels: Tensor, projection: Tensor) -> Tensor:
    """Return the points [cam, ..., 3] that each camera sees at `pixels` [..., 3] of (u, v, depth).

    The inverse of :func:`image_locations`; `projection` is [cam, 4, 4].
    """
    dtype, pixels, projection = _inputs(("pixels", pixels, (3,)), ("projection", projection, (4, 4)))
    projected = torch.cat([pixels[..., :2] * pixels[..., 2:], pixels[..., 2:], torch.ones_like(pixels[..., :1])], -1)
    return torch.einsum("cij,...j->c...i", torch.linalg.inv(projection), projected)[..., :3].to(dtype)


@without_autocast
def bev_ranks(
    points: Tensor, lower: Sequence[float], cell: Sequence[float], cells: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ranks of :func:`mx_driving.bev_pool_v3` for points of cameras, sorted by cell.

    Args:
        points: [B, cam, D, H, W, 3], for instance the result of :func:`unproject` for a frustum, for each scene of a batch.
        lower: smallest (x, y, z) of the grid in metres.
        cell: size (x, y, z) of a cell in metres.
        cells: number of cells along (x, y, z).

    Returns:
        ranks_depth, ranks_feat and ranks_bev, int32 [n], of the n points that lie in the grid, for depth [B, cam, D, H, W],
        feat [B, cam, H, W, C] and bev_feat_shape (B, z, y, x, C).
    """
    _, points = _inputs(("points", points, ("B", "cam", "D", "H", "W", 3)))
    lower, cell, (nx, ny, nz) = (_numbers(*named) for named in (("lower", 3, lower), ("cell", 3, cell), ("cells", 3, cells)))
    if min(cell) <= 0:
        rules.fail(ValueError, "cell", "be positive", tuple(cell))
    batch, _, depths, height, width, _ = points.shape
    voxel = ((points - points.new_tensor(lower)) / points.new_tensor(cell)).floor()
    x, y, z = voxel.unbind(-1)
    inside = ((voxel >= 0) & (voxel < points.new_tensor([nx, ny, nz]))).all(-1)
    b = torch.arange(batch, device=points.device).view(-1, 1, 1, 1, 1)
    ranks_depth = inside.flatten().nonzero()[:, 0]
    x, y, z = (torch.where(inside, axis, 0).long() for axis in (x, y, z))
    ranks_bev, order = (((b * nz + z) * ny + y) * nx + x).flatten()[ranks_depth].sort(stable=True)
    ranks_depth = ranks_depth[order]
    pixels = height * width
    ranks_feat = ranks_depth // (depths * pixels) * pixels + ranks_depth % pixels
    return ranks_depth.int(), ranks_feat.int(), ranks_bev.int()


def _inputs(*named: tuple[str, Tensor, tuple[int | str, ...]]) -> list[Any]:
    """Check the last axes of tensors. Return the dtype of the result, and the tensors in the dtype of the computation.

    An axis is a size or a name.
    """
    for name, tensor, sizes in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor; got {type(tensor).__name__}")
        last = tuple(tensor.shape[-len(sizes) :])
        if len(last) < len(sizes) or any(isinstance(n, int) and n != size for n, size in zip(sizes, last, strict=True)):
            shape = ", ".join(map(str, sizes))
            raise ValueError(f"{name} must have the last axes [{shape}]; got {tuple(tensor.shape)}")
        if tensor.is_complex():
            rules.fail(TypeError, name, "have a dtype of real numbers", str(tensor.dtype).removeprefix("torch."))
    rules.need_one_device(*((name, tensor) for name, tensor, _ in named))
    dtype = functools.reduce(torch.promote_types, (tensor.dtype for _, tensor, _ in named))
    dtype = dtype if dtype.is_floating_point else torch.get_default_dtype()
    return [dtype, *(tensor.to(torch.promote_types(dtype, torch.float32)) for _, tensor, _ in named)]


def _numbers(name: str, count: int, numbers: Any) -> list[Any]:
    """Return the numbers of a tuple, a list, a tensor or an array of `count` numbers."""
    if not hasattr(numbers, "__len__") or len(numbers) != count:
        rules.fail(ValueError, name, f"hold {count} numbers", repr(numbers))
    return list(numbers)
