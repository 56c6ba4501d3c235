"""The implementations that are timed: our operators, and the same operators as people write them in plain torch. Correctness
checks do not use plain torch.

In plain torch, multi-scale attention and aggregation use grid_sample, geometric attention a gather, and pooling index_add_. For
an operator with logits, the bare operator is timed, too, on locations and weights that are computed before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .._operator import composition
from .._operator.description import OPERATORS
from .report import BARE, OURS
from .workloads import Args, Call, Workload


def _bilinear(maps: Tensor, grid: Tensor) -> Tensor:
    """Call grid_sample. On a CPU, sample 16-bit maps in float32, because torch 2.13's 16-bit kernel reads wrong memory."""
    if maps.device.type == "cpu" and grid.dtype in (torch.float16, torch.bfloat16):
        return _bilinear(maps.float(), grid.float()).to(maps.dtype)
    return F.grid_sample(maps, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def multi_scale_deformable_attn(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    bs, _, heads, channels = value.shape
    queries = locations.shape[1]
    grids = (2 * locations - 1).permute(3, 0, 2, 1, 4, 5).flatten(1, 2)  # [levels, bs * heads, queries, points, 2]
    samples = []
    for (height, width), start, grid in zip(shapes.tolist(), starts.tolist(), grids, strict=True):
        level = value[:, start : start + height * width].permute(0, 2, 3, 1).reshape(bs * heads, channels, height, width)
        samples.append(_bilinear(level, grid))
    flat = weights.transpose(1, 2).reshape(bs * heads, 1, queries, -1)
    out = (torch.stack(samples, -2).flatten(-2) * flat).sum(-1)
    return out.view(bs, heads * channels, queries).transpose(1, 2).contiguous()


def deformable_aggregation(feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor) -> Tensor:
    bs, _, channels = feature_maps.shape
    _, anchors, points, cams, scales, groups = weight.shape
    total = 0
    for cam in range(cams):
        grid = 2 * locations[:, :, :, cam] - 1
        seen = ((grid > -1) & (grid < 1)).all(-1)
        for scale in range(scales):
            (height, width), start = shapes[cam, scale].tolist(), int(starts[cam, scale])
            plane = feature_maps[:, start : start + height * width].transpose(1, 2).reshape(bs, channels, height, width)
            sample = _bilinear(plane, grid)
            by_group = sample.view(bs, groups, channels // groups, anchors, points)
            w = (weight[:, :, :, cam, scale] * seen[..., None]).permute(0, 3, 1, 2)
            total = total + (by_group * w[:, :, None]).sum(-1)
    return total.flatten(1, 2).transpose(1, 2).contiguous()  # pyright: ignore


def geometric_kernel_attention(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    bs, _, heads, channels = value.shape
    _, queries, _, levels, points, _ = locations.shape
    size = shapes.flip(-1)[:, None]
    pixel = torch.minimum(locations.long().clamp(min=0), size - 1)
    row = pixel[..., 1] * size[..., 0] + pixel[..., 0] + starts[:, None]
    index = row.transpose(1, 2).reshape(bs, heads, -1, 1).expand(-1, -1, -1, channels)
    rows = value.transpose(1, 2).gather(2, index).view(bs, heads, queries, levels * points, channels)
    out = (rows * weights.transpose(1, 2).reshape(bs, heads, queries, -1, 1)).sum(3)
    return out.transpose(1, 2).reshape(bs, queries, heads * channels)


def bev_pool_v3(feat: Tensor, depth: Tensor, ranks_feat: Tensor, ranks_depth: Tensor, ranks_bev: Tensor, *sizes: int) -> Tensor:
    channels = feat.shape[1]
    rows = depth[ranks_depth, None] * feat[ranks_feat]
    sums = feat.new_zeros(math.prod(sizes), channels).index_add_(0, ranks_bev, rows)
    return sums.view(*sizes, channels).permute(0, 4, 1, 2, 3).contiguous()


class Rival(NamedTuple):
    """An implementation, its arguments, and the indices of differentiable arguments."""

    function: Callable[..., Tensor]
    args: Args
    differentiable: tuple[int, ...]


def make_plain(operator: str) -> Callable[..., Tensor]:
    """Return the operator in plain torch. For an operator with logits, compute softmax and locations first."""
    bare = OPERATORS[operator].bare
    return composition.forward(operator, globals()[bare]) if bare else globals()[operator]


def make_training_call(function: Callable[..., Tensor], args: Args, differentiable: tuple[int, ...], grad: Tensor) -> Call:
    """Return a call that runs forward under autograd, then backward, and returns the output and the gradients."""
    leaves = [a.detach().requires_grad_(i in differentiable) if isinstance(a, Tensor) else a for i, a in enumerate(args)]
    tensors = [leaves[i] for i in differentiable]

    def run() -> tuple[Tensor, ...]:
        output = function(*leaves)
        return (output.detach(), *torch.autograd.grad(output, tensors, grad))

    return run


def make_rival(operator: str, args: Args, differentiable: tuple[int, ...] | None = None) -> Rival:
    """Return our operator as an implementation. By default every differentiable input gets a gradient."""
    indices = OPERATORS[operator].differentiable if differentiable is None else differentiable
    return Rival(getattr(torch.ops.mx_driving, operator).default, args, indices)


def make_ours(workload: Workload, args: Args) -> dict[str, Rival]:
    """Return the operator, and for an operator with logits also the bare operator on computed locations and weights."""
    implementations = {OURS: make_rival(workload.operator, args, workload.differentiable)}
    if workload.description.bare:
        implementations[BARE] = make_rival(*workload.bare(args))
    return implementations
