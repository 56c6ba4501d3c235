"""patch: each form of attention modules and cores beside its own code in float64, and the calls that a form does not serve."""

import functools
import inspect
import types

import attention_modules as lib
import pytest
import torch
from attention_modules import BARE, KEYS, MMCV, SIZES, WITH_LOGITS, arguments_for, build, close, library, operators, patched
from values import Through

import mx_driving
from mx_driving._patch._patch import survey
from mx_driving._patch._trial import FORMS

POINT, BOX = (2, 2), (2, 4)  # the last sides of reference points: one for each level
ONE_POINT, ONE_BOX = (1, 2), (1, 4)  # one for all
WHOLE = "geometric_kernel_attention"
TABLE = torch.tensor(SIZES)
pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch")


class Fixed(lib.Pillars):
    """UniAD of tt-forge: sizes are written into the constructor."""

    def __init__(self, embed_dims=16):
        super().__init__(16, 4, 2, 8)
        self.value_proj = torch.nn.Linear(embed_dims, embed_dims)


WithoutMasks = lib.define("WithoutMasks", lib.Dropping, MMCV + "flag='decoder', **kwargs", "mmcv", mask="None")
UNIFORM = [{"attention_mask": torch.full((2, KEYS), kept)} for kept in (True, False)]
BROADCAST = {"reference_points": torch.rand(1, 1, 1, 2).double()}  # for all batches and queries
UNREAD = {"key": torch.rand(3).double(), "attn_mask": None, "key_pos": 1}  # mmcv gives every attention the same keywords


def case(kind, *references, changes=(), layout=lambda memory: memory, **more):
    """A module, its reference points, other inputs, the layout of its value, and arguments of its constructor."""
    return kind, references, changes, layout, more


MODULES = [
    case(lib.HuggingFace, POINT, BOX, changes=[*UNIFORM, BROADCAST]),
    case(lib.Mask2Former, POINT, BOX),
    case(lib.Libre, POINT, BOX),
    *(case(kind, POINT, BOX, batch_first=b) for kind in (lib.Mmcv, lib.GroundingDino) for b in (False, True)),
    case(WithoutMasks, POINT),
    case(lib.Pillars, POINT, changes=[UNREAD]),
    case(Fixed, POINT),
    case(lib.Temporal, POINT, BOX),
    case(lib.Paper, POINT, BOX),
    case(lib.LwDetr, POINT, ONE_BOX, changes=[{"input_spatial_shapes": SIZES}]),
    case(lib.Birder, POINT, BOX),
    case(lib.BirderV2, ONE_BOX, n_points=lib.POINTS),
    case(lib.RfDetr, ONE_POINT, POINT, ONE_BOX, BOX),
    case(lib.Ultralytics, ONE_POINT, ONE_BOX),
    *(case(kind, POINT, ONE_BOX, BOX) for kind in (lib.RtDetr, lib.Multiplies)),
    *(case(lib.RtDetrV2, ONE_BOX, num_points=n, offset_scale=0.6) for n in (4, lib.POINTS, [3, 1])),
    *(case(kind, ONE_BOX) for kind in (lib.ConfiguredV2, lib.ConfiguredDFine)),
    # levels that were split from one tensor are read where they lie
    *(case(lib.DFine, ONE_BOX, layout=how, num_points=n) for how in (lib.by_heads, lib.as_copies) for n in (4, lib.POINTS)),
    *(case(lib.Gtr, ONE_BOX, layout=lib.as_images, num_points=n) for n in (4, lib.POINTS)),
]


@pytest.mark.parametrize(("kind", "references", "changes", "layout", "more"), MODULES)
def test_modules(kind, references, changes, layout, more):
    """With and without a mask. mmcv's may look at their own queries."""
    module = build(kind, **more)
    calls = [arguments_for(module, sides, masked, layout) for sides in references for masked in (True, False)]
    value = inspect.signature(kind.forward).parameters.get("value")
    if value is not None and value.default is None:
        calls.append({n: t for n, t in calls[0].items() if n not in ("value", "identity", "query_pos")})
    lib.agrees(module, *calls, *({**arguments_for(module), **change} for change in changes))


def test_samples_along_trajectories():
    rand = functools.partial(torch.rand, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    boxes = [(types.SimpleNamespace(gravity_center=20 * rand(3, 3)), None) for _ in range(2)]
    arguments = {"query": rand(2, 3, 2, 16), "value": rand(KEYS, 2, 16), "query_pos": rand(2, 3, 2, 16)}
    arguments |= {"spatial_shapes": TABLE, "level_start_index": torch.tensor([0, 20])}
    arguments |= {"bbox_results": boxes, "reference_trajs": 10 * rand(2, 3, 2, 2, 2, 2) - 5}
    module = build(lib.Motion, num_steps=5, sample_index=0)
    lib.agrees(module, arguments, {**arguments, "key_padding_mask": rand(2, KEYS) < 0.3})


def test_each_form_of_a_module_has_a_case():
    forms = {name for name, form in FORMS.items() if form.kind == "module" and name != "layer"}
    assert forms == {kind.form for kind, *_ in MODULES} | {lib.Motion.form}


class Sampler(torch.nn.Module):
    def forward(self, value, value_spatial_shapes, sampling_locations, attention_weights):
        return lib.plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)


