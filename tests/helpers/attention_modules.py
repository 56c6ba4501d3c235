"""Sampling cores and attention modules as libraries write them, in few lines: what `patch` must find and replace.

A forward names its linear layers itself: a form is known by that, and by the names of its parameters.
"""

from __future__ import annotations

import inspect
import textwrap
import types
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

import mx_driving

SIZES = [(4, 5), (3, 2)]
KEYS = 26
POINTS = [2, 4]  # of each level, where levels have numbers of their own
WITH_LOGITS, BARE = "multi_scale_deformable_attn_with_logits", "multi_scale_deformable_attn"


def plain_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    """What most libraries write: grid_sample per level."""
    bs, _, heads, channels = value.shape
    queries = sampling_locations.shape[1]
    parts = value.split([h * w for h, w in value_spatial_shapes], 1)
    total = 0
    for l, (h, w) in enumerate(value_spatial_shapes):
        plane = parts[l].permute(0, 2, 3, 1).reshape(bs * heads, channels, h, w)
        grid = 2 * sampling_locations[:, :, :, l].transpose(1, 2).flatten(0, 1) - 1
        weight = attention_weights[:, :, :, l].transpose(1, 2).flatten(0, 1)[:, None]
        total = total + (F.grid_sample(plane, grid, align_corners=False) * weight).sum(-1)
    return total.view(bs, heads * channels, queries).transpose(1, 2)


def merged_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    """ultralytics 8.4: levels and points share an axis."""
    sides = len(value_spatial_shapes), -1
    locations, weights = sampling_locations.unflatten(3, sides), attention_weights.unflatten(3, sides)
    return plain_core(value, value_spatial_shapes, locations, weights)


def keys_last_core(value, value_spatial_shapes, sampling_locations, attention_weights, value_spatial_shapes_hw=None):
    """RF-DETR 1.11: value [bs, heads, channels, keys]; levels and points share an axis or do not."""
    shapes = value_spatial_shapes if value_spatial_shapes_hw is None else value_spatial_shapes_hw
    locations = sampling_locations if sampling_locations.dim() == 5 else sampling_locations.flatten(3, 4)
    return merged_core(value.permute(0, 3, 1, 2), shapes, locations, attention_weights.flatten(3))


def by_level_core(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"):
    """D-FINE: a value for each level, [bs, heads, channels, keys]; levels with different numbers of points."""
    bs, heads, channels, _ = value[0].shape
    queries = sampling_locations.shape[1]
    total = 0
    parts = zip(value, value_spatial_shapes, sampling_locations.split(num_points_list, 3), strict=True)
    for (plane, (h, w), at), weight in zip(parts, attention_weights.split(num_points_list, 3), strict=True):
        plane = plane.reshape(bs * heads, channels, h, w)
        at = at.permute(0, 2, 1, 3, 4).flatten(0, 1)
        if method == "discrete":
            x, y = (at * torch.tensor([w, h]) + 0.5).long().clamp(0, h - 1).unbind(-1)  # x too: the libraries' own mistake
            read = plane.flatten(2).gather(2, (y * w + x.clamp(max=w - 1)).flatten(1)[:, None].expand(-1, channels, -1))
            read = read.unflatten(2, at.shape[1:3])
        else:
            read = F.grid_sample(plane, 2 * at - 1, align_corners=False)
        total = total + (read * weight.permute(0, 2, 1, 3).flatten(0, 1)[:, None]).sum(-1)
    return total.view(bs, heads * channels, queries).transpose(1, 2)


class Layers(nn.Module):
    """The linear layers that all of these modules have, and what becomes of their outputs."""

    names = ("num_heads", "num_levels", "num_points")
    reads, queue = 1, 1  # what the layers read, in widths; maps that a query looks at

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, batch_first=True):
        super().__init__()
        self.sides, self.batch_first = (num_heads, num_levels, num_points), batch_first
        for name, side in zip(self.names, self.sides, strict=True):
            setattr(self, name, side)
        samples = self.queue * num_heads * (sum(num_points) if isinstance(num_points, list) else num_levels * num_points)
        self.sampling_offsets = nn.Linear(embed_dims * self.reads, samples * 2)
        self.attention_weights = nn.Linear(embed_dims * self.reads, samples)
        self.value_proj, self.output_proj = nn.Linear(embed_dims, embed_dims), nn.Linear(embed_dims, embed_dims)

    def rows(self, value, hidden=None):
        value = self.value_proj(value)
        value = value if hidden is None else value.masked_fill(hidden[..., None], 0.0)
        return value.unflatten(-1, (self.sides[0], -1))

    def samples(self, reference, shapes, offsets, logits):
        """Locations and weights, [..., heads, levels, points]."""
        heads, levels, points = self.sides
        offsets, weights = offsets.unflatten(-1, (heads, levels, points, 2)), logits.unflatten(-1, (heads, -1)).softmax(-1)
        return locations_of(reference, offsets, torch.as_tensor(shapes)), weights.unflatten(-1, (levels, points))


