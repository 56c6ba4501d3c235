"""From camera images to a bird's-eye view with deformable_aggregation, and back by gradient descent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mx_driving import deformable_aggregation

from .rig import Camera, Extent, project

SCALES = 4
POINTS = 2  # samples along each side of a cell, which is their average
Hidden = Callable[[Tensor, Tensor], Tensor]  # (camera position [3], points [..., 3]) -> hidden [...]


@dataclass(frozen=True)
class Lift:
    """All inputs of deformable_aggregation except the features: locations and weights of each cell."""

    spatial_shape: Tensor  # [cam, scale, 2]
    scale_start_index: Tensor  # [cam, scale]
    sample_locations: Tensor  # [1, cells, points, cam, 2]
    weight: Tensor  # [1, cells, points, cam, scale, 1]
    seen: Tensor  # [cells], True if cameras see all points of the cell
    cameras: Tensor  # [cells], the number of cameras that see the cell

    @property
    def num_feat(self) -> int:
        """Return the number of rows of the feature tensor."""
        return int(self.spatial_shape.prod(-1).sum())

    def __call__(self, feature_maps: Tensor) -> Tensor:
        """Return the bird's-eye view [cells, c] of features [1, num_feat, c]."""
        return deformable_aggregation(
            feature_maps, self.spatial_shape, self.scale_start_index, self.sample_locations, self.weight
        )[0]


def shapes(cameras: tuple[Camera, ...]) -> Tensor:
    """Return (H, W) of each camera's pyramid, halved from scale to scale: [cam, scale, 2]."""
    return torch.tensor([[[math.ceil(n / 2**s) for n in c.size] for s in range(SCALES)] for c in cameras])


def pyramid(cameras: tuple[Camera, ...]) -> Tensor:
    """Return the images, averaged down to every scale and flattened to rows: [1, num_feat, 3]."""
    rows = []
    for camera, sizes in zip(cameras, shapes(cameras).tolist(), strict=True):
        assert camera.image is not None
        image = camera.image.permute(2, 0, 1)[None]
        # Adaptive pooling keeps 0 and 1 on the image's edges even if a size is odd.
        rows += [F.adaptive_avg_pool2d(image, size).flatten(2).transpose(1, 2) for size in sizes]
    return torch.cat(rows, 1).contiguous()


def unpack(features: Tensor, shape: Tensor) -> list[list[Tensor]]:
    """Return features [num_feat, c] as maps [c, H, W] per camera and scale."""
    blocks = iter(features.split(shape.prod(-1).flatten().tolist()))
    return [[next(blocks).T.unflatten(1, size) for size in sizes] for sizes in shape.tolist()]


def footprint(camera: Camera, points: Tensor, step: tuple[float, float]) -> Tensor:
    """Return the pixels that one step on the ground covers, along the shorter axis of its image: [...].

    The Jacobian of (u, v) by (x, y) has rows (P[i, :2] - u_i P[2, :2]) / depth; the result is its smaller singular value.
    """
    matrix = camera.projection[:3]
    pixel = points @ matrix[:, :3].T + matrix[:, 3]
    depth = pixel[..., 2:].clamp_min(1e-3)
    jacobian = (matrix[:2, :2] - (pixel[..., :2] / depth)[..., None] * matrix[2, :2]) / depth[..., None]
    jacobian = jacobian * torch.tensor(step, dtype=points.dtype)
    square = jacobian.square().sum((-1, -2))
    determinant = jacobian[..., 0, 0] * jacobian[..., 1, 1] - jacobian[..., 0, 1] * jacobian[..., 1, 0]
    spread = (square.square() - 4 * determinant.square()).clamp_min(0).sqrt()
    return ((square - spread) / 2).clamp_min(0).sqrt()


def scale_weights(pixels: Tensor) -> Tensor:
    """Return the shares of the two scales whose pixels are nearest in size to the footprint: [..., scale], summing to 1."""
    level = pixels.clamp_min(1e-6).log2().clamp(0, SCALES - 1)
    return (1 - (level[..., None] - torch.arange(SCALES, dtype=pixels.dtype)).abs()).clamp_min(0)


