"""patch: each form in which a library writes a core or an attention module, by its own code in float64."""

from __future__ import annotations

import functools
import inspect
import types

import attention_modules as libraries
import pytest
import torch
from attention_modules import (
    BARE,
    BIRDER,
    KEYS,
    MMCV,
    PAPER,
    POINTS,
    SIZES,
    agrees,
    arguments_for,
    build,
    by_heads,
    define,
    library,
    make_forward,
    operators,
    plain_core,
    results,
)

import mx_driving

POINT, BOX = (2, 2), (2, 4)  # the last sides of reference points: one for each level
ONE_POINT, ONE_BOX = (1, 2), (1, 4)  # one for all
WHOLE = "geometric_kernel_attention"
pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch")


class Fixed(libraries.Pillars):
    """UniAD of tt-forge: sizes are written into the constructor."""

    forward = make_forward(MMCV + "**kwargs")

    def __init__(self, embed_dims=16):
        super().__init__(16, 4, 2, 8)
        self.value_proj = torch.nn.Linear(embed_dims, embed_dims)


class WithoutMasks(libraries.Mmcv):
    """A compiler team's copy of mmcv's module: it takes a mask and does not read it."""

    forward = make_forward(MMCV + "flag='decoder', **kwargs", mask="None")


class BirderV2(libraries.RtDetrV2):
    """birder's RT-DETR v2: points by level alone, and a mask that is True where a key is hidden."""

    forward = make_forward(BIRDER.format("src_shapes, "), mask="None if input_padding_mask is None else ~input_padding_mask")

    def __init__(self, d_model, n_levels, n_heads, n_points):
        super().__init__(d_model, n_heads, n_levels, list(n_points))


# RF-DETR's for an exporter that cannot fold shapes: locations of at most five axes
HW = PAPER + ", input_level_start_index, input_padding_mask=None, input_spatial_shapes_hw=None"
Exported = define("Exported", libraries.RfDetr, HW, _export=True)
UNIFORM = [{"attention_mask": torch.full((2, KEYS), kept)} for kept in (True, False)]
BROADCAST = {"reference_points": torch.rand(1, 1, 1, 2).double()}  # for all batches and queries
UNREAD = {"key": torch.rand(3).double(), "attn_mask": None, "key_pos": 1}  # mmcv gives every attention the same keywords


def form(kind, *references, changes=(), layout=lambda rows: rows, **more):
    """A module, its reference points, other inputs, the layout of its value, and arguments of its constructor."""
    return kind, references, changes, layout, more


FORMS = [
    form(libraries.HuggingFace, POINT, BOX, changes=[*UNIFORM, BROADCAST]),
    form(libraries.Mask2Former, POINT, BOX),
    form(libraries.Libre, POINT, BOX),
    *(form(kind, POINT, BOX, batch_first=b) for kind in (libraries.Mmcv, libraries.GroundingDino) for b in (False, True)),
    form(WithoutMasks, POINT),
    form(libraries.Pillars, POINT, changes=[UNREAD]),
    form(Fixed, POINT),
    form(libraries.Temporal, POINT, BOX),
    form(libraries.Paper, POINT, BOX),
    form(libraries.LwDetr, POINT, ONE_BOX, changes=[{"input_spatial_shapes": SIZES}]),
    form(libraries.Birder, POINT, BOX),
    form(BirderV2, ONE_BOX, n_points=POINTS),
    *(form(kind, ONE_POINT, POINT, ONE_BOX, BOX) for kind in (libraries.RfDetr, Exported)),
    form(libraries.Ultralytics, ONE_POINT, ONE_BOX),
    *(form(kind, POINT, ONE_BOX, BOX) for kind in (libraries.RtDetr, libraries.Multiplies)),
    *(form(libraries.RtDetrV2, ONE_BOX, num_points=n, offset_scale=0.6) for n in (4, POINTS, [3, 1])),
    # levels that were split from one tensor are read where they lie
    *(form(libraries.DFine, ONE_BOX, layout=how, num_points=n) for how in (by_heads, libraries.as_copies) for n in (4, POINTS)),
    *(form(libraries.Gtr, ONE_BOX, layout=libraries.as_images, num_points=n) for n in (4, POINTS)),
]


