"""Initial values of the modules' linear layers, as published."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .._dispatch import distributed


def fill(t: Tensor, numbers: Tensor) -> None:
    """Copy the numbers into t. A DTensor receives its process's shard of the numbers."""
    with torch.no_grad():
        t.copy_(distributed.prepare((t, numbers.to(t.device)), shared=(1,))[1])


def look_around(offsets: nn.Linear, num_heads: int, num_points: int) -> None:
    """Initialise offsets as Deformable-DETR does: point p of head h is p + 1 pixels away in direction h."""
    angle = torch.arange(num_heads, dtype=torch.float32) * (2 * math.pi / num_heads)
    direction = torch.stack([angle.cos(), angle.sin()], -1)
    direction = direction / direction.abs().amax(-1, keepdim=True)
    steps = torch.arange(1.0, num_points + 1)
    nn.init.zeros_(offsets.weight)
    levels = offsets.out_features // (num_heads * num_points * 2)
    if offsets.bias is not None:
        fill(offsets.bias, (direction[:, None] * steps[:, None])[:, None].expand(-1, levels, -1, -1).flatten())


def _zero_bias(layer: nn.Linear) -> None:
    if layer.bias is not None:  # a program may have replaced the layer by a layer without bias
        nn.init.zeros_(layer.bias)


def equal_weights(logits: nn.Linear) -> None:
    nn.init.zeros_(logits.weight)
    _zero_bias(logits)


def xavier(*layers: nn.Linear) -> None:
    for layer in layers:
        nn.init.xavier_uniform_(layer.weight)
        _zero_bias(layer)
