"""patch: an argument that no form knows is never dropped. The code of the module, core or pool answers such a call."""

from __future__ import annotations

import functools
import inspect

import attention_modules as libraries
import pytest
import torch
from attention_modules import (
    BARE,
    MMCV,
    PAPER,
    WITH_LOGITS,
    arguments_for,
    build,
    close,
    define,
    library,
    make_forward,
    operators,
    patched,
    plain_core,
)
from test_patching_forms import core_arguments
from test_patching_pools import rows

import mx_driving

pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch left")


class Scaled(libraries.Pillars):
    """BEVFormer's attention in the cameras; `scale` weighs the queries, as a depth does in FB-BEV."""

    def attend(self, *args, scale=None, **named):
        out = super().attend(*args, **named)
        return out if scale is None else out * scale


def scaled(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        scale = kwargs.pop("depth", 1)
        return forward(*args, **kwargs) * scale

    return wrapper


def casting(forward):
    """mmcv's auto_fp16: it passes on the arguments that the function below it has."""

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        names = inspect.getfullargspec(forward).args
        return forward(*(arg for _, arg in zip(names, args, strict=False)), **kwargs)

    return wrapper


def further(name, more, scale, decorate=lambda forward: forward):
    """A module of BEVFormer's with a parameter more."""
    return type(name, (Scaled,), {"forward": decorate(make_forward(MMCV + more, scale=scale)), "__module__": __name__})


Named = further("Named", "depth=None", "depth")  # FB-BEV: a tensor more, left out by default
NamedOnly = further("NamedOnly", "*, depth=None", "depth")
ByName = further("ByName", "depth=None", "locals()['depth']")
Keywords = further("Keywords", "**kwargs", "kwargs.get('depth')")
Places = further("Places", "*depth", "(*depth, None)[0]")
InAnInnerFunction = further("InAnInnerFunction", "**kwargs", "(lambda: kwargs.get('scale'))()")
Decorated = further("Decorated", "**kwargs", "None", scaled)
Casting = further("Casting", "*, unused=None, **kwargs", "None", casting)


class TwoMasks(libraries.Paper):
    forward = make_forward(
        PAPER + ", input_level_start_index, input_padding_mask=None, attention_mask=None",
        mask="input_padding_mask if attention_mask is None else attention_mask",
    )


NAMES = [*inspect.signature(Named.forward).parameters][1:-1]
DEPTH = torch.linspace(0.1, 3, libraries.KEYS, dtype=torch.float64)[:, None]
READ = "depth, which its code reads"
# module, why patch leaves it alone, the further argument by name or by place
FURTHER = [
    *((kind, READ, more) for kind in (Named, ByName) for more in ({"depth": DEPTH}, {})),
    (NamedOnly, READ, {"depth": DEPTH}),
    (TwoMasks, "two parameters of one meaning", {"attention_mask": torch.arange(2 * libraries.KEYS).view(2, -1) % 3 == 0}),
    *((kind, "", {"depth": DEPTH}) for kind in (Keywords, Decorated)),
    (InAnInnerFunction, "", {"scale": DEPTH}),
    (Places, "", {}),
]


@pytest.mark.parametrize(("kind", "reason", "by_name"), FURTHER)
def test_a_further_argument_of_a_module_counts(kind, reason, by_name):
    """Without it the module calls the operator, unless patch leaves it alone. A decorator goes on to wrap the new code."""
    module = build(kind)
    plain = arguments_for(module)
    args = () if by_name else (*map(plain.get, NAMES), DEPTH)
    named = {**plain, **by_name} if by_name else {}
    usual, expected = module(**plain), module(*args, **named)
    assert (expected - usual).abs().max() > 0.1
    with patched(kind) as done:
        assert reason in done.skipped.get(f"{__name__}.{kind.__name__}", "")
        assert operators(module, **plain) == [BARE if reason else WITH_LOGITS]
        close([module(**plain), module(*args, **named)], [usual, expected])


def test_a_decorator_may_ask_replaced_code_for_its_parameters():
    module = build(Casting)
    by_name = arguments_for(module)
    by_place = [by_name.pop(name, None) for name in NAMES]
    expected = module(*by_place)
    with patched(Casting):
        assert operators(module, *by_place) == [WITH_LOGITS]
        close(module(*by_place), expected)


def test_mmcvs_former_name_of_identity_goes_to_its_own_code():
    module = build(libraries.Mmcv)
    arguments = arguments_for(module)
    arguments["residual"] = arguments.pop("identity")
    libraries.agrees(module, arguments, operator=BARE)


@pytest.mark.parametrize(
    ("change", "words"),
    [({"spatial_shape": 1}, "spatial_shape"), ({"query": None}, "multiple values"), ({}, "required positional argument")],
)
def test_a_call_that_a_module_refuses_is_refused_by_the_module(change, words):
    module = build(libraries.LwDetr)
    arguments = arguments_for(module, masked=False)
    query = arguments.pop("query")
    with patched(libraries.LwDetr), pytest.raises(TypeError, match=words):
        module(*((query,) if change else ()), **{**arguments, **change})


class BoxesRefused(libraries.Paper):
    """A copy that knows points alone."""

    forward = make_forward(PAPER + ", input_level_start_index")

    def attend(self, reference, **named):
        assert reference.shape[-1] == 2, "points alone"
        return super().attend(reference=reference, **named)


def test_references_that_a_module_refuses_are_left_to_it():
    module = build(BoxesRefused)
    with patched(BoxesRefused):
        assert operators(module, **arguments_for(module, masked=False)) == [WITH_LOGITS]
        with pytest.raises(AssertionError, match="points alone"):
            module(**arguments_for(module, (2, 4), masked=False))


def test_classes_that_share_a_forward_are_both_served():
    shared = {"forward": make_forward(libraries.RT_DETR), "__module__": __name__}
    kinds = [type(name, (libraries.RtDetr,), shared) for name in ("First", "Second")]
    modules = [build(kind) for kind in kinds]
    inputs = arguments_for(modules[0])
    expected = [module(**inputs) for module in modules]
    for order in (kinds, kinds[::-1], kinds[:1]):
        with mx_driving.patched(library(*order)), mx_driving.patched(library(*kinds)) as done:
            assert set(done.replaced) == {f"{__name__}.{kind.__name__}" for kind in kinds}
            assert [operators(module, **inputs) for module in modules] == [[WITH_LOGITS]] * 2
            close([module(**inputs) for module in modules], expected)
    assert [operators(module, **inputs) for module in modules] == [[], []]


def int_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    sizes = [(int(h), int(w)) for h, w in value_spatial_shapes]
    return plain_core(value, sizes, sampling_locations, attention_weights)


# VADv2 of tt-forge: its core reads the table by `int`.
BY_INT = "query, value, reference_points, spatial_shapes, level_start_index"
ReadsByInt = define("ReadsByInt", libraries.Pillars, BY_INT, core=staticmethod(int_core))
CORE = core_arguments((2, 4))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8, torch.float32, torch.float64])
def test_a_table_that_is_read_by_int_may_have_any_numbers(dtype):
    module, table = build(ReadsByInt), torch.tensor(libraries.SIZES).to(dtype)
    arguments = arguments_for(module) | {"spatial_shapes": table}
    core = functools.partial(int_core, CORE[0], table, *CORE[2:])
    expected = core(), module(**arguments)
    with mx_driving.patched(library(ReadsByInt, int_core)):
        assert operators(core) == [BARE]
        assert operators(module, **arguments) == [WITH_LOGITS if dtype == torch.int32 else BARE]
        close((core(), module(**arguments)), expected)