@pytest.mark.parametrize(("kind", "references", "changes", "layout", "more"), FORMS)
def test_modules(kind, references, changes, layout, more):
    """With and without a mask. mmcv's may look at their own queries."""
    module = build(kind, **more)
    calls = [arguments_for(module, sides, masked, layout) for sides in references for masked in (True, False)]
    value = inspect.signature(kind.forward).parameters.get("value")
    if value is not None and value.default is None:
        calls.append({n: t for n, t in calls[0].items() if n not in ("value", "identity", "query_pos")})
    agrees(module, *calls, *({**arguments_for(module), **change} for change in changes))


def listed_core(value, shapes_list, sampling_locations, attention_weights):
    return plain_core(value, shapes_list, sampling_locations, attention_weights)


def optional_core(
    value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default",
    value_shape="default", allow_acceleration=True,
):  # fmt: skip
    value = by_heads(value.flatten(2)) if value_shape == "reshape" else value
    return libraries.by_level_core(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method)


def hinted_core(value, value_spatial_shapes, sampling_locations, attention_weights, spatial_shapes_ints=None):
    """VADv2 of tt-forge: the sizes as ints, for a compiler. The table must be a tensor."""
    assert value_spatial_shapes.size(0) == len(SIZES)
    sizes = value_spatial_shapes.tolist() if spatial_shapes_ints is None else spatial_shapes_ints
    return plain_core(value, sizes, sampling_locations, attention_weights)


def started_core(value, spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step=64):
    assert im2col_step > 0
    assert level_start_index[-1] > 0
    return plain_core(value, spatial_shapes, sampling_locations, attention_weights)


def geometry_kernel_attention_cpu(
    value, spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step=64
):  # fmt: skip
    """MapTR in plain torch: whole pixels, clamped to the map. Its compiled kernel cuts fractions, and so does the operator;
    the plain one rounds them."""
    bs, _, heads, _ = value.shape
    batch, head = torch.arange(bs).view(-1, 1, 1, 1), torch.arange(heads).view(1, 1, -1, 1)
    total = 0
    for l, (h, w) in enumerate(spatial_shapes.tolist()):
        x, y = sampling_locations[:, :, :, l].unbind(-1)
        x, y = (torch.round(at.double()).long().clamp(0, most - 1) for at, most in ((x, w), (y, h)))
        read = value[batch, level_start_index[l] + y * w + x, head]
        total = total + (read * attention_weights[:, :, :, l, :, None]).sum(3)
    return total.flatten(2)


def keys_last(value):
    return value.permute(0, 2, 3, 1).contiguous()


def levels(value):
    return libraries.as_copies(value.flatten(2))


def core_arguments(points, layout=torch.clone, shapes: object = SIZES):
    generator = torch.Generator().manual_seed(3)
    sides = (2, KEYS, 2, 8), (2, 7, 2, *points, 2), (2, 7, 2, *points)
    value, locations, weights = (torch.rand(s, generator=generator, dtype=torch.float64) for s in sides)
    return layout(value), shapes, locations, weights


