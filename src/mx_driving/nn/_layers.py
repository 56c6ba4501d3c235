"""Shared code of attention modules: feature pyramids in the layout of the operators, checks of settings and dtypes, initial
values, layers, and fast paths that replace calls of unmodified layers."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._dispatch import distributed
from .._operator.checks import check_shapes
from .._operator.composition import autocasts
from .._operator.rules import FLOATING, FLOATING_RULE, fail, need_dtype, need_one_device

# torch's functions, read at import, because libraries may replace these functions later.
_FORWARDS: dict[type, Any] = {nn.Linear: nn.Linear.forward, nn.Dropout: nn.Dropout.forward}
_CALL = nn.Module.__call__

BOOL = (frozenset((torch.bool,)), "have dtype bool")  # the rule of masks


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
    levels, shapes, starts = _check_maps(maps, "bs, c, H, W")
    return torch.cat([level.flatten(2) for level in levels], 2).transpose(1, 2), shapes, starts


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
    levels, shapes, starts = _check_maps(maps, "bs, cam, c, H, W")
    cams = levels[0].shape[1]
    by_camera = torch.cat([level.flatten(3) for level in levels], 3).transpose(2, 3)
    first = torch.arange(cams, device=starts.device)[:, None] * by_camera.shape[2]
    return by_camera.flatten(1, 2), shapes.expand(cams, -1, -1), first + starts


def _check_maps(levels: Iterable[Tensor], axes: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Check the levels of a pyramid. Only the axes H and W may differ from level to level. Return the levels as a list, their
    shapes, and their starts."""
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
    shapes, starts = [list(level.shape[-2:]) for level in levels], [0]
    for height, width in shapes[:-1]:
        starts.append(starts[-1] + height * width)
    return levels, torch.tensor(shapes, device=levels[0].device), torch.tensor(starts, device=levels[0].device)


def project_values(value_proj: nn.Module, value: Tensor, padding_mask: Tensor | None, num_heads: int) -> Tensor:
    """Return value_proj(value) as [bs, num_keys, num_heads, c / num_heads], with zeros for padding."""
    check_layer_dtype(value_proj, value=value)
    if padding_mask is not None:
        need_dtype("padding_mask", padding_mask, *BOOL)
    rows = value_proj(value)
    if padding_mask is not None:
        rows = torch.where(padding_mask[..., None], 0, rows)  # masked_fill is slower, most of all in the backward
    return rows.unflatten(2, (num_heads, -1))


def check_counts(least: int = 1, **counts: Any) -> None:
    """Check that settings are whole numbers from `least` on."""
    for name, count in counts.items():
        if not isinstance(count, numbers.Integral):
            fail(ValueError, name, "be a whole number", repr(count))
        if count < least:
            fail(ValueError, name, f"be at least {least}", count)


def check_divides(name: str, part: Any, whole_name: str, whole: int) -> None:
    if not isinstance(part, numbers.Integral):
        fail(ValueError, name, "be a whole number", repr(part))
    if part <= 0 or whole % part != 0:
        fail(ValueError, name, f"divide {whole_name}={whole}", part)


def check_dropout_rates(**rates: Any) -> None:
    for name, rate in rates.items():
        if not isinstance(rate, numbers.Real) or not 0 <= float(rate) < 1:
            fail(ValueError, name, "be a fraction below 1", rate)


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether the layer is unmodified, so that other code may replace its call. A modified layer has, for example,
    hooks, a forward that is not its class's (accelerate sets one), or a weight of a Tensor subclass (quantisers set one)."""
    if type(layer) is not kind or getattr(layer.forward, "__func__", None) is not _FORWARDS.get(kind, kind.forward):
        return False
    if _torch_private.is_compiled_in_place(layer) or kind.__call__ is not _CALL:  # some libraries set __call__
        return False
    weights = (getattr(layer, name, None) for name in ("weight", "bias"))
    plain = all(t is None or (type(t) in (Tensor, nn.Parameter) and t.is_floating_point()) for t in weights)
    return plain and not _torch_private.has_hooks(layer)


def check_layer_dtype(layer: nn.Module, **inputs: Tensor) -> None:
    """Check that inputs have the dtype of the linear layer that reads them, unless autocast converts them."""
    dtype = layer.weight.dtype if is_plain(layer) else None  # pyright: ignore[reportAttributeAccessIssue]
    for name, t in inputs.items():
        if dtype not in (None, t.dtype) and not autocasts(t.device.type):
            rule = f"have the dtype of the module's parameters, {str(dtype).removeprefix('torch.')}"
            fail(TypeError, name, rule, str(t.dtype).removeprefix("torch."))


def add_embedding(layer: nn.Module, x: Tensor, **embedding: Tensor | None) -> Tensor:
    """Return x + embedding for the layer that reads the sum, or x if the embedding is None."""
    ((name, t),) = embedding.items()
    if t is None:
        return x
    need_dtype(name, t, FLOATING, FLOATING_RULE)
    total = x + t
    check_layer_dtype(layer, **{name: total})
    return total


