"""Modules in the sizes of models, with inputs, and the same modules in plain torch and in other packages."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mx_driving
from mx_driving._measure import plain
from mx_driving._measure.workloads import DETR, SPARSE4D, make_pixel_centres, make_ring_of_cameras
from mx_driving._operator import geometry

Forward = Callable[..., Tensor]


class Subject(NamedTuple):
    """A module, its inputs, and other implementations with the same parameters."""

    module: nn.Module
    inputs: tuple[Any, ...]
    learned: tuple[int, ...]  # indices of the inputs that have a gradient
    layers: tuple[tuple[nn.Module, Tensor], ...]  # linear layers that compute as much as the module's, each with an input
    plainly: Forward  # the module in plain torch, with the same inputs
    packages: Callable[[], dict[str, tuple[nn.Module, Forward]]] = dict  # name -> another package's module, its call
    maps: tuple[int, ...] = ()  # indices of inputs that convolutions compute: in 16 bits under autocast


class ModuleWorkload(NamedTuple):
    name: str
    make: Callable[[torch.Generator], Subject]


def _randomised(module: Any) -> Any:
    """Randomise layers as training does. An untrained module has offsets of whole pixels and equal weights."""
    for name, parameter in module.named_parameters():
        if any(layer in name for layer in ("sampling_offsets", "attention_weights", "weights_fc")):
            nn.init.normal_(parameter, std=1.5 if name.endswith("bias") else 0.15)
    return module


def _encoder(generator: torch.Generator, sizes: list[tuple[int, int]]) -> Subject:
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.MultiScaleDeformableAttention(num_levels=len(sizes)))
    maps = [torch.randn(1, 256, *size, generator=generator) for size in sizes]
    value, shapes, starts = mx_driving.nn.flatten_levels(maps)
    query = torch.randn(value.shape, generator=generator)
    reference = torch.cat([make_pixel_centres(*size) for size in sizes])[None, :, None].expand(-1, -1, len(sizes), -1)
    layers = (
        (module.sampling_offsets, query),
        (module.attention_weights, query),
        (module.value_proj, value),
        (module.output_proj, torch.randn(query.shape, generator=generator)),
    )
    inputs = (query, reference, value, shapes, starts)
    return Subject(module, inputs, (0, 2), layers, _plain_attention(module), lambda: _other_attentions(module, len(sizes)))


def _plain_attention(module: Any) -> Forward:
    def run(query: Tensor, reference: Tensor, value: Tensor, shapes: Tensor, starts: Tensor) -> Tensor:
        heads, levels, points = module.num_heads, module.num_levels, module.num_points
        offsets = module.sampling_offsets(query).unflatten(2, (heads, levels, points, 2))
        locations = reference[:, :, None, :, None] + offsets / shapes.flip(-1)[:, None]
        weights = module.attention_weights(query).unflatten(2, (heads, -1)).softmax(-1).unflatten(3, (levels, points))
        rows = module.value_proj(value).unflatten(2, (heads, -1))
        return module.output_proj(plain.multi_scale_deformable_attn(rows, shapes, starts, locations, weights))

    return run


def _other_attentions(module: nn.Module, levels: int) -> dict[str, tuple[nn.Module, Forward]]:
    """Return the modules of transformers and mmcv, if installed, with the same parameters."""
    modules = {}
    for name, make in (("transformers", _of_transformers), ("mmcv", _of_mmcv)):
        try:
            other, run = make(levels)
        except ImportError:
            continue
        other.load_state_dict(module.state_dict())
        modules[name] = (other, run)
    return modules


def _of_transformers(levels: int) -> tuple[nn.Module, Forward]:
    transformers = importlib.import_module("transformers")
    code = importlib.import_module("transformers.models.deformable_detr.modeling_deformable_detr")
    backbone = transformers.ResNetConfig()  # not built; without this configuration transformers 5.1 downloads its default
    config = transformers.DeformableDetrConfig(
        d_model=256, num_feature_levels=levels, use_timm_backbone=False, backbone_config=backbone
    )
    other = code.DeformableDetrMultiscaleDeformableAttention(config, num_heads=8, n_points=4)

    def run(query: Tensor, reference: Tensor, value: Tensor, shapes: Tensor, starts: Tensor) -> Tensor:
        return other(
            query,
            encoder_hidden_states=value,
            reference_points=reference,
            spatial_shapes=shapes,
            spatial_shapes_list=[tuple(size) for size in shapes.tolist()],
            level_start_index=starts,
        )[0]

    return other, run


def _of_mmcv(levels: int) -> tuple[nn.Module, Forward]:
    """Return mmcv's module without dropout, and with zeros in place of the query that it adds. Importing mmcv needs its
    compiled extension, although a CPU does not use it."""
    mx_driving.compat.install()
    try:
        code = importlib.import_module("mmcv.ops.multi_scale_deform_attn")
    finally:
        mx_driving.compat.uninstall()
    other = code.MultiScaleDeformableAttention(num_levels=levels, dropout=0.0, batch_first=True)
    zero = torch.zeros(())

    def run(query: Tensor, reference: Tensor, value: Tensor, shapes: Tensor, starts: Tensor) -> Tensor:
        return other(
            query,
            value=value,
            identity=zero,
            reference_points=reference,
            spatial_shapes=shapes,
            level_start_index=starts,
        )

    return other, run


def _temporal(generator: torch.Generator, size: tuple[int, int]) -> Subject:
    """Return temporal self-attention over a map that has moved by half a cell since the previous frame."""
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.TemporalSelfAttention(dropout=0.0))
    maps, shapes, starts = mx_driving.nn.flatten_levels([torch.randn(2, 256, *size, generator=generator)])
    query, position = torch.randn(2, *maps[:1].shape, generator=generator)
    cells = make_pixel_centres(*size)
    reference = torch.stack([cells + 0.5 / size[0], cells])[None, :, :, None]
    both = torch.cat([maps[:1], query + position], -1)
    layers = (
        (module.sampling_offsets, both),
        (module.attention_weights, both),
        (module.value_proj, maps),
        (module.output_proj, torch.randn(query.shape, generator=generator)),
    )
    return Subject(module, (query, reference, maps[None], shapes, starts, position), (0, 2), layers, _plain_temporal(module))


def _plain_temporal(module: Any) -> Forward:
    def run(query: Tensor, reference: Tensor, maps: Tensor, shapes: Tensor, starts: Tensor, position: Tensor) -> Tensor:
        sizes = (module.num_heads, 2, module.num_levels, module.num_points)
        both = torch.cat([maps[:, 0], query + position], -1)
        offsets = module.sampling_offsets(both).unflatten(2, (*sizes, 2)).transpose(2, 3).movedim(2, 1).flatten(0, 1)
        logits = module.attention_weights(both).unflatten(2, (*sizes[:2], -1)).transpose(2, 3).movedim(2, 1).flatten(0, 1)
        weights = logits.softmax(-1).unflatten(3, sizes[2:])
        locations = reference.flatten(0, 1)[:, :, None, :, None] + offsets / shapes.flip(-1)[:, None]
        rows = module.value_proj(maps).flatten(0, 1).unflatten(2, (module.num_heads, -1))
        output = plain.multi_scale_deformable_attn(rows, shapes, starts, locations, weights)
        return module.output_proj(output.unflatten(0, (-1, 2)).mean(1)) + query

    return run


def _spatial(generator: torch.Generator, bev: tuple[int, int], sizes: list[tuple[int, int]]) -> Subject:
    """Return spatial cross-attention: cells on 102 by 102 metres, pillars of four points, six cameras."""
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.SpatialCrossAttention(num_levels=len(sizes), dropout=0.0))
    value, shapes, starts = mx_driving.nn.flatten_levels([torch.randn(6, 256, *size, generator=generator) for size in sizes])
    cells = (make_pixel_centres(*bev) - 0.5) * 102.4
    heights = torch.linspace(-4, 2, 4)
    places = torch.cat([cells[:, None].expand(-1, 4, -1), heights[:, None].expand(len(cells), -1, -1)], -1)
    projection, image_size = make_ring_of_cameras()
    projected = torch.einsum("cij,qzj->cqzi", projection[:, :3], F.pad(places, (0, 1), value=1.0))
    reference = projected[..., :2] / projected[..., 2:].clamp(min=1e-5) / image_size[:, None, None]
    mask = (projected[..., 2] > 1e-5) & geometry.inside(reference)
    query, position = torch.randn(2, 1, len(cells), 256, generator=generator)
    inner, visible = module.deformable_attention, int(mask.any(-1).sum())
    positioned = torch.randn(1, visible, 256, generator=generator)
    layers = (
        (inner.sampling_offsets, positioned),
        (inner.attention_weights, positioned),
        (inner.value_proj, value),
        (module.output_proj, torch.randn(query.shape, generator=generator)),
    )
    inputs = (query, reference[None], value[None], shapes, starts, mask[None], position)
    return Subject(module, inputs, (0, 2), layers, _plain_spatial(module))


def _plain_spatial(module: Any) -> Forward:
    """Return BEVFormer's published code for one scene. It pads each camera's queries to the most that any camera sees."""

    def run(
        query: Tensor, reference: Tensor, value: Tensor, shapes: Tensor, starts: Tensor, mask: Tensor, position: Tensor
    ) -> Tensor:
        inner = module.deformable_attention
        sizes = (inner.num_heads, inner.num_levels, inner.num_points)
        seen = mask[0].any(-1)
        visible = [camera.nonzero()[:, 0] for camera in seen]
        longest = max(map(len, visible))
        positioned = torch.stack([F.pad((query + position)[0, q], (0, 0, 0, longest - len(q))) for q in visible])
        pillars = torch.stack(
            [F.pad(r[q], (0, 0, 0, 0, 0, longest - len(q))) for r, q in zip(reference[0], visible, strict=True)]
        )
        offsets = inner.sampling_offsets(positioned).unflatten(2, (*sizes, 2))
        points = pillars.repeat(1, 1, sizes[2] // pillars.shape[2], 1)[:, :, None, None]
        weights = inner.attention_weights(positioned).unflatten(2, (sizes[0], -1)).softmax(-1).unflatten(3, sizes[1:])
        rows = inner.value_proj(value[0]).unflatten(2, (sizes[0], -1))
        locations = points + offsets / shapes.flip(-1)[:, None]
        outputs = plain.multi_scale_deformable_attn(rows, shapes, starts, locations, weights)
        sums = torch.zeros_like(query[0])
        for of_camera, q in zip(outputs, visible, strict=True):
            sums = sums.index_add(0, q, of_camera[: len(q)])
        mean = sums / seen.sum(0).clamp(min=1)[:, None]
        return module.output_proj(mean)[None] + query

    return run


def _geometric(generator: torch.Generator, size: tuple[int, int], bev: tuple[int, int]) -> Subject:
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.GeometricKernelAttention())
    value, shapes, starts = mx_driving.nn.flatten_levels([torch.randn(6, 256, *size, generator=generator)])
    centres = make_pixel_centres(*bev).flip(-1)
    query = torch.randn(6, len(centres), 256, generator=generator)
    reference = centres[None, :, None].expand(6, -1, module.num_heads, -1)
    layers = ((module.attention_weights, query), (module.value_proj, value))
    inputs = (query, reference, value, shapes, starts)
    return Subject(module, inputs, (0, 2), layers, _plain_geometric(module))


def _plain_geometric(module: Any) -> Forward:
    def run(query: Tensor, reference: Tensor, value: Tensor, shapes: Tensor, starts: Tensor) -> Tensor:
        heads, levels = module.num_heads, module.num_levels
        weights = module.attention_weights(query).unflatten(2, (heads, -1)).softmax(-1).unflatten(3, (levels, -1))
        centres = (reference[:, :, :, None] * shapes.flip(-1))[..., None, :]
        pixels = (centres + module.grid_offsets).round().long()
        rows = module.value_proj(value).unflatten(2, (heads, -1))
        return plain.geometric_kernel_attention(rows, shapes, starts, pixels, weights)

    return run


def _aggregation(generator: torch.Generator, anchors: int, sizes: list[tuple[int, int]]) -> Subject:
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.DeformableFeatureAggregation(attn_drop=0.0, num_levels=len(sizes)))
    maps = [torch.randn(1, 6, 256, *size, generator=generator) for size in sizes]
    projection, image_size = (t[None] for t in make_ring_of_cameras())
    feature, embed = torch.randn(2, 1, anchors, 256, generator=generator)
    centre = torch.rand(1, anchors, 2, generator=generator) * 80 - 40
    projected = torch.randn(1, anchors, 2, generator=generator)
    height, size = torch.full((1, anchors, 1), 0.8), torch.tensor([1.9, 4.6, 1.7]).log().expand(1, anchors, 3)
    anchor = torch.cat([centre, height, size, F.normalize(projected, dim=-1)], -1)
    layers = (
        (module.kps_generator.learnable_fc, feature),
        (module.camera_encoder, projection[:, :, :3].flatten(2)),
        (module.weights_fc, feature),  # W (feature + camera) = W feature + W camera, so few rows suffice
        (module.output_proj, torch.randn(feature.shape, generator=generator)),
    )
    inputs = (feature, anchor, embed, *mx_driving.nn.flatten_cameras(maps), projection, image_size)
    return Subject(module, inputs, (0, 2, 3), layers, _plain_aggregation(module), maps=(3,))


def _plain_aggregation(module: Any) -> Forward:
    def run(
        feature: Tensor,
        anchor: Tensor,
        embed: Tensor,
        maps: Tensor,
        shapes: Tensor,
        starts: Tensor,
        projection: Tensor,
        image_size: Tensor,
    ) -> Tensor:
        points = F.pad(module.kps_generator(anchor, feature), (0, 1), value=1.0)
        projected = (projection[:, None, None] @ points[:, :, :, None, :, None])[..., 0]  # [bs, anchor, pts, cam, 4]
        locations = projected[..., :2] / projected[..., 2:3].clamp(min=1e-5) / image_size[:, None, None]
        by_camera = (feature + embed)[:, :, None] + module.camera_encoder(projection[:, :, :3].flatten(2))[:, None]
        logits = module.weights_fc(by_camera).flatten(2).unflatten(2, (-1, module.num_groups))
        weights = logits.softmax(2).unflatten(2, (-1, module.num_levels, module.num_pts)).permute(0, 1, 4, 2, 3, 5)
        features = plain.deformable_aggregation(maps, shapes, starts, locations, weights)
        return torch.cat([module.output_proj(features), feature], -1)

    return run


# A workload for each module of `mx_driving.nn`, with the sizes of its model.
MODULES = (
    ModuleWorkload("Module: Deformable-DETR encoder", lambda g: _encoder(g, DETR)),
    ModuleWorkload("Module: BEVFormer temporal self-attention", lambda g: _temporal(g, (200, 200))),
    ModuleWorkload("Module: BEVFormer tiny spatial cross-attention", lambda g: _spatial(g, (50, 50), [(15, 25)])),
    ModuleWorkload("Module: MapTR tiny", lambda g: _geometric(g, (15, 25), (200, 100))),
    ModuleWorkload("Module: Sparse4D v3", lambda g: _aggregation(g, 900, SPARSE4D)),
)