TABLE = torch.tensor(SIZES)
SWAPPED = TABLE.flip(0)  # RF-DETR gives the shapes twice; the list is the one that an exporter can read
STARTED = {"level_start_index": torch.tensor([0, 20]), "im2col_step": 32}
PIXELS = core_arguments((2, 4))[2] * 9 - 2
COUNTED = {"num_points_list": POINTS}
# core, points, layout of value, shapes, further and other arguments, called operators
CORES = [
    (listed_core, (2, 4), torch.clone, SIZES, {}, [BARE]),
    (libraries.keys_last_core, (8,), keys_last, SWAPPED, {"value_spatial_shapes_hw": SIZES}, [BARE]),
    (libraries.by_level_core, (6,), levels, SIZES, COUNTED, [BARE]),
    (libraries.by_level_core, (6,), levels, SIZES, {**COUNTED, "method": "discrete"}, []),  # they clamp x by the height
    *((hinted_core, (2, 4), torch.clone, TABLE, ints, [BARE]) for ints in ({}, {"spatial_shapes_ints": SIZES})),
    (hinted_core, (2, 4), torch.clone, SWAPPED, {"spatial_shapes_ints": SIZES}, [BARE]),
    (optional_core, (6,), levels, SIZES, {**COUNTED, "value_shape": "default", "allow_acceleration": False}, [BARE]),
    (optional_core, (6,), torch.clone, SIZES, {**COUNTED, "value_shape": "reshape"}, []),
    (started_core, (2, 4), torch.clone, TABLE, STARTED, [BARE]),
    *(
        (geometry_kernel_attention_cpu, (2, 4), torch.clone, TABLE, {**STARTED, "sampling_locations": PIXELS.to(dtype)}, called)
        for dtype, called in ((torch.int64, [WHOLE]), (torch.int32, [WHOLE]), (torch.float64, []))
    ),
]


@pytest.mark.parametrize(("core", "points", "layout", "shapes", "more", "called"), CORES)
def test_cores(core, points, layout, shapes, more, called):
    """Arguments are given by name. A core answers itself what it was not tried with."""
    names = "value", [*inspect.signature(core).parameters][1], "sampling_locations", "attention_weights"
    arguments = {**dict(zip(names, core_arguments(points, layout, shapes), strict=True)), **more}
    expected = results(core, **arguments)
    with mx_driving.patched(library(core)) as done:
        assert done.replaced == (f"{core.__module__}.{core.__name__}",)
        assert operators(core, **arguments) == called
        torch.testing.assert_close(results(core, **arguments), expected, rtol=0, atol=1e-11)


def join(levels):
    return torch.cat(list(levels), -1).permute(0, 3, 1, 2)


# how a value lies in memory: from rows [bs, keys, heads, channels], and back for a number of heads
LAYOUTS = {
    "rows": (torch.clone, lambda value, heads: value),
    "keys last": (keys_last, lambda value, heads: value.permute(0, 3, 1, 2)),
    "levels": (levels, lambda value, heads: join(value)),
    "images": (
        lambda value: libraries.as_images(value.flatten(2)),
        lambda value, heads: join([level.flatten(2).unflatten(0, (-1, heads)) for level in value]),
    ),
}
AXES = {"split": (2, 4), "merged": (8,), "default": (6,), "discrete": (6,)}  # of the points, by what a core takes


def nearest(locations, sizes):
    """The centres of the nearest pixels of the maps."""
    sides = [torch.tensor([w, h]) for h, w in sizes]
    parts = zip(locations.split(POINTS, 3), sides, strict=True)
    return torch.cat([((at * s + 0.5).long().clamp(min=0).minimum(s - 1).to(locations) + 0.5) / s for at, s in parts], 3)


