"""patch: each form in which a library writes a core or an attention module, by its own code in float64."""

from __future__ import annotations

import functools
import types

import attention_modules as libraries
import pytest
import torch
from attention_modules import KEYS, POINTS, SIZES, agrees, arguments_for, build, library, operators, plain_core, results

import mx_driving

POINT, BOX = (2, 2), (2, 4)  # the last sides of reference points: one for each level
ONE_POINT, ONE_BOX = (1, 2), (1, 4)  # one for all


class Fixed(libraries.Pillars):
    """UniAD of tt-forge: sizes are written into the constructor."""

    forward = libraries.make_forward(libraries.MMCV + "**kwargs")

    def __init__(self, embed_dims=16):
        super().__init__(16, 4, 2, 8)
        self.value_proj = torch.nn.Linear(embed_dims, embed_dims)


# module, what its constructor is given beside the common sizes, reference points
FORMS = [
    (libraries.HuggingFace, {}, (POINT, BOX)),
    (libraries.Mask2Former, {}, (POINT, BOX)),
    (libraries.Libre, {}, (POINT, BOX)),
    *((libraries.Mmcv, {"batch_first": first}, (POINT, BOX)) for first in (False, True)),
    *((libraries.GroundingDino, {"batch_first": first}, (POINT, BOX)) for first in (False, True)),
    (libraries.Pillars, {}, (POINT,)),
    (Fixed, {}, (POINT,)),
    (libraries.Temporal, {}, (POINT, BOX)),
    (libraries.Paper, {}, (POINT, BOX)),
    (libraries.LwDetr, {}, (POINT, ONE_BOX)),
    (libraries.Birder, {}, (POINT, BOX)),
    (libraries.RfDetr, {}, (ONE_POINT, POINT, ONE_BOX, BOX)),
    (libraries.Ultralytics, {}, (ONE_POINT, ONE_BOX)),
    (libraries.RtDetr, {}, (POINT, ONE_BOX, BOX)),
    (libraries.Multiplies, {}, (POINT, ONE_BOX, BOX)),
    *((libraries.RtDetrV2, {"num_points": points, "offset_scale": 0.6}, (ONE_BOX,)) for points in (4, POINTS, [3, 1])),
]


@pytest.mark.parametrize(("kind", "more", "references"), FORMS)
def test_modules(kind, more, references):
    module = build(kind, **more)
    agrees(module, *(arguments_for(module, sides, masked) for sides in references for masked in (True, False)))


@pytest.mark.parametrize("points", [4, POINTS])
@pytest.mark.parametrize(
    ("kind", "layout"),
    [(libraries.DFine, libraries.by_heads), (libraries.DFine, libraries.as_copies), (libraries.Gtr, libraries.as_images)],
)
def test_values_of_each_level(kind, layout, points):
    """Levels that were split from one tensor are read where they lie."""
    module = build(kind, num_points=points)
    agrees(module, arguments_for(module, ONE_BOX, layout=layout))


@pytest.mark.parametrize("kind", [libraries.Mmcv, libraries.Pillars, libraries.Temporal])
def test_a_module_may_look_at_its_own_queries(kind):
    module = build(kind, batch_first=True)
    agrees(module, {n: t for n, t in arguments_for(module).items() if n not in ("value", "identity", "query_pos")})


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (
            libraries.HuggingFace,
            [
                *({"attention_mask": torch.full((2, KEYS), kept)} for kept in (True, False)),
                {"reference_points": torch.rand(1, 1, 1, 2).double()},  # for all batches and queries
            ],
        ),
        (libraries.LwDetr, [{"input_spatial_shapes": SIZES}]),
    ],
)
def test_other_inputs(kind, changes):
    module = build(kind)
    agrees(module, *({**arguments_for(module), **change} for change in changes))


def test_shapes_that_an_exporter_cannot_fold():
    """RF-DETR then gives locations of at most five axes."""
    module = build(libraries.RfDetr)
    module._export = True
    agrees(module, *(arguments_for(module, references) for references in (ONE_POINT, POINT, ONE_BOX, BOX)))


def half_a_key(module):
    arguments = arguments_for(module, BOX)
    return {**arguments, "value_mask": arguments["value_mask"] * 0.5}


def merged_for_deployment(module):
    module._fused_offset_weight = True  # LibreYOLO's GTR does
    return arguments_for(module, ONE_BOX, layout=libraries.by_heads)


@pytest.mark.parametrize(
    ("kind", "more", "make_arguments"),
    [
        (libraries.RtDetr, {}, lambda module: arguments_for(module, (2, 6))),  # OTX's third kind of references
        (libraries.Multiplies, {}, half_a_key),
        (libraries.DFine, {"method": "discrete"}, lambda module: arguments_for(module, ONE_BOX, layout=libraries.by_heads)),
        (libraries.DFine, {}, merged_for_deployment),
    ],
)
def test_what_a_form_cannot_take_is_left_to_the_modules_own_code(kind, more, make_arguments):
    module = build(kind, **more)
    arguments = make_arguments(module)
    expected = module(**arguments)
    with mx_driving.patched(library(kind)):
        assert operators(module, **arguments) == []
        assert torch.equal(module(**arguments), expected)