def locations_of(reference, offsets, shapes):
    reference = reference[:, :, None, :, None]
    if reference.shape[-1] == 2:
        return reference + offsets / shapes.flip(-1)[:, None]
    return reference[..., :2] + offsets / offsets.shape[-2] * reference[..., 2:] * 0.5


class OfConfiguration(Layers):
    names = ("n_heads", "n_levels", "n_points")

    def __init__(self, config, num_heads, n_points):
        super().__init__(config.d_model, num_heads, config.num_feature_levels, n_points)


class OfPaper(Layers):
    names = ("n_heads", "n_levels", "n_points")

    def __init__(self, d_model=256, n_levels=4, n_heads=8, n_points=4):
        super().__init__(d_model, n_heads, n_levels, n_points)


class HuggingFace(OfConfiguration):
    """transformers: attention_mask is True where a key counts."""

    keeps, sharper = True, 1

    def forward(
        self, hidden_states, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None,
        position_embeddings=None, reference_points=None, spatial_shapes=None, spatial_shapes_list=None, level_start_index=None,
    ):  # fmt: skip
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.rows(encoder_hidden_states, None if attention_mask is None else attention_mask != self.keeps)
        layers = self.sampling_offsets(query), self.sharper * self.attention_weights(query)
        samples = self.samples(reference_points, spatial_shapes, *layers)
        return self.output_proj(plain_core(value, spatial_shapes_list, *samples)), samples[1]


def with_a_forward_of_its_own(kind):
    """As a library repeats its code: a class whose forward is inherited is replaced with its parent."""
    own = kind.forward
    kind.forward = types.FunctionType(own.__code__, globals(), "forward", own.__defaults__)
    return kind


@with_a_forward_of_its_own
class Mask2Former(HuggingFace):
    """transformers' other masks: True where a key is padding."""

    keeps = False


class Libre(OfConfiguration):
    """LibreYOLO's Grounding DINO: transformers' parameters, but the weights are not returned."""

    def forward(
        self, hidden_states, encoder_hidden_states, attention_mask, reference_points, spatial_shapes, spatial_shapes_list,
        position_embeddings=None,
    ):  # fmt: skip
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.rows(encoder_hidden_states, None if attention_mask is None else ~attention_mask)
        samples = self.samples(reference_points, spatial_shapes, self.sampling_offsets(query), self.attention_weights(query))
        return self.output_proj(plain_core(value, spatial_shapes_list, *samples))


class GroundingDino(Layers):
    """mmcv's module without dropout and identity."""

    def forward(
        self, query, key=None, value=None, query_pos=None, key_padding_mask=None, reference_points=None, spatial_shapes=None,
        level_start_index=None, **kwargs,
    ):  # fmt: skip
        value = query if value is None else value
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)
        value = self.rows(value, key_padding_mask)
        samples = self.samples(reference_points, spatial_shapes, self.sampling_offsets(query), self.attention_weights(query))
        out = self.output_proj(plain_core(value, spatial_shapes, *samples))
        return out if self.batch_first else out.transpose(0, 1)