def build(cameras: tuple[Camera, ...], extent: Extent, hidden: Hidden | None = None) -> Lift:
    """Project the cells' points into every camera and divide each cell among the cameras and scales that see it."""
    points = extent.ground(POINTS)
    shape = shapes(cameras)
    step = (extent.cell[0] / POINTS, extent.cell[1] / POINTS)
    locations, weights = [], []
    for camera, sizes in zip(cameras, shape, strict=True):
        location, depth = project(camera, points)
        # Closer to the edge than half a pixel of the coarsest scale, a sample would mix with the zeros outside.
        margin = 0.5 / sizes[-1].flip(0)
        visible = ((location > margin) & (location < 1 - margin)).all(-1) & (depth > 0.1)
        if hidden is not None:
            visible &= ~hidden(camera.position, points)
        locations.append(location.nan_to_num(-1.0))
        weights.append(visible[..., None] * scale_weights(footprint(camera, points, step)))
    weight = torch.stack(weights, 2)
    total = weight.sum((1, 2, 3), keepdim=True)
    counts = shape.prod(-1).flatten()
    return Lift(
        spatial_shape=shape,
        scale_start_index=(counts.cumsum(0) - counts).view(shape.shape[:2]),
        sample_locations=torch.stack(locations, 2)[None].float(),
        weight=(weight / total.clamp_min(1e-9))[None, ..., None].float(),
        seen=(weight.sum((2, 3)) > 0).all(1),
        cameras=(weight.sum((1, 3)) > 0).sum(1),
    )


@dataclass(frozen=True)
class Recovery:
    """The result of gradient descent: the view, its features, and the loss of every step."""

    bev: Tensor  # [cells, 3]
    features: Tensor  # [num_feat, 3]
    losses: list[float]


def recover(lift: Lift, target: Tensor, steps: int) -> Recovery:
    """Start from blank feature maps and descend through the operator's backward until the view matches the target."""
    features = torch.zeros(1, lift.num_feat, target.shape[1], requires_grad=True)
    optimiser = torch.optim.Adam([features], lr=0.1, betas=(0.8, 0.99), fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps, eta_min=0.005)
    count = lift.seen.sum().clamp_min(1)
    losses = []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = (lift(features) - target)[lift.seen].square().sum() / (3 * count)
        loss.backward()
        optimiser.step()
        schedule.step()
        losses.append(loss.item())
    return Recovery(lift(features).detach(), features.detach()[0], losses)


def paint(lift: Lift, features: Tensor) -> list[Tensor]:
    """Return a picture [H, W, 4] of the recovered features for each camera: the mean of all scales.

    A pixel's weight is the sum of the weights with which the cells read it, computed as the gradient of the view's sum.
    """
    ones = torch.ones(1, features.shape[0], 1, requires_grad=True)
    touched = torch.autograd.grad(lift(ones).sum(), ones)[0][0]
    maps = zip(unpack(features * touched, lift.spatial_shape), unpack(touched, lift.spatial_shape), strict=True)
    pictures = []
    for colours, counts in maps:
        size = list(counts[0].shape[-2:])
        colour, count = (sum(_enlarged(m, size) / 4**s for s, m in enumerate(ms)) for ms in (colours, counts))
        assert isinstance(colour, Tensor)
        assert isinstance(count, Tensor)
        # Near the car, cells are further apart than the coarsest pixels. Fill the gaps with the colour of neighbours.
        colour, count = colour + 0.1 * _blurred(colour), count + 0.1 * _blurred(count)
        pictures.append(torch.cat([colour / count.clamp_min(1e-12), (count > 1e-6).float()]).permute(1, 2, 0).clamp(0, 1))
    return pictures


def _blurred(plane: Tensor) -> Tensor:
    """Return the mean of 25 by 25 pixels around each pixel."""
    return F.avg_pool2d(F.avg_pool2d(plane[None], (25, 1), 1, (12, 0)), (1, 25), 1, (0, 12))[0]


def _enlarged(plane: Tensor, size: list[int]) -> Tensor:
    return F.interpolate(plane[None], size=size, mode="nearest")[0]


def psnr(a: Tensor, b: Tensor, mask: Tensor) -> float:
    """Return the peak signal-to-noise ratio in decibels inside the mask. Colours are 0..1."""
    return -10 * math.log10(max(float((a - b)[mask].square().mean()), 1e-12))
