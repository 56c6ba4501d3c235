"""The limits that the vendor documents for its operators on Atlas A2, as data; they are enforced only on request."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .. import _composition
from .._operators import OPERATORS
from . import rules
from .flags import flag

MULTI_SCALE = {"points_times_levels": 64, "num_heads": 8, "embed_dims": 64, "embed_dims_multiple": 8}
# one head fewer if points * levels is 64 and embed_dims fills eight blocks of eight
MULTI_SCALE_FULL_HEADS = 7
AGGREGATION = {"bs": 128, "c": 256, "cam": 6, "scale": 4, "anchor": 2048, "pts": 2048}
AGGREGATION_GROUP = 8
AGGREGATION_GROUP_CHANNELS_MULTIPLE = 8
AGGREGATION_ELEMENTS = 150_000_000
GEOMETRIC_DIM_MULTIPLE = 8
GEOMETRIC_PRODUCT_WITH_DIM = 16384  # num_heads * num_levels * (points rounded up to 8) * dim is less
GEOMETRIC_PRODUCT = 256  # num_heads * num_levels * (points rounded up to 8) is less
POOLING_CHANNELS_MULTIPLE = 8
POOLING_ELEMENTS = 2**31

# The number of open atlas_limits(), plus one if the environment turns them on. Process-wide, like torch.backends' flags; a
# plain number, so that torch.compile can guard on it.
_open = int(flag("MX_DRIVING_ATLAS_LIMITS"))


@contextlib.contextmanager
def atlas_limits() -> Iterator[None]:
    """Hold every call inside to the limits that the vendor documents for Atlas A2; a call past one raises ValueError.

    The vendor has no operators with logits. There a model makes locations and weights itself and calls the bare operator, so
    these are held to the bare operator's limits, and the sentence names its inputs. All locations are worked out for it.

    Process-wide while it is open. `MX_DRIVING_ATLAS_LIMITS=1` (true, yes, on) in the environment does the same for a whole
    program; a word that is neither on nor off is a ValueError when the package is imported.
    """
    global _open
    _open += 1
    try:
        yield
    finally:
        _open -= 1


def enforced() -> bool:
    return _open > 0


def hold(operator: str, *args: Any) -> None:
    """Refuse a call that passes a limit."""
    bare = OPERATORS[operator].bare
    with torch.no_grad():
        _RULES[bare or operator](*(_composition.bare_inputs(operator, *args) if bare else args))


def multi_scale_deformable_attn(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> None:
    attention_sizes(value.shape[2], value.shape[3], locations.shape[3] * locations.shape[4])


def attention_sizes(heads: int, dims: int, samples: int) -> None:
    """A module of multi_scale_deformable_attn: heads, channels of a head, points on all levels."""
    if samples > MULTI_SCALE["points_times_levels"]:
        rules.limit("sampling_locations", "have num_points * num_levels <= 64", samples)
    if heads > MULTI_SCALE["num_heads"]:
        rules.limit("value", "have num_heads <= 8", heads)
    if dims % MULTI_SCALE["embed_dims_multiple"] or dims > MULTI_SCALE["embed_dims"]:
        rules.limit("value", "have embed_dims a multiple of 8 and <= 64", dims)
    if samples == 64 and -(-dims // 8) == 8 and heads > MULTI_SCALE_FULL_HEADS:
        rules.limit("value", "have num_heads <= 7 when num_points * num_levels is 64 and embed_dims 64", heads)


def _aggregation_sizes(feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor) -> None:
    bs, num_feat, c = feature_maps.shape
    _, anchor, pts, cam, scale, group = weight.shape
    sizes = {"bs": bs, "c": c, "cam": cam, "scale": scale, "anchor": anchor, "pts": pts}
    for axis, most in AGGREGATION.items():
        if sizes[axis] > most:
            rules.limit("feature_maps" if axis in ("bs", "c") else "weight", f"have {axis} <= {most}", sizes[axis])
    if group != AGGREGATION_GROUP:
        rules.limit("weight", f"have group == {AGGREGATION_GROUP}", group)
    if (c // group) % AGGREGATION_GROUP_CHANNELS_MULTIPLE:
        rules.limit("feature_maps", "have c / group a multiple of 8", c // group)
    for name, t in (("feature_maps", feature_maps), ("sample_locations", locations), ("weight", weight)):
        if t.numel() > AGGREGATION_ELEMENTS:
            rules.limit(name, f"have at most {AGGREGATION_ELEMENTS} elements", t.numel())
    rows = int(shapes.long().prod(-1).sum())
    if rows != num_feat:
        rules.limit("feature_maps", f"have num_feat == sum of H * W == {rows}", num_feat)


def deformable_aggregation(feature_maps: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weight: Tensor) -> None:
    _aggregation_sizes(feature_maps, shapes, starts, locations, weight)
    if locations.numel() and not bool(((locations >= 0) & (locations <= 1)).all()):
        worst = (locations - 0.5).abs().max().item() + 0.5
        rules.limit("sample_locations", "lie in [0, 1]", f"a value {worst:.4g} away from the far edge")


def geometric_kernel_attention(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> None:
    _, _, heads, dim = value.shape
    product = heads * locations.shape[3] * (-(-locations.shape[4] // 8) * 8)
    if dim % GEOMETRIC_DIM_MULTIPLE:
        rules.limit("value", "have embed_dims a multiple of 8", dim)
    if product * dim >= GEOMETRIC_PRODUCT_WITH_DIM:
        rule = "have num_heads * num_levels * num_points (rounded up to 8) * embed_dims < 16384"
        rules.limit("sampling_locations", rule, product * dim)
    if product >= GEOMETRIC_PRODUCT:
        rule = "have num_heads * num_levels * num_points (rounded up to 8) < 256"
        rules.limit("sampling_locations", rule, product)


def bev_pool_v3(feat: Tensor, depth: Tensor, ranks_feat: Tensor, ranks_depth: Tensor, ranks_bev: Tensor, *sizes: int) -> None:
    channels, elements = feat.shape[1], math.prod(sizes) * feat.shape[1]
    for name, t in (("feat", feat), ("depth", depth)):
        if t.dtype != torch.float32:
            rules.limit(name, "have dtype float32", str(t.dtype).removeprefix("torch."))
    if channels % POOLING_CHANNELS_MULTIPLE:
        rules.limit("feat", "have c a multiple of 8", channels)
    if elements > POOLING_ELEMENTS:
        rules.limit("bev_feat_shape", "have B * D * H * W * C <= 2**31", elements)


_RULES: dict[str, Callable[..., None]] = {
    "multi_scale_deformable_attn": multi_scale_deformable_attn,
    "deformable_aggregation": deformable_aggregation,
    "geometric_kernel_attention": geometric_kernel_attention,
    "bev_pool_v3": bev_pool_v3,
}
_SIZES = {**_RULES, "deformable_aggregation": _aggregation_sizes}


def passed(rule: Callable[..., None], *args: Any) -> str:
    """The sentence of the limit that is passed; empty if none is."""
    try:
        rule(*args)
    except ValueError as error:
        return str(error)
    return ""


def passed_by(operator: str, *inputs: Tensor) -> str:
    """As `passed`, for the sizes of a bare operator's call. Where its samples lie is not looked at."""
    return passed(_SIZES[operator], *inputs)
