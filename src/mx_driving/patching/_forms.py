"""The forms in which libraries write a deformable sampling core, and the operator in each form.

The names of its parameters identify a form. The code that replaces a function's runs with the globals of the library's
module (see `_patch.py`), so it imports what it calls.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.geometric_kernel_attention import geometric_kernel_attention
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn
from ..ops.npu_deformable_aggregation import deformable_aggregation

FUNCTION, MODULE, AUTOGRAD = "function", "module", "autograd function"


@dataclass(frozen=True)
class Form:
    """One way to write a core: its kind, its parameters (without self or ctx), and its replacement."""

    kind: str
    parameters: tuple[str, ...]
    replacement: Callable[..., Any]
    called: str = ""  # autograd functions of different operators share parameters; their names tell them apart

    def fits(self, name: str, kind: str, parameters: tuple[str, ...]) -> bool:
        """Whether something of this kind, with this name and these parameters, is written in this form."""
        return kind == self.kind and parameters == self.parameters and re.search(self.called, name) is not None


def levels(sizes: Tensor | Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """spatial_shapes and level_start_index of levels that lie one after the other."""
    shapes = sizes if isinstance(sizes, Tensor) else torch.tensor([list(s) for s in sizes], device=device)
    rows = shapes.prod(-1)
    return shapes, rows.cumsum(0) - rows


def plain(value: Tensor, sizes: Any, locations: Tensor, weights: Tensor) -> Tensor:
    """mmcv, Deformable-DETR, Mask2Former: locations [bs, queries, heads, levels, points, 2]."""
    return multi_scale_deformable_attn(value, *levels(sizes, value.device), locations, weights)


def uneven(value: Tensor, sizes: Any, locations: Tensor, weights: Tensor, counts: Sequence[int], method: str) -> Tensor:
    """RT-DETR v2, D-FINE: a level has its own number of points; one axis holds all, [bs, queries, heads, sum(counts), 2].

    A level with more points than another is listed several times: levels may overlap.
    """
    value = keys_last(value)
    points, order = math.gcd(*counts), levels_by_points(counts)
    shapes, starts = (t[order] for t in levels(sizes, value.device))
    locations = locations.unflatten(3, (len(order), points))
    weights = weights.unflatten(3, (len(order), points))
    if method == "discrete":  # the nearest pixel, clamped to the border
        pixels = locations.detach() * shapes.flip(-1)[:, None] + 0.5
        return geometric_kernel_attention(value, shapes, starts, pixels, weights)
    return multi_scale_deformable_attn(value, shapes, starts, locations, weights)


def levels_by_points(counts: Sequence[int]) -> list[int]:
    """The levels, each as often as it takes to have its count of points, gcd(counts) at a time."""
    return [level for level, count in enumerate(counts) for _ in range(count // math.gcd(*counts))]


def keys_last(value: Tensor) -> Tensor:
    """value [bs, num_keys, num_heads, channels], with a gradient in the layout that `_KeysLast` is about."""
    return _KeysLast.apply(value) if value.shape[0] == 1 and value.requires_grad and value.device.type == "cpu" else value


class _KeysLast(torch.autograd.Function):
    """The identity. Its gradient has keys last in memory, as the libraries' own core makes it.

    D-FINE's values come straight from a BatchNorm2d. For one picture, PyTorch 2.13's batch_norm_backward on a CPU misreads
    the other layout: strides (c, 1, W * c, c) of a [1, c, H, W] gradient.
    """

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _plain(value, value_spatial_shapes, sampling_locations, attention_weights):
    from mx_driving.patching import _forms

    return _forms.plain(value, value_spatial_shapes, sampling_locations, attention_weights)


def _uneven(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"):
    from mx_driving.patching import _forms

    return _forms.uneven(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method)


def _layer(
    self,
    value,
    value_spatial_shapes,
    value_spatial_shapes_list,
    level_start_index,
    sampling_locations,
    attention_weights,
    im2col_step,
):
    """transformers 5. It passes the shapes as a tensor for its GPU kernel, and as a list for its plain torch."""
    return multi_scale_deformable_attn(value, value_spatial_shapes, level_start_index, sampling_locations, attention_weights)


_MMCV = ("value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights")
FORMS = (
    Form(FUNCTION, ("value", "value_spatial_shapes", "sampling_locations", "attention_weights"), _plain),
    Form(
        FUNCTION,
        ("value", "value_spatial_shapes", "sampling_locations", "attention_weights", "num_points_list", "method"),
        _uneven,
    ),
    Form(
        MODULE,
        (
            "value",
            "value_spatial_shapes",
            "value_spatial_shapes_list",
            "level_start_index",
            "sampling_locations",
            "attention_weights",
            "im2col_step",
        ),
        _layer,
    ),
    Form(AUTOGRAD, (*_MMCV, "im2col_step"), multi_scale_deformable_attn, called="(?i)(ms|multi_?scale)_?deform"),
    Form(AUTOGRAD, (*_MMCV, "im2col_step"), geometric_kernel_attention, called="(?i)geometric"),
    Form(
        AUTOGRAD,
        ("mc_ms_feat", "spatial_shape", "scale_start_index", "sampling_location", "weights"),
        deformable_aggregation,
        called="(?i)deformable_?aggregation",
    ),
)