class Dropping(Layers):
    """With dropout, and batches second unless told otherwise."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, dropout=0.1, batch_first=False):
        super().__init__(embed_dims, num_heads, num_levels, num_points, batch_first)
        self.dropout = nn.Dropout(dropout)


class Mmcv(Dropping):
    """mmcv: dropout and a residual."""

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, reference_points=None,
        spatial_shapes=None, level_start_index=None, **kwargs,
    ):  # fmt: skip
        identity = kwargs.get("residual", identity)  # as mmcv's decorator translates it
        identity = query if identity is None else identity
        value = query if value is None else value
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.permute(1, 0, 2), value.permute(1, 0, 2)
        value = self.rows(value, key_padding_mask)
        samples = self.samples(reference_points, spatial_shapes, self.sampling_offsets(query), self.attention_weights(query))
        out = self.output_proj(plain_core(value, spatial_shapes, *samples))
        return self.dropout(out if self.batch_first else out.permute(1, 0, 2)) + identity


class Pillars(Layers):
    """BEVFormer's MSDeformableAttention3D: point p belongs to reference p mod Z of a pillar."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=8, batch_first=True):
        super().__init__(embed_dims, num_heads, num_levels, num_points, batch_first)
        self.output_proj = None

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, reference_points=None,
        spatial_shapes=None, level_start_index=None, **kwargs,
    ):  # fmt: skip
        value = self.rows(query if value is None else value, key_padding_mask)
        query = query if query_pos is None else query + query_pos
        layers = self.sampling_offsets(query), self.attention_weights(query)
        steps, weights = self.samples(torch.zeros(1, 1, 1, 2), spatial_shapes, *layers)
        steps = steps.unflatten(4, (-1, reference_points.shape[2]))
        locations = (reference_points[:, :, None, None, None] + steps).flatten(4, 5)
        return plain_core(value, spatial_shapes, locations, weights)


class Temporal(Dropping):
    """BEVFormer's TemporalSelfAttention: two maps, and the mean of what a query reads in both."""

    reads = queue = num_bev_queue = 2

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, dropout=0.1, batch_first=True):
        super().__init__(embed_dims, num_heads, num_levels, num_points, dropout, batch_first)

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, reference_points=None,
        spatial_shapes=None, level_start_index=None, flag="decoder", **kwargs,
    ):  # fmt: skip
        identity = query if identity is None else identity
        if value is None:
            value = torch.stack([query, query], 1).flatten(0, 1)
        query = query if query_pos is None else query + query_pos
        both = torch.cat([value[: len(query)], query], -1)
        value = self.rows(value, key_padding_mask)
        layers = self.sampling_offsets(both), self.attention_weights(both)
        by_map = (t.unflatten(-1, (self.sides[0], 2, -1)).movedim(3, 1).flatten(0, 1).flatten(2) for t in layers)
        samples = self.samples(reference_points, spatial_shapes, *by_map)
        out = plain_core(value, spatial_shapes, *samples).unflatten(0, (-1, 2)).mean(1)
        return self.dropout(self.output_proj(out)) + identity


class Paper(OfPaper):
    """MSDeformAttn of Deformable-DETR's repository."""

    def forward(
        self, query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index, input_padding_mask=None
    ):
        value, shapes = self.rows(input_flatten, input_padding_mask), input_spatial_shapes
        samples = self.samples(reference_points, shapes, self.sampling_offsets(query), self.attention_weights(query))
        return self.output_proj(plain_core(value, shapes, *samples))


class LwDetr(OfPaper):
    """LibreYOLO's LW-DETR: no level_start_index, and the shapes are a list."""

    def forward(self, query, reference_points, input_flatten, input_spatial_shapes):
        value, shapes = self.rows(input_flatten), [(int(h), int(w)) for h, w in input_spatial_shapes]
        samples = self.samples(reference_points, shapes, self.sampling_offsets(query), self.attention_weights(query))
        return self.output_proj(plain_core(value, shapes, *samples))


class RfDetr(OfPaper):
    _export = False

    def forward(
        self, query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index, input_padding_mask=None,
        input_spatial_shapes_hw=None,
    ):  # fmt: skip
        value, shapes = self.rows(input_flatten, input_padding_mask), input_spatial_shapes
        samples = self.samples(reference_points, shapes, self.sampling_offsets(query), self.attention_weights(query))
        locations = samples[0].flatten(3, 4) if self._export else samples[0]  # at most five axes
        samples = value.permute(0, 2, 3, 1).contiguous(), shapes.tolist(), locations, samples[1].flatten(3)
        return self.output_proj(keys_last_core(*samples, value_spatial_shapes_hw=input_spatial_shapes_hw))


class Ultralytics(OfPaper):
    def forward(self, query, refer_bbox, value, value_shapes, value_mask=None):
        value = self.rows(value, value_mask)
        samples = self.samples(refer_bbox, value_shapes, self.sampling_offsets(query), self.attention_weights(query))
        return self.output_proj(merged_core(value, value_shapes, *(t.flatten(3, 4) for t in samples)))


