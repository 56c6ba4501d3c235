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
    RT_DETR,
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


def answers(kind, module, arguments, called=WITH_LOGITS, things=()):
    """The patched module has its own output, by these operators."""
    expected = module(**arguments)
    with mx_driving.patched(library(kind, *(things or (plain_core,)))) as done:
        assert operators(module, **arguments) == ([called] if called else [])
        close(module(**arguments), expected)
    return done


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


class TwoMasks(libraries.Paper):
    forward = make_forward(
        PAPER + ", input_level_start_index, input_padding_mask=None, attention_mask=None",
        mask="input_padding_mask if attention_mask is None else attention_mask",
    )


def arguments_of(module):
    """The arguments that each of these modules has, in their order."""
    return {"key": None, **arguments_for(module), "level_start_index": torch.tensor([0, 20])}


CORE = core_arguments((2, 4), torch.clone, libraries.SIZES)
DEPTH = torch.linspace(0.1, 3, libraries.KEYS, dtype=torch.float64)[:, None]


@pytest.mark.parametrize("kind", [Named, NamedOnly, ByName, TwoMasks])
def test_a_module_that_reads_a_parameter_of_no_known_form_is_left_alone_and_named(kind):
    with pytest.warns(UserWarning, match=f"left .*{kind.__name__} alone"):
        done = mx_driving.patch(library(kind, plain_core))
    done.restore()
    (reason,) = done.skipped.values()
    assert "two parameters of one meaning" in reason if kind is TwoMasks else "depth, which its code reads" in reason


BY_PLACE = (
    *("query", "key", "value", "identity", "query_pos", "key_padding_mask", "reference_points"),
    *("spatial_shapes", "level_start_index"),
)
FURTHER = [
    *((kind, {"depth": DEPTH}) for kind in (Named, NamedOnly, Keywords, ByName, Decorated)),
    (InAnInnerFunction, {"scale": DEPTH}),
    *((kind, {}) for kind in (Named, Places, ByName)),  # by place
]


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize(("kind", "by_name"), FURTHER)
def test_a_further_argument_of_a_module_counts(kind, by_name):
    module = build(kind)
    plain = arguments_of(module)
    args = () if by_name else (*(plain[n] for n in BY_PLACE), DEPTH)
    named = {**plain, **by_name} if by_name else {}
    expected = module(*args, **named)
    assert (expected - module(**plain)).abs().max() > 0.1
    with patched(kind):
        close(module(*args, **named), expected)


@pytest.mark.parametrize(
    ("kind", "more"),
    [*((kind, {}) for kind in (Keywords, Places, InAnInnerFunction, Decorated)), (Decorated, {"depth": DEPTH})],
)
def test_without_the_further_argument_the_module_calls_the_operator(kind, more):
    """A decorator goes on to wrap the new code."""
    module = build(kind)
    answers(kind, module, {**arguments_of(module), **more})


def casting(forward):
    """mmcv's auto_fp16: it passes on the arguments that the function below it has."""

    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        names = inspect.getfullargspec(forward).args
        return forward(*(arg for _, arg in zip(names, args, strict=False)), **kwargs)

    return wrapper


Casting = further("Casting", "*, unused=None, **kwargs", "None", casting)


def test_a_decorator_may_ask_replaced_code_for_its_parameters():
    module, by_name = build(Casting), arguments_of(build(Casting))
    by_place = [by_name.pop(name) for name in BY_PLACE]
    expected = module(*by_place, **by_name)
    with patched(Casting):
        assert operators(module, *by_place, **by_name) == [WITH_LOGITS]
        close(module(*by_place, **by_name), expected)


def test_keywords_that_a_module_never_reads_change_nothing():
    """Layers of mmcv give every attention the same keywords."""
    module = build(libraries.Pillars)
    answers(libraries.Pillars, module, {**arguments_for(module), "key": DEPTH, "attn_mask": None, "key_pos": DEPTH})


@pytest.mark.parametrize(
    ("change", "words"),
    [({"spatial_shape": 1}, "spatial_shape"), ({"query": None}, "multiple values"), ({}, "required positional argument")],
)
def test_a_call_that_a_module_refuses_is_refused_by_the_module(change, words):
    module = build(libraries.LwDetr)
    arguments = arguments_for(module, masked=False)
    query = arguments.pop("query")
    args = (query,) if change else ()
    with patched(libraries.LwDetr), pytest.raises(TypeError, match=words):
        module(*args, **{**arguments, **change})


class DFineWithAMask(libraries.DFine):
    """It is tried without a mask, since D-FINE's own does not fit its values."""

    forward = make_forward(RT_DETR)

    def rows(self, value, mask=None):
        kept = [1, 1] if mask is None else [part[:, None, None] for part in mask.split([20, 6], 1)]
        return [level * part for level, part in zip(value, kept, strict=True)]


def test_a_mask_that_a_form_was_tried_without_counts():
    module = build(DFineWithAMask)
    arguments = arguments_for(module, (1, 4), layout=libraries.by_heads)
    expected = module(**arguments)
    assert (expected - module(**{**arguments, "value_mask": None})).abs().max() > 0.01
    with patched(DFineWithAMask):
        close(module(**arguments), expected)