class Holds(lib.Paper):
    """D-FINE's layers hold a partial core."""

    times = 1

    def __init__(self, d_model=256, n_levels=4, n_heads=8, n_points=4):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.held = functools.partial(lib.plain_core)

    def core(self, value, shapes, locations, weights):
        return self.held(value, shapes, locations, weights) * self.times


class HoldsLayer(Holds):
    """transformers' hold a layer."""

    def __init__(self, d_model=256, n_levels=4, n_heads=8, n_points=4):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.held = Sampler()


class Evenly(lib.Paper):
    """It scales offsets by an attribute that other forms know."""

    offset_scale = 1.0

    def samples(self, reference, shapes, offsets, logits):
        return lib.sample(self.sides(), reference, shapes, offsets * self.offset_scale, logits)


class ByInt(lib.Pillars):
    """VADv2 of tt-forge: its core reads the table by `int`."""

    takes = "query, value, reference_points, spatial_shapes, level_start_index"

    def core(self, value, shapes, locations, weights):
        return lib.plain_core(value, [(int(h), int(w)) for h, w in shapes], locations, weights)


class PointsAlone(lib.Paper):
    def samples(self, reference, shapes, offsets, logits):
        if reference.shape[-1] != 2:
            raise KeyError("points alone")
        return lib.sample(self.sides(), reference, shapes, offsets, logits)


def doubled(*arguments):
    return 2 * lib.plain_core(*arguments)


def nothing(module):
    pass


def set_to(name, value):
    return lambda module: setattr(module, name, value)


def further(name, more, depth):
    """BEVFormer's module with one more parameter, which multiplies its reference."""
    scaled = f"reference_points * (1 if {depth} is None else {depth})"
    return lib.define(name, lib.Pillars, MMCV + more, lib.Pillars.form, reference=scaled)


def decorate(forward):
    @functools.wraps(forward)
    def wrapper(*args, depth=1, **kwargs):
        return forward(*args, **kwargs) * depth

    return wrapper