class RtDetr(Layers):
    """OTX's: value_mask is True where a key is hidden."""

    def forward(self, query, reference_points, value, value_spatial_shapes, value_mask=None):
        value, shapes = self.rows(value, value_mask), value_spatial_shapes
        if reference_points.shape[-1] == 6:  # a centre, and distances to four sides
            reach = reference_points[..., 2::2] + reference_points[..., 3::2]
            reference_points = torch.cat([reference_points[..., :2], reach], -1)
        samples = self.samples(reference_points, shapes, self.sampling_offsets(query), self.attention_weights(query))
        return self.output_proj(plain_core(value, shapes, *samples))


@with_a_forward_of_its_own
class Multiplies(RtDetr):
    """RT-DETR's: value is multiplied by the mask."""

    def rows(self, value, mask=None):
        value = super().rows(value)
        return value if mask is None else value * mask.to(value.dtype)[..., None, None]


class Uneven(Layers):
    """What RT-DETR v2 and D-FINE share: each level has its own number of points."""

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, method="default", offset_scale=0.5):
        super().__init__(embed_dim, num_heads, num_levels, num_points)
        self.num_points_list = num_points if isinstance(num_points, list) else [num_points] * num_levels
        self.method, self.offset_scale = method, offset_scale
        del self.num_points  # DEIM and others keep the list alone

    def samples(self, reference, offsets, logits):
        sides = *reference.shape[:2], self.num_heads, sum(self.num_points_list)
        scales = torch.tensor([1 / n for n in self.num_points_list for _ in range(n)], dtype=offsets.dtype)[:, None]
        steps = offsets.reshape(*sides, 2) * scales * reference[:, :, None, :, 2:] * self.offset_scale
        return reference[:, :, None, :, :2] + steps, logits.reshape(sides).softmax(-1)

    def sampled(self, value, shapes, reference, offsets, logits):
        return by_level_core(value, shapes, *self.samples(reference, offsets, logits), self.num_points_list, self.method)


class RtDetrV2(Uneven):
    def forward(self, query, reference_points, value, value_spatial_shapes, value_mask=None):
        value, shapes = self.value_proj(value), value_spatial_shapes
        value = value if value_mask is None else value * value_mask.to(value.dtype)[..., None]
        layers = self.sampling_offsets(query), self.attention_weights(query)
        return self.output_proj(self.sampled(by_heads(value, self.num_heads, shapes), shapes, reference_points, *layers))


class DFine(Uneven):
    """Values of each level are given by heads, [bs, heads, channels, keys]."""

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, method="default", offset_scale=0.5):
        super().__init__(embed_dim, num_heads, num_levels, num_points, method, offset_scale)
        del self.value_proj, self.output_proj

    def forward(self, query, reference_points, value, value_spatial_shapes):
        layers = self.sampling_offsets(query), self.attention_weights(query)
        return self.sampled(value, value_spatial_shapes, reference_points, *layers)


class Gtr(DFine):
    """LibreYOLO's GTR: values of each level are pictures, [bs * heads, channels, H, W]."""

    def forward(self, query, reference_points, value, value_spatial_shapes):
        layers = self.sampling_offsets(query), self.attention_weights(query)
        value = [level.flatten(2).unflatten(0, (-1, self.num_heads)) for level in value]
        return self.sampled(value, value_spatial_shapes, reference_points, *layers)


def by_heads(memory, heads=2, sizes=SIZES):
    """Levels [bs, heads, channels, keys] of rows [bs, keys, width], where they lie: so D-FINE and DEIM make them."""
    return memory.unflatten(-1, (heads, -1)).permute(0, 2, 3, 1).split([h * w for h, w in sizes], -1)


def as_copies(memory):
    return [level.clone() for level in by_heads(memory)]


def as_images(memory):
    return tuple(level.flatten(0, 1).unflatten(-1, size) for level, size in zip(by_heads(memory), SIZES, strict=True))


# other sizes than those of patch's own trial
CONSTRUCTED = {
    **dict.fromkeys(("d_model", "embed_dim", "embed_dims"), 16),
    **dict.fromkeys(("n_heads", "num_heads"), 2),
    **dict.fromkeys(("n_levels", "num_levels"), 2),
    **dict.fromkeys(("n_points", "num_points"), 6),
    "config": types.SimpleNamespace(d_model=16, num_feature_levels=2),
}


