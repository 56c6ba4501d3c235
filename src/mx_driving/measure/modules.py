"""The modules at work: rows of `mx-driving bench` beside other packages' modules, and beside the sum of their parts."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mx_driving

from .._programs.problems import Problem
from . import floor, plain
from .report import LAYERS_AND_FLOOR, OURS, PARTS, Row
from .rivals import operator_of, recorded
from .speed import Calls, timed_rows
from .timing import Call
from .workloads import DETR, SPARSE4D, pixel_centres, ring_of_cameras

Forward = Callable[..., Tensor]
# What outputs may differ by, as a share of the largest entry, and gradients, as a share of their norm. Some samples of an
# encoder lie within a rounding of a pixel centre, where the gradient of a location jumps.
CLOSE, CLOSE_GRADIENTS = 1e-4, 1e-2


class Subject(NamedTuple):
    """A module, what it is given, and who else can do the same with the same parameters."""

    module: nn.Module
    inputs: tuple[Any, ...]
    learned: tuple[int, ...]  # which inputs have a gradient
    layers: tuple[tuple[nn.Module, Tensor], ...]  # its linear layers, each with an input; there may be others in `layers`
    plainly: Forward  # of the inputs: the module in plain torch
    packages: Callable[[], dict[str, tuple[nn.Module, Forward]]] = dict  # other packages' modules, and how they are called


class ModuleWorkload(NamedTuple):
    name: str
    make: Callable[[torch.Generator], Subject]


def measure_module(workload: ModuleWorkload, peers: bool, seconds: float) -> list[Row]:
    """A row per direction and implementation: "forward" without gradients, and "forward + backward" with those of all
    parameters and of the inputs that layers before it make. Everybody computes the same in float32; that is checked first."""
    subject = workload.make(torch.Generator().manual_seed(0))
    implementations = {OURS: (subject.module, subject.module), "plain torch": (subject.module, subject.plainly)}
    if peers:
        others = implementations | subject.packages()
        del others[OURS]
        torch.compiler.reset()
        compiled = {_compiled_name(name): (module, torch.compile(run)) for name, (module, run) in others.items()}
        implementations |= others | compiled
    found = {name: _directions(module, run, subject) for name, (module, run) in implementations.items()}
    _need_the_same(workload.name, found)
    return timed_rows(workload.name, "float32", found | _parts(subject), seconds)


def _compiled_name(name: str) -> str:
    return "torch.compile" if name == "plain torch" else f"{name}, compiled"


def _directions(module: nn.Module, run: Forward, subject: Subject) -> dict[str, Call]:
    """The output; and the output with the gradients of inputs and parameters."""
    learned = [subject.inputs[i].detach().requires_grad_() for i in subject.learned]
    inputs = list(subject.inputs)
    for i, leaf in zip(subject.learned, learned, strict=True):
        inputs[i] = leaf
    # by name, because packages have them in different orders
    parameters = [p for _, p in sorted(module.named_parameters()) if p.requires_grad]

    def forward() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (run(*subject.inputs),)

    def both() -> tuple[Tensor, ...]:
        output = run(*inputs)
        return (output.detach(), *torch.autograd.grad(output, [*learned, *parameters], _mixture(output)))

    return {"forward": forward, "forward + backward": both}


def _mixture(output: Tensor) -> Tensor:
    return torch.linspace(-1, 1, output.shape[-1]).expand_as(output)


def _need_the_same(workload: str, found: Calls) -> None:
    """Every implementation gives our output and our gradients."""
    ours = found[OURS]["forward + backward"]()
    for name, calls in found.items():
        output, *gradients = calls["forward + backward"]()
        differences = {
            "output": max(_largest(out, ours[0]) / CLOSE for out in (output, *calls["forward"]())),
            "gradients": max(_of_norm(*pair) / CLOSE_GRADIENTS for pair in zip(gradients, ours[1:], strict=True)),
        }
        for what, times_allowed in differences.items():
            if not times_allowed <= 1:
                raise Problem(
                    f"{workload}: {what} of {name} must be those of {OURS}; got {times_allowed:.2g} times what may differ"
                )


def _largest(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).abs().max() / expected.abs().max())


def _of_norm(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


def _parts(subject: Subject) -> Calls:
    """The linear layers and the bare operator, each on inputs that are ready: the time below which only fusing gets. And the
    layers with the gather floor instead of the operator."""
    with torch.no_grad(), mx_driving.viz.recording() as looks:
        subject.module(*subject.inputs)
    calls = [
        (look.operator, (look.table.contiguous(), look.shapes, look.starts, look.locations, look.weights)) for look in looks
    ]
    layers = _in_turn(_directions(layer, layer, _alone(layer, x)) for layer, x in subject.layers)
    operators = _in_turn(_operator(name, args) for name, args in calls)
    found = {PARTS: _in_turn([layers, operators])}
    if floor.why_not() is None:
        found[LAYERS_AND_FLOOR] = _in_turn([layers, *(_floor(name, args) for name, args in calls)])
    return found


def _alone(layer: nn.Module, x: Tensor) -> Subject:
    return Subject(layer, (x,), (0,), (), layer)


def _operator(name: str, args: tuple[Tensor, ...]) -> dict[str, Call]:
    function, _, places = operator_of(name, args)
    return {
        "forward": lambda: function(*args),
        "forward + backward": recorded(function, args, places, torch.ones_like(function(*args))),
    }


def _floor(name: str, args: tuple[Tensor, ...]) -> dict[str, Call]:
    forward, backward = (floor.gather_floor(name, args, backward=way) for way in (False, True))
    return {"forward": forward, "forward + backward": lambda: (forward(), backward())}


def _in_turn(parts: Iterable[dict[str, Call]]) -> dict[str, Call]:
    """One call after the other, in each direction."""
    parts = list(parts)

    def all_of(way: str) -> Call:
        def run() -> None:
            for part in parts:
                part[way]()

        return run

    return {way: all_of(way) for way in ("forward", "forward + backward")}


def _randomised(module: Any) -> Any:
    """Layers of a model that has learned something: at first all offsets are whole pixels, and all weights alike."""
    for name, parameter in module.named_parameters():
        if any(layer in name for layer in ("sampling_offsets", "attention_weights", "weights_fc")):
            nn.init.normal_(parameter, std=1.5 if name.endswith("bias") else 0.15)
    return module


# ---- multi-scale deformable attention


def _encoder(generator: torch.Generator, sizes: list[tuple[int, int]]) -> Subject:
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.MultiScaleDeformableAttention(num_levels=len(sizes)))
    maps = [torch.randn(1, 256, *size, generator=generator) for size in sizes]
    value, shapes, starts = mx_driving.nn.flatten_levels(maps)
    query = torch.randn(value.shape, generator=generator)
    reference = torch.cat([pixel_centres(*size) for size in sizes])[None, :, None].expand(-1, -1, len(sizes), -1)
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
    """transformers' module and mmcv's, those that are installed, with the same parameters."""
    found = {}
    for name, make in (("transformers", _of_transformers), ("mmcv", _of_mmcv)):
        try:
            other, run = make(levels)
        except ImportError:
            continue
        other.load_state_dict(module.state_dict())
        found[name] = (other, run)
    return found


def _of_transformers(levels: int) -> tuple[nn.Module, Forward]:
    code = importlib.import_module("transformers.models.deformable_detr.modeling_deformable_detr")
    config = code.DeformableDetrConfig(d_model=256, num_feature_levels=levels, use_timm_backbone=False, backbone_config=None)
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
    """mmcv adds the query and has dropout: here it adds zeros, and drops nothing. Its compiled extension is not used on a CPU,
    but must be there to import it."""
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


# ---- geometric kernel attention


def _geometric(generator: torch.Generator, size: tuple[int, int], bev: tuple[int, int]) -> Subject:
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.GeometricKernelAttention())
    value, shapes, starts = mx_driving.nn.flatten_levels([torch.randn(6, 256, *size, generator=generator)])
    centres = pixel_centres(*bev).flip(-1)
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


# ---- deformable aggregation


def _aggregation(generator: torch.Generator, anchors: int, sizes: list[tuple[int, int]]) -> Subject:
    torch.manual_seed(0)
    module = _randomised(mx_driving.nn.DeformableFeatureAggregation(attn_drop=0.0, num_levels=len(sizes)))
    maps = [torch.randn(1, 6, 256, *size, generator=generator) for size in sizes]
    projection, image_size = (t[None] for t in ring_of_cameras())
    feature, embed = torch.randn(2, 1, anchors, 256, generator=generator)
    place = torch.rand(1, anchors, 2, generator=generator) * 80 - 40
    turned = torch.randn(1, anchors, 2, generator=generator)
    height, size = torch.full((1, anchors, 1), 0.8), torch.tensor([1.9, 4.6, 1.7]).log().expand(1, anchors, 3)
    anchor = torch.cat([place, height, size, F.normalize(turned, dim=-1)], -1)
    layers = (
        (module.kps_generator.learnable_fc, feature),
        (module.camera_encoder, projection[:, :, :3].flatten(2)),
        (module.weights_fc, feature),  # W (feature + camera) = W feature + W camera: on the fewest rows
        (module.output_proj, torch.randn(feature.shape, generator=generator)),
    )
    inputs = (feature, anchor, embed, *mx_driving.nn.flatten_cameras(maps), projection, image_size)
    return Subject(module, inputs, (0, 2, 3), layers, _plain_aggregation(module))


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
        turned = (projection[:, None, None] @ points[:, :, :, None, :, None])[..., 0]  # [bs, anchor, pts, cam, 4]
        locations = turned[..., :2] / turned[..., 2:3].clamp(min=1e-5) / image_size[:, None, None]
        by_camera = (feature + embed)[:, :, None] + module.camera_encoder(projection[:, :, :3].flatten(2))[:, None]
        logits = module.weights_fc(by_camera).flatten(2).unflatten(2, (-1, module.num_groups))
        weights = logits.softmax(2).unflatten(2, (-1, module.num_levels, module.num_pts)).permute(0, 1, 4, 2, 3, 5)
        features = plain.deformable_aggregation(maps, shapes, starts, locations, weights)
        return torch.cat([module.output_proj(features), feature], -1)

    return run


# A row for each module of `mx_driving.nn`, of the sizes that its model has.
MODULES = (
    ModuleWorkload("Module: Deformable-DETR encoder", lambda g: _encoder(g, DETR)),
    ModuleWorkload("Module: MapTR tiny", lambda g: _geometric(g, (15, 25), (200, 100))),
    ModuleWorkload("Module: Sparse4D v3", lambda g: _aggregation(g, 900, SPARSE4D)),
)