SOURCES = {
    "core": """
def core(value, value_spatial_shapes, sampling_locations, attention_weights{more}):
    return plain_core(value, value_spatial_shapes, sampling_locations, attention_weights) * {scale}
""",
    "bev_pool": """
def bev_pool(feats, coords, B, D, H, W{more}):
    h, w, d, b = coords.long().unbind(1)
    feats = feats * {scale}
    return feats.new_zeros(B, D, H, W, feats.shape[1]).index_put((b, d, h, w), feats, accumulate=True).permute(0, 4, 1, 2, 3)
""",
}
FACTORS = [
    (", scale=1", "scale", True),
    (", scale=1", "scale", False),
    (", *, scale=1", "scale", True),
    (", *scale", "(scale[0] if scale else 1)", False),
    (", **scale", "(lambda scale=1: scale)(**scale)", True),
]


@pytest.mark.parametrize(("name", "arguments", "queries"), [("core", CORE, 7), ("bev_pool", rows(), 60)])
@pytest.mark.parametrize(("more", "scale", "by_name"), FACTORS)
def test_a_further_argument_of_a_core_or_a_pool_counts(name, arguments, queries, more, scale, by_name):
    module = library(plain_core, int_core, source=SOURCES[name].format(more=more, scale=scale))
    function, factor = getattr(module, name), torch.rand(queries, 1, dtype=arguments[0].dtype)
    call = functools.partial(function, *arguments, scale=factor) if by_name else functools.partial(function, *arguments, factor)
    expected = call()
    with mx_driving.patched(module) as done:
        torch.testing.assert_close(call(), expected)
        refused = name == "bev_pool" or "*scale" not in more
        assert ("no known form of a core" in done.skipped.get(f"a_library.{name}", "")) == refused
        assert len(operators(function, *arguments)) == (name == "core")
        with pytest.raises(TypeError):
            function(*arguments, no_such_argument=scale)


ATTENTION = "value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step"
EXTENSIONS = [
    ("MSDeformAttnFunction", ATTENTION),
    ("DeformableAggregationFunction", "mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights"),
    ("VoxelPooling", "geom_xyz, input_features, voxel_num"),
]


@pytest.mark.parametrize(("name", "parameters"), EXTENSIONS)
def test_an_autograd_function_of_more_arguments_is_left_alone_and_named(name, parameters):
    forward = f"    @staticmethod\n    def forward(ctx, {parameters}, *more):\n        return more[0]"
    module = library(source=f"class {name}(torch.autograd.Function):\n{forward}")
    with pytest.raises(ValueError, match=rf"a_library\.{name}: no known form of a core has the parameters \(.*\*more\)"):
        mx_driving.patch(module)


def test_a_decorated_core_is_replaced_below_its_decorator():
    decorated = torch.no_grad()(int_core)
    with mx_driving.patched(library(decorated)) as done:
        assert done.replaced == (f"{__name__}.int_core",)
        assert len(operators(decorated, *CORE)) == 1
        assert not decorated(CORE[0].clone().requires_grad_(), *CORE[1:]).requires_grad