def build(kind: type, **more: Any) -> Any:
    """A module in float64."""
    torch.manual_seed(0)
    module = kind(**{n: a for n, a in {**CONSTRUCTED, **more}.items() if n in inspect.signature(kind).parameters})
    for p in module.parameters():
        nn.init.normal_(p, std=0.4)
    return module.double().eval()


def arguments_for(
    module: Any, references: tuple[int, ...] = (2, 2), masked: bool = True, layout: Any = lambda rows: rows
) -> Any:
    """Arguments by the names of forward's parameters: `references` are the last sides of the reference points, `layout` is that
    of value."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    batches = 2 * module.queue
    mask = rand(batches, KEYS) < 0.4 if masked else None
    rows = [rand(batches, KEYS, 16), *(rand(2, KEYS, 16) for _ in range(3))]
    memory, query, position, identity = rows if module.batch_first else (t.transpose(0, 1) for t in rows)
    known = {
        ("query", "hidden_states"): query,
        ("query_pos", "position_embeddings"): position,
        ("identity",): identity,
        ("value", "encoder_hidden_states", "input_flatten"): layout(memory),
        ("reference_points", "refer_bbox"): rand(batches, KEYS, *references),
        ("key_padding_mask", "attention_mask", "input_padding_mask", "value_mask"): mask,
        ("spatial_shapes", "input_spatial_shapes"): torch.tensor(SIZES),
        ("value_spatial_shapes", "value_shapes", "spatial_shapes_list", "input_spatial_shapes_hw"): SIZES,
        ("level_start_index", "input_level_start_index"): torch.tensor([0, 20]),
    }
    by_name = {name: argument for names, argument in known.items() for name in names}
    return {name: by_name[name] for name in inspect.signature(module.forward).parameters if name in by_name}


def library(*things: Any, source: str = "", name: str = "a_library") -> types.ModuleType:
    """A Python module that has these classes and functions, and what its text defines."""
    module = types.ModuleType(name)
    vars(module).update({"torch": torch} | {thing.__name__: thing for thing in things})
    exec(textwrap.dedent(source), vars(module))
    return module


def patched(*things: Any, **options: Any) -> Any:
    """`mx_driving.patched` of a library of these things and `plain_core`."""
    return mx_driving.patched(library(*things, plain_core), **options)


def close(results: Any, expected: Any) -> None:
    """Of float64."""
    torch.testing.assert_close(results, expected, rtol=1e-10, atol=1e-10)


class Operators(TorchDispatchMode):
    """Names of our operators in the order of their calls."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mx_driving":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


def floating(nested: Any) -> list[Tensor]:
    return [t for t in tree_leaves(nested) if isinstance(t, Tensor) and t.is_floating_point()]


def results(run: Any, *args: Any, **named: Any) -> list[Tensor]:
    """Outputs, and gradients of all inputs and parameters."""
    args, named = tree_map(lambda t: t.detach().requires_grad_() if floating(t) else t, (args, named))
    outputs = floating(run(*args, **named))
    leaves = floating((args, named)) + (list(run.parameters()) if isinstance(run, nn.Module) else [])
    directions = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in outputs]
    gradients = torch.autograd.grad(outputs, leaves, directions, allow_unused=True)
    return outputs + [g for g in gradients if g is not None]


def operators(run: Any, *args: Any, **named: Any) -> list[str]:
    """Those that are called where no gradient is recorded."""
    with torch.no_grad():
        return recorded(run, *args, **named)


def recorded(run: Any, *args: Any, **named: Any) -> list[str]:
    with Operators() as seen:
        run(*args, **named)
    return seen.names


def agrees(module: Any, *inputs: dict[str, Any], operator: str = WITH_LOGITS) -> None:
    """The patched module has its own outputs and gradients, by one call of this operator."""
    kind, expected = type(module), [results(module, **arguments) for arguments in inputs]
    with mx_driving.patched(library(kind, plain_core)) as done:
        assert done.replaced == (f"{__name__}.plain_core", f"{kind.__module__}.{kind.__name__}")
        for arguments, right in zip(inputs, expected, strict=True):
            assert operators(module, **arguments) == [operator]
            with torch.no_grad():
                outputs = floating(module(**arguments))
            close(outputs, right[: len(outputs)])
            close(results(module, **arguments), right)
    assert operators(module, **inputs[0]) == []