def fill(t: Tensor, numbers: Tensor) -> None:
    """Copy the numbers into t. A DTensor receives its process's shard of the numbers."""
    with torch.no_grad():
        t.copy_(distributed.prepare((t, numbers.to(t.device)), shared=(1,))[1])


def initialise(draw: Callable[[Tensor], Any], *layers: nn.Linear) -> None:
    """Draw the weights of layers, and set their biases to zero."""
    for layer in layers:
        draw(layer.weight)
        if layer.bias is not None:  # a program may have replaced the layer by a layer without bias
            nn.init.zeros_(layer.bias)


def list_settings(module: nn.Module, *names: str) -> str:
    """Return attributes of a module for its `extra_repr`."""
    return ", ".join(f"{name}={getattr(module, name)!r}" for name in names)


class DeformableLayers(nn.Module):
    """Layers that compute the offsets and logits of queries, and project values.

    Args:
        maps: number of maps that a query reads. The input of the offset and weight layers joins a row of each map.
        output: whether there is an output projection.
    """

    def __init__(
        self, embed_dims: int, num_heads: int, num_levels: int, num_points: int, maps: int = 1, output: bool = True
    ) -> None:
        super().__init__()
        check_counts(embed_dims=embed_dims, num_levels=num_levels, num_points=num_points)
        check_divides("num_heads", num_heads, "embed_dims", embed_dims)
        self.embed_dims, self.num_heads, self.num_levels, self.num_points = embed_dims, num_heads, num_levels, num_points
        samples = num_heads * maps * num_levels * num_points
        self.sampling_offsets = nn.Linear(maps * embed_dims, samples * 2)
        self.attention_weights = nn.Linear(maps * embed_dims, samples)
        self.value_proj = nn.Linear(embed_dims, embed_dims)
        if output:
            self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as Deformable-DETR and BEVFormer do."""
        offsets = self.sampling_offsets
        nn.init.zeros_(offsets.weight)
        if offsets.bias is not None:  # point p of head h is p + 1 pixels away in direction h
            angle = torch.arange(self.num_heads, dtype=torch.float32) * (2 * math.pi / self.num_heads)
            direction = torch.stack([angle.cos(), angle.sin()], -1)
            direction = direction / direction.abs().amax(-1, keepdim=True)
            steps = torch.arange(1.0, self.num_points + 1)
            levels = offsets.out_features // (self.num_heads * self.num_points * 2)
            fill(offsets.bias, (direction[:, None] * steps[:, None])[:, None].expand(-1, levels, -1, -1).flatten())
        initialise(nn.init.zeros_, self.attention_weights)
        initialise(nn.init.xavier_uniform_, self.value_proj, *([self.output_proj] if hasattr(self, "output_proj") else []))

    def _offsets_and_logits(self, query: Tensor) -> tuple[Tensor, Tensor]:
        heads, levels, points = self.num_heads, self.num_levels, self.num_points
        query = cast_once(query, self.sampling_offsets, self.attention_weights)
        offsets = self.sampling_offsets(query).unflatten(2, (heads, levels, points, 2))
        return offsets, self.attention_weights(query).unflatten(2, (heads, levels * points))

    def extra_repr(self) -> str:
        return list_settings(self, "embed_dims", "num_heads", "num_levels", "num_points")


def is_exported() -> bool:
    """Return whether torch.export, torch.jit.trace or make_fx is tracing."""
    exporting = getattr(torch.compiler, "is_exporting", bool)  # torch before 2.7 has no is_exporting
    if _torch_private.is_tracing() or exporting():
        return True
    return not torch.compiler.is_compiling() and _torch_private.is_traced_by_make_fx()


def cast_once(x: Tensor, *layers: nn.Module) -> Tensor:
    """Convert x to autocast's dtype, contiguous, once for all layers that read x. If a layer is modified, return x.

    Compiled graphs convert x once anyway.
    """
    if is_exported() or torch.compiler.is_compiling() or x.dtype != torch.float32:
        return x
    if not (autocasts(x.device.type) and all(map(is_plain, layers))):
        return x
    return x.to(torch.get_autocast_dtype(x.device.type)).contiguous()


def project_and_add(samples: Tensor, output_proj: nn.Module, dropout: nn.Module, query: Tensor) -> Tensor:
    """Return dropout(output_proj(samples)) + query.

    Without gradients the sum is in place, because the page faults of a new tensor take longer than the sum.
    """
    out = dropout(output_proj(samples))
    ours = type(out) is Tensor and is_plain(output_proj) and is_plain(dropout, nn.Dropout)
    if ours and not (out.requires_grad or is_exported()):
        return out.to(torch.promote_types(out.dtype, query.dtype)).add_(query)
    return out + query