def make_core(layout, ways):
    """A core that takes locations of some axes, or points of each level by some methods."""

    def core(value, value_spatial_shapes, sampling_locations, attention_weights):
        assert ("split" if sampling_locations.dim() == 6 else "merged") in ways
        value = LAYOUTS[layout][1](value, sampling_locations.shape[2])
        run = plain_core if sampling_locations.dim() == 6 else libraries.merged_core
        return run(value, value_spatial_shapes, sampling_locations, attention_weights)

    def counted(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default"):
        assert method in ways
        value = keys_last(LAYOUTS[layout][1](value, sampling_locations.shape[2]))
        value = value.split([h * w for h, w in value_spatial_shapes], -1)
        at = nearest(sampling_locations, value_spatial_shapes) if method == "discrete" else sampling_locations
        return libraries.by_level_core(value, value_spatial_shapes, at, attention_weights, num_points_list)

    return counted if "default" in ways else core


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "ways", [("split",), ("merged",), ("split", "merged"), ("default",), ("default", "discrete")], ids=" ".join
)
def test_each_layout_of_a_value_in_each_way_to_give_locations(layout, ways):
    core = make_core(layout, ways)
    methods = [{"num_points_list": POINTS, "method": way} if "default" in ways else {} for way in ways]
    calls = [functools.partial(core, **more) for more in methods]
    inputs = [core_arguments(AXES[way], LAYOUTS[layout][0]) for way in ways]
    expected = [results(call, *arguments) for call, arguments in zip(calls, inputs, strict=True)]
    with mx_driving.patched(library(core)):
        for way, call, arguments, right in zip(ways, calls, inputs, expected, strict=True):
            assert operators(call, *arguments) == [WHOLE if way == "discrete" else BARE]
            torch.testing.assert_close(results(call, *arguments), right, rtol=0, atol=1e-11)


# module, constructor arguments, reference points, attributes and inputs that no operator has
REFUSED = [
    (libraries.RtDetr, {}, (2, 6), {}, lambda mask: mask),  # OTX's third kind of references
    (libraries.Multiplies, {}, BOX, {}, lambda mask: mask * 0.5),
    (libraries.DFine, {"method": "discrete"}, ONE_BOX, {}, None),
    (libraries.DFine, {}, ONE_BOX, {"_fused_offset_weight": True}, None),  # merged for deployment, as LibreYOLO's GTR
]


@pytest.mark.parametrize(("kind", "more", "references", "attributes", "change"), REFUSED)
def test_what_a_form_cannot_take_is_left_to_the_modules_own_code(kind, more, references, attributes, change):
    module = build(kind, **more)
    vars(module).update(attributes)
    arguments = arguments_for(module, references) if change else arguments_for(module, references, layout=by_heads)
    arguments |= {"value_mask": change(arguments["value_mask"])} if change else {}
    expected = module(**arguments)
    with mx_driving.patched(library(kind)):
        assert operators(module, **arguments) == []
        assert torch.equal(module(**arguments), expected)


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
        places = reference_trajs[:, :, :, [self.sample_index]].detach()
        places = self.agent_coords_to_ego_coords(places, bbox_results).flatten(1, 2)
        low, high = torch.tensor(self.bev_range[:2]), torch.tensor(self.bev_range[3:5])
        places = ((places - low) / (high - low))[:, :, None, :, :, None]  # [bs, queries, 1, 1, levels, 1, 2]
        locations = (places + steps / spatial_shapes.flip(-1)[:, None]).transpose(2, 3).flatten(1, 2)
        value = self.rows(value.permute(1, 0, 2), key_padding_mask)
        out = plain_core(value, spatial_shapes, locations, weights.transpose(2, 3).flatten(1, 2))
        out = self.output_proj(out.reshape(batches, agents * modes, -1)).view(query.shape)
        return self.dropout(out) + identity


def test_samples_along_trajectories():
    rand = functools.partial(torch.rand, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    boxes = [(types.SimpleNamespace(gravity_center=20 * rand(3, 3)), None) for _ in range(2)]
    arguments = {"query": rand(2, 3, 2, 16), "value": rand(KEYS, 2, 16), "query_pos": rand(2, 3, 2, 16)}
    arguments |= {"spatial_shapes": TABLE, "level_start_index": torch.tensor([0, 20])}
    arguments |= {"bbox_results": boxes, "reference_trajs": 10 * rand(2, 3, 2, 2, 2, 2) - 5}
    module = build(Motion, num_steps=5, sample_index=0)
    agrees(module, arguments, {**arguments, "key_padding_mask": rand(2, KEYS) < 0.3})