def listed_core(value, shapes_list, sampling_locations, attention_weights):
    return plain_core(value, shapes_list, sampling_locations, attention_weights)


def optional_core(
    value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default",
    value_shape="default", allow_acceleration=True,
):  # fmt: skip
    value = libraries.by_heads(value.flatten(2)) if value_shape == "reshape" else value
    return libraries.by_level_core(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method)


def hinted_core(value, value_spatial_shapes, sampling_locations, attention_weights, spatial_shapes_ints=None):
    """VADv2 of tt-forge: the sizes as ints, for a compiler. The table must be a tensor."""
    assert value_spatial_shapes.size(0) == len(SIZES)
    sizes = value_spatial_shapes.tolist() if spatial_shapes_ints is None else spatial_shapes_ints
    return plain_core(value, sizes, sampling_locations, attention_weights)


def started_core(
    value, spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step=64,
):  # fmt: skip
    assert im2col_step > 0
    assert level_start_index[-1] > 0
    return plain_core(value, spatial_shapes, sampling_locations, attention_weights)


def keys_last(value):
    return value.permute(0, 2, 3, 1).contiguous()


def levels(value):
    return libraries.as_copies(value.flatten(2))


SWAPPED = torch.tensor(SIZES).flip(0)  # RF-DETR gives the shapes twice; the list is the one that an exporter can read
# core, points, layout of value, shapes, what it is given behind the weights
CORES = [
    (listed_core, (2, 4), torch.clone, SIZES, {}),
    (libraries.merged_core, (8,), torch.clone, SIZES, {}),
    *((libraries.keys_last_core, points, keys_last, SIZES, {}) for points in ((2, 4), (8,))),
    (libraries.keys_last_core, (8,), keys_last, SWAPPED, {"value_spatial_shapes_hw": SIZES}),
    (libraries.by_level_core, (6,), levels, SIZES, {"num_points_list": POINTS}),
    (hinted_core, (2, 4), torch.clone, torch.tensor(SIZES), {}),
    (hinted_core, (2, 4), torch.clone, torch.tensor(SIZES), {"spatial_shapes_ints": SIZES}),
    (hinted_core, (2, 4), torch.clone, SWAPPED, {"spatial_shapes_ints": SIZES}),
    (optional_core, (6,), levels, SIZES, {"num_points_list": POINTS, "value_shape": "default", "allow_acceleration": False}),
]


def core_arguments(points, layout, shapes):
    generator = torch.Generator().manual_seed(3)
    sides = (2, KEYS, 2, 8), (2, 7, 2, *points, 2), (2, 7, 2, *points)
    value, locations, weights = (torch.rand(s, generator=generator, dtype=torch.float64) for s in sides)
    return layout(value), shapes, locations, weights


@pytest.mark.parametrize(("core", "points", "layout", "shapes", "more"), CORES)
def test_cores(core, points, layout, shapes, more):
    arguments = core_arguments(points, layout, shapes)
    expected = results(core, *arguments, **more)
    with mx_driving.patched(library(core)) as done:
        assert done.replaced == (f"{core.__module__}.{core.__name__}",)
        assert len(operators(core, *arguments, **more)) == 1
        torch.testing.assert_close(results(core, *arguments, **more), expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("core", "layout", "more"),
    [
        (libraries.by_level_core, levels, {"method": "discrete"}),  # most libraries clamp its x by the height
        (optional_core, torch.clone, {"value_shape": "reshape"}),
    ],
)
def test_options_that_a_core_was_not_tried_with_run_its_own_code(core, layout, more):
    arguments, more = core_arguments((6,), layout, SIZES), {"num_points_list": POINTS, **more}
    expected = core(*arguments, **more)
    with mx_driving.patched(library(core)):
        assert operators(core, *arguments, **more) == []
        assert torch.equal(core(*arguments, **more), expected)


def geometry_kernel_attention_cpu(
    value, spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step=64
):  # fmt: skip
    """MapTR in plain torch: whole pixels, clamped to the map; fractions are rounded."""
    bs, _, heads, _ = value.shape
    batch, head = torch.arange(bs).view(-1, 1, 1, 1), torch.arange(heads).view(1, 1, -1, 1)
    total = 0
    for l, (h, w) in enumerate(spatial_shapes.tolist()):
        x, y = sampling_locations[:, :, :, l].unbind(-1)
        x, y = (torch.round(at.double()).long().clamp(0, most - 1) for at, most in ((x, w), (y, h)))
        read = value[batch, level_start_index[l] + y * w + x, head]
        total = total + (read * attention_weights[:, :, :, l, :, None]).sum(3)
    return total.flatten(2)


WHOLE = "geometric_kernel_attention"
STARTED = [
    (started_core, torch.float64, [libraries.BARE]),
    *((geometry_kernel_attention_cpu, dtype, [WHOLE]) for dtype in (torch.int64, torch.int32)),
    (geometry_kernel_attention_cpu, torch.float64, []),
]