FURTHER = [
    further("Named", "depth=None", "depth"),  # FB-BEV: a tensor more, left out by default
    further("NamedOnly", "*, depth=None", "depth"),
    further("ByName", "depth=None", "locals()['depth']"),
    further("Keywords", "**kwargs", "kwargs.get('depth')"),
    further("InAnInnerFunction", "**kwargs", "(lambda: kwargs.get('depth'))()"),
]
Decorated = type("Decorated", (lib.Pillars,), {"forward": decorate(lib.make_forward(MMCV + "**kwargs"))})
HIDDEN = "None if export else input_padding_mask"
Exports = lib.define("Exports", lib.Paper, lib.PAPERS + ", export=False", "deformable_detr", mask=HIDDEN)
Former = lib.define("Former", lib.Dropping, MMCV + "**kwargs", "mmcv", identity="kwargs.get('residual', identity)")
DEPTH = torch.linspace(0.1, 3, KEYS, dtype=torch.float64)[:, None]
SHARES = DEPTH[:, 0].expand(2, -1)
HALVES = torch.rand(2, KEYS, 2, 6, dtype=torch.float64)
# Calls that a form does not serve: a module, a change of the layer, changed arguments of the call.
LEFT = {
    "a flag": (lib.Paper, set_to("keeps", True), {}),
    "forward": (lib.Paper, lambda m: set_to("forward", lambda **k: 2 * lib.Paper.forward(m, **k))(m), {}),
    "rows": (lib.Paper, lambda m: set_to("rows", lambda *a: 2 * lib.Paper.rows(m, *a))(m), {}),
    "dropout": (lib.Paper, set_to("dropout", torch.nn.Identity()), {}),
    "offset_scale": (Evenly, set_to("offset_scale", 0.5), {}),
    "a number": (Holds, set_to("times", 2), {}),
    "a function": (Holds, set_to("held", doubled), {}),
    "a partial function": (Holds, set_to("held", functools.partial(doubled)), {}),
    "another layer": (HoldsLayer, set_to("held", Through(doubled)), {}),
    "a hook of the core": (HoldsLayer, lambda m: m.held.register_forward_hook(lambda *a: 2 * a[2]), {}),
    "forward of the core": (HoldsLayer, lambda m: set_to("forward", doubled)(m.held), {}),
    "a mask that multiplies": (lib.Multiplies, nothing, {"value_mask": SHARES}),
    "a float table": (ByInt, nothing, {"spatial_shapes": TABLE.double()}),
    "a third kind of reference": (lib.RtDetr, nothing, {"reference_points": HALVES}),
    "an option": (Exports, nothing, {"export": True}),
    "a former name": (Former, nothing, {"residual": torch.ones(2, 1, dtype=torch.float64)}),
    **{f"a parameter more, {kind.__name__}": (kind, nothing, {"depth": DEPTH[..., None]}) for kind in FURTHER},
    "a parameter of a decorator": (Decorated, nothing, {"depth": DEPTH}),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_a_form_does_not_serve_runs_the_own_code(name):
    """Without the change a layer of the class calls the operator. A forward of an instance, or a decorator, may call it."""
    (kind, change, more), plain = LEFT[name], build(LEFT[name][0])
    changed = build(kind)
    arguments = arguments_for(plain)
    change(changed)
    expected = lib.results(changed, **{**arguments, **more})
    with patched(kind, Sampler):
        assert operators(plain, **arguments) == [WITH_LOGITS]
        called = WITH_LOGITS if kind is Decorated or name == "forward" else BARE
        assert operators(changed, **{**arguments, **more}) == [called]
        close(lib.results(changed, **{**arguments, **more}), expected)


@pytest.mark.parametrize("more", [{"method": "discrete"}, {"_fused_offset_weight": True}])
def test_d_fine_that_samples_otherwise_runs_its_own_code(more):
    """Its layers may also be merged for deployment, as in LibreYOLO's GTR."""
    module = build(lib.DFine, num_points=lib.POINTS)
    vars(module).update(more)
    arguments = arguments_for(module, ONE_BOX, layout=lib.by_heads)
    expected = module(**arguments)
    with patched(lib.DFine):
        assert operators(module, **arguments) == []
        assert torch.equal(module(**arguments), expected)


def test_a_reference_that_a_module_refuses_is_left_to_it():
    module = build(PointsAlone)
    with patched(PointsAlone):
        assert operators(module, **arguments_for(module)) == [WITH_LOGITS]
        with pytest.raises(KeyError, match="points alone"):
            module(**arguments_for(module, BOX))


# A layout of value -> the function that makes it of [bs, keys, heads, channels], and the code that reads it.
VALUES = {
    "rows": (torch.clone, "value"),
    "keys_last": (lambda value: value.permute(0, 2, 3, 1).contiguous(), "value.permute(0, 3, 1, 2)"),
    "by_level": (lambda value: lib.as_copies(value.flatten(2)), "join(value)"),
    "images": (
        lambda value: lib.as_images(value.flatten(2)),
        "join([v.flatten(2).unflatten(0, (-1, sampling_locations.shape[2])) for v in value])",
    ),
}
CORE = "def core(value, value_spatial_shapes, sampling_locations, attention_weights{}):\n    return {}\n"
REST = "value_spatial_shapes, sampling_locations, attention_weights"
COUNTED, COUNTS = "{}.split([h * w for h, w in value_spatial_shapes], -1)", {"num_points_list": lib.POINTS}
BILINEAR = f"by_level_core({COUNTED}, {REST}, num_points_list"
METHOD = ", num_points_list, method='default'"
# The end of a form's name -> further parameters of a core, its code, and the points and further arguments of calls.
BOTH = f"plain_core({{0}}, {REST}) if sampling_locations.dim() == 6 else merged_core({{0}}, {REST})"
DISCRETE = COUNTS | {"method": "discrete"}
SAMPLED = {
    "": ("", BOTH, [((2, 4), {}), ((8,), {})]),
    "_split": ("", f"plain_core({{}}, {REST})", [((2, 4), {})]),
    "_merged": ("", f"merged_core({{}}, {REST})", [((8,), {})]),
    "_uneven_bilinear": (METHOD, f"{BILINEAR}, method)", [((6,), COUNTS)]),
    "_uneven": (METHOD, f"{BILINEAR}, 'right' if method == 'discrete' else method)", [((6,), COUNTS), ((6,), DISCRETE)]),
}


def join(levels):
    return torch.cat(list(levels), -1).permute(0, 3, 1, 2)


@pytest.mark.parametrize("way", SAMPLED)
@pytest.mark.parametrize("name", VALUES)
def test_each_layout_of_a_value_in_each_way_to_give_locations(name, way):
    """`survey` tries unknown cores, and names their form."""
    (layout, read), (more, code, calls) = VALUES[name], SAMPLED[way]
    read = f"({read}).permute(0, 2, 3, 1).contiguous()" if "uneven" in way else read
    things = lib.plain_core, lib.merged_core, lib.by_level_core, join
    module = library(*things, source=CORE.format(more, code.replace("{0}", "{}").replace("{}", read)))
    calls = [(lib.core_arguments(points, layout), named) for points, named in calls]
    expected = [lib.results(module.core, *arguments, **named) for arguments, named in calls]
    (findings, unread) = survey(module)
    assert [finding.form for finding in findings if finding.name == "a_library.core"] == [name + way]
    assert unread == {}
    with mx_driving.patched(module, forms={module.core: "core"}):
        for (arguments, named), right in zip(calls, expected, strict=True):
            assert operators(module.core, *arguments, **named) == [WHOLE if "method" in named else BARE]
            close(lib.results(module.core, *arguments, **named), right)


def geometry_kernel_attention_cpu(
    value, spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step=64
):  # fmt: skip
    """MapTR in plain torch: whole pixels, clamped to the map. This code rounds fractions; MapTR's compiled kernel and the
    operator truncate them."""
    bs, _, heads, _ = value.shape
    batch, head = torch.arange(bs).view(-1, 1, 1, 1), torch.arange(heads).view(1, 1, -1, 1)
    total = 0
    for l, (h, w) in enumerate(spatial_shapes.tolist()):
        x, y = sampling_locations[:, :, :, l].unbind(-1)
        x, y = (torch.round(at.double()).long().clamp(0, most - 1) for at, most in ((x, w), (y, h)))
        read = value[batch, level_start_index[l] + y * w + x, head]
        total = total + (read * attention_weights[:, :, :, l, :, None]).sum(3)
    return total.flatten(2)


def started_core(value, spatial_shapes, level_start_index, sampling_locations, attention_weights, im2col_step=64):
    return lib.plain_core(value, spatial_shapes, sampling_locations, attention_weights)


def optional_core(
    value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method="default",
    value_shape="default", fast=True, scale=1,
):  # fmt: skip
    value = lib.by_heads(value.flatten(2)) if value_shape == "reshape" else value
    value = value if fast else list(value)
    out = lib.by_level_core(value, value_spatial_shapes, sampling_locations, attention_weights, num_points_list, method)
    return out * scale


def hinted_core(value, value_spatial_shapes, sampling_locations, attention_weights, *, spatial_shapes_ints=None):
    """VADv2 of tt-forge: the sizes as ints, for a compiler."""
    sizes = value_spatial_shapes if spatial_shapes_ints is None else spatial_shapes_ints
    return lib.plain_core(value, sizes, sampling_locations, attention_weights)


STARTED = {"level_start_index": torch.tensor([0, 20]), "im2col_step": 32}
PIXELS = [
    {**STARTED, "sampling_locations": (lib.core_arguments((2, 4))[2] * 9 - 2).to(d)}
    for d in (torch.int64, torch.int32, torch.float64)
]
LEVELS, SWAPPED = VALUES["by_level"][0], TABLE.flip(0)
# Core, points, layout of value, shapes, other arguments, called operators.
CORES = [
    (optional_core, (6,), LEVELS, SIZES, {**COUNTS, "value_shape": "default", "fast": False}, [BARE]),
    (optional_core, (6,), LEVELS, SIZES, {**COUNTS, "scale": 2}, []),
    (optional_core, (6,), torch.clone, SIZES, {**COUNTS, "value_shape": "reshape"}, []),
    (optional_core, (6,), LEVELS, SIZES, {**COUNTS, "method": "discrete"}, []),  # they clamp x by the height
    *((hinted_core, (2, 4), torch.clone, TABLE, ints, [BARE]) for ints in ({}, {"spatial_shapes_ints": SIZES})),
    (hinted_core, (2, 4), torch.clone, SWAPPED, {"spatial_shapes_ints": SIZES}, [BARE]),
    *((started_core, (2, 4), torch.clone, TABLE, STARTED | {"level_start_index": starts}, [BARE])
      for starts in (torch.tensor([0, 20]), torch.zeros(2, dtype=torch.int64))),
    *((geometry_kernel_attention_cpu, (2, 4), torch.clone, TABLE, more, called)
      for more, called in zip(PIXELS, ([WHOLE], [WHOLE], []), strict=True)),
]  # fmt: skip


@pytest.mark.parametrize(("core", "points", "layout", "shapes", "more", "called"), CORES)
def test_cores(core, points, layout, shapes, more, called):
    """Arguments are passed by name. A core in plain torch takes its levels one after the other, and ignores their starts."""
    names = "value", [*inspect.signature(core).parameters][1], "sampling_locations", "attention_weights"
    arguments = {**dict(zip(names, lib.core_arguments(points, layout, shapes), strict=True)), **more}
    expected = lib.results(core, **arguments)
    with mx_driving.patched(library(core), forms={core: "core"}) as done:
        assert done.replaced == (f"{core.__module__}.{core.__name__}",)
        assert operators(core, **arguments) == called
        close(lib.results(core, **arguments), expected)