Base = define("Base", libraries.RtDetr, RT_DETR)


class Derived(Base):
    def rows(self, value, mask=None):
        return 2 * super().rows(value, mask)


class DerivedConstructor(Base):
    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4):
        super().__init__(embed_dims, num_heads, num_levels, num_points)


@pytest.mark.parametrize(("kind", "called"), [(Derived, ""), (DerivedConstructor, WITH_LOGITS)])
def test_a_derived_class_that_changes_what_forward_calls_keeps_its_code(kind, called):
    module = build(kind)
    answers(Base, module, arguments_for(module), called, (Base,))


def test_classes_that_share_a_forward_are_both_served():
    kinds = [type(name, (libraries.RtDetr,), {"forward": Base.forward, "__module__": __name__}) for name in ("First", "Second")]
    modules = [build(kind) for kind in kinds]
    inputs = arguments_for(modules[0])
    expected = [module(**inputs) for module in modules]
    for order in (kinds, kinds[::-1], kinds[:1]):
        with mx_driving.patched(library(*order)), mx_driving.patched(library(*kinds)) as done:
            assert set(done.replaced) == {f"{__name__}.{kind.__name__}" for kind in kinds}
            for module, out in zip(modules, expected, strict=True):
                assert operators(module, **inputs) == [WITH_LOGITS]
                close(module(**inputs), out)
    assert [operators(module, **inputs) for module in modules] == [[], []]


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


class WithoutMasks(libraries.Mmcv):
    """A compiler team's copy of mmcv's module: it takes a mask and does not read it."""

    forward = make_forward(MMCV + "flag='decoder', **kwargs", mask="None")


def test_a_module_that_does_not_read_its_mask_is_replaced_and_ignores_it():
    module = build(WithoutMasks)
    assert answers(WithoutMasks, module, arguments_for(module)).skipped == {}


def int_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    sizes = [(int(h), int(w)) for h, w in value_spatial_shapes]
    return plain_core(value, sizes, sampling_locations, attention_weights)


# VADv2 of tt-forge: its core reads the table by `int`.
BY_INT = "query, value, reference_points, spatial_shapes, level_start_index"
ReadsByInt = define("ReadsByInt", libraries.Pillars, BY_INT, core=staticmethod(int_core))


@pytest.mark.parametrize(("dtype", "called"), [(torch.int32, WITH_LOGITS), (torch.float64, BARE), (torch.int16, BARE)])
def test_a_module_that_reads_its_table_by_int_takes_any_numbers(dtype, called):
    module = build(ReadsByInt)
    arguments = arguments_for(module)
    arguments["spatial_shapes"] = arguments["spatial_shapes"].to(dtype)
    answers(ReadsByInt, module, arguments, called, (int_core,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int16, torch.uint8])
def test_a_core_that_reads_its_table_by_int_takes_any_numbers(dtype):
    value, sizes, locations, weights = CORE
    table = torch.tensor(sizes).to(dtype)
    expected = int_core(value, table, locations, weights)
    with mx_driving.patched(library(int_core)):
        assert len(operators(int_core, value, table, locations, weights)) == 1
        torch.testing.assert_close(int_core(value, table, locations, weights), expected)


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


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize(("name", "arguments", "queries"), [("core", CORE, 7), ("bev_pool", rows(), 60)])
@pytest.mark.parametrize(
    ("more", "scale", "by_name"),
    [
        (", scale=1", "scale", True),
        (", scale=1", "scale", False),
        (", *, scale=1", "scale", True),
        (", *scale", "(scale[0] if scale else 1)", False),
        (", **scale", "(lambda scale=1: scale)(**scale)", True),
    ],
)
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


AUTOGRAD = """
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {parameters}, *more):
        return {first} * more[0]
"""
EXTENSIONS = [  # name, parameters, the first tensor with a gradient
    (
        "MSDeformAttnFunction",
        "value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step",
        "value",
    ),
    ("DeformableAggregationFunction", "mc_ms_feat, spatial_shape, scale_start_index, sampling_location, weights", "weights"),
    ("VoxelPooling", "geom_xyz, input_features, voxel_num", "input_features"),
]


@pytest.mark.parametrize(("name", "parameters", "first"), EXTENSIONS)
def test_an_autograd_function_of_more_arguments_is_left_alone_and_named(name, parameters, first):
    module = library(source=AUTOGRAD.format(name=name, parameters=parameters, first=first))
    with pytest.raises(ValueError, match=rf"a_library\.{name}: no known form of a core has the parameters \(.*\*more\)"):
        mx_driving.patch(module)


def test_a_decorated_core_is_replaced_below_its_decorator():
    decorated = torch.no_grad()(int_core)
    with mx_driving.patched(library(decorated)) as done:
        assert done.replaced == (f"{__name__}.int_core",)
        assert len(operators(decorated, *CORE)) == 1
        assert not decorated(CORE[0].clone().requires_grad_(), *CORE[1:]).requires_grad