@pytest.mark.parametrize(("core", "dtype", "called"), STARTED)
def test_cores_with_a_start_index(core, dtype, called):
    """MapTR's plain kernel calls the operator for whole pixels: its compiled kernel cuts fractions, and so does the operator;
    the plain one rounds them."""
    value, _, locations, weights = core_arguments((2, 4), torch.clone, SIZES)
    locations = locations if core is started_core else (locations * 9 - 2).to(dtype)
    arguments = value, torch.tensor(SIZES), torch.tensor([0, 20]), locations, weights, 32
    expected = results(core, *arguments)
    with mx_driving.patched(library(core)) as done:
        assert done.replaced == (f"{__name__}.{core.__name__}",)
        assert operators(core, *arguments) == called
        torch.testing.assert_close(results(core, *arguments), expected, rtol=0, atol=1e-11)


class Motion(libraries.Dropping):
    """UniAD's MotionDeformableAttention: samples around each step of a trajectory, which starts at a box."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=1, num_points=4, num_steps=12, sample_index=-1):
        super().__init__(embed_dims, num_heads, num_levels, num_points, batch_first=True)
        self.num_steps, self.sample_index, self.bev_range = num_steps, sample_index, [-20.0, -10.0, -5.0, 20.0, 30.0, 3.0]
        samples = num_heads * num_steps * num_levels * num_points
        self.sampling_offsets, self.attention_weights = (torch.nn.Linear(embed_dims, n * samples) for n in (2, 1))
        self.output_proj = torch.nn.Sequential(
            torch.nn.Linear(num_steps * embed_dims, embed_dims), torch.nn.LayerNorm(embed_dims)
        )

    def agent_coords_to_ego_coords(self, trajectories, boxes):
        return torch.stack(
            [t + box[0].gravity_center[:, None, None, None, :2] for t, box in zip(trajectories, boxes, strict=True)]
        )

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, spatial_shapes=None,
        level_start_index=None, bbox_results=None, reference_trajs=None, flag="decoder", **kwargs,
    ):  # fmt: skip
        batches, agents, modes, width = query.shape
        identity = query if identity is None else identity
        queries = (query if query_pos is None else query + query_pos).reshape(batches, agents * modes, width)
        heads, levels, points = self.sides
        sides = batches, agents * modes, heads, self.num_steps, levels * points
        steps = self.sampling_offsets(queries).view(*sides[:4], levels, points, 2)
        weights = self.attention_weights(queries).view(sides).softmax(-1).view(*sides[:4], levels, points)
        places = self.agent_coords_to_ego_coords(reference_trajs[:, :, :, [self.sample_index]], bbox_results).flatten(1, 2)
        low, high = torch.tensor(self.bev_range[:2]), torch.tensor(self.bev_range[3:5])
        places = ((places - low) / (high - low))[:, :, None, :, :, None]  # [bs, queries, 1, 1, levels, 1, 2]
        locations = (places + steps / spatial_shapes.flip(-1)[:, None]).transpose(2, 3).flatten(1, 2)
        value = self.rows(value.permute(1, 0, 2), key_padding_mask)
        out = plain_core(value, spatial_shapes, locations, weights.transpose(2, 3).flatten(1, 2))
        out = self.output_proj(out.reshape(batches, agents * modes, -1)).view(query.shape)
        return self.dropout(out) + identity


@pytest.mark.parametrize("masked", [False, True])
def test_samples_along_trajectories(masked):
    module = build(Motion, num_steps=5, sample_index=0)
    generator = torch.Generator().manual_seed(2)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    boxes = [(types.SimpleNamespace(gravity_center=20 * rand(3, 3)), None) for _ in range(2)]
    arguments = {"query": rand(2, 3, 2, 16), "value": rand(KEYS, 2, 16), "query_pos": rand(2, 3, 2, 16)}
    arguments |= {"spatial_shapes": torch.tensor(SIZES), "level_start_index": torch.tensor([0, 20])}
    arguments |= {"key_padding_mask": rand(2, KEYS) < 0.3} if masked else {}
    call = functools.partial(module, bbox_results=boxes, reference_trajs=10 * rand(2, 3, 2, 2, 2, 2) - 5)
    expected = [*results(call, **arguments), *torch.autograd.grad(call(**arguments).sum(), list(module.parameters()))]
    with mx_driving.patched(library(Motion, plain_core)) as done:
        assert f"{__name__}.Motion" in done.replaced
        assert operators(call, **arguments) == [libraries.WITH_LOGITS]
        actual = [*results(call, **arguments), *torch.autograd.grad(call(**arguments).sum(), list(module.parameters()))]
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)


def test_axes_that_the_core_cannot_take_are_its_own_matter():
    """What was not tried runs the core's own code, and fails as it does."""
    with mx_driving.patched(library(libraries.merged_core)), pytest.raises(RuntimeError, match="sizes"):
        libraries.merged_core(*core_arguments((2, 4), torch.clone, SIZES))
