"""Every name of an operator: calls by position and by keyword, warnings, autograd functions, compiled extensions."""

import functools
import importlib
import inspect
import pathlib
import pickle
import sys
import types
import warnings
from unittest.mock import Mock

import cases
import pytest
import torch
from attention_modules import direction_of, results
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE
from small_cases import GOOD, inputs_of
from torch.autograd import gradgradcheck

import mx_driving
from mx_driving import _C, _foreign_functions
from mx_driving._foreign.stand_ins import stand_in
from mx_driving.ops.geometric_kernel_attention import GeometricKernelAttentionFunc
from mx_driving.ops.multi_scale_deformable_attn import MultiScaleDeformableAttnFunction
from mx_driving.ops.npu_deformable_aggregation import AdsDeformableAggregation

ATTENTION = ("value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights")
OLD = ("value", "shape", "offset", "locations", "weights")
# Part of a name -> the names of arguments. The first part that fits counts.
KEYS = {
    "npu_multi_scale": OLD,
    "aggregation": ("feature_maps", "spatial_shape", "scale_start_index", "sample_locations", "weight"),
    "geometric": ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights"),
    "multi_scale": ATTENTION,
}
WHOLE = ["multi_scale_deformable_attn", "deformable_aggregation", "npu_deformable_aggregation", "geometric_kernel_attention"]
APPLIED, OLDER = "MultiScaleDeformableAttnFunction.apply", "npu_multi_scale_deformable_attn_function"
NPU_GEOMETRIC, OF_GEOMETRIC = "npu_geometric_kernel_attention", "GeometricKernelAttentionFunc.apply"
NAMES = {
    "mx_driving": [*WHOLE, OLDER, APPLIED, NPU_GEOMETRIC],
    "mx_driving.point": [OLDER],
    "mx_driving.common": [OLDER],
    "mx_driving.fused": [WHOLE[0], WHOLE[2], OLDER, APPLIED, NPU_GEOMETRIC, NPU_GEOMETRIC + "_func"],
    "mx_driving.ops": WHOLE,
    "mx_driving.ops.multi_scale_deformable_attn": WHOLE[:1],
    "mx_driving.ops.npu_deformable_aggregation": [*WHOLE[1:3], "AdsDeformableAggregation.apply"],
    "mx_driving.ops.geometric_kernel_attention": [WHOLE[3], OF_GEOMETRIC],
    "mx_driving.ops.npu_geometric_kernel_attention": [NPU_GEOMETRIC, OF_GEOMETRIC],
}


@pytest.mark.filterwarnings("ignore:mx_driving.*is deprecated:DeprecationWarning:importlib")
@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_by_position_and_by_keyword(module, name):
    """The older function warns of each call, with the caller's line. Other names do not warn."""
    function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
    words = name.lower().replace("multiscale", "multi_scale")
    part, keys = next((part, keys) for part, keys in KEYS.items() if part in words)
    bare = next(o for o in cases.OPERATORS if part.removeprefix("npu_") in o)
    args = GOOD[bare]()
    expected = getattr(torch.ops.mx_driving, bare).default(*args)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert torch.equal(function(*args), expected)
        assert torch.equal(function(**dict(zip(keys, args, strict=True))), expected)
    assert [(w.category, w.filename) for w in caught] == [(DeprecationWarning, __file__)] * (2 if name == OLDER else 0)
    assert all(f"{OLDER} is deprecated" in str(w.message) for w in caught)


POOLS = ["bev_pool", "bev_pool_v2", "bev_pool_v3", "npu_voxel_pooling_train"]
PATHS_OF_POOLS = {
    "mx_driving.point": POOLS,
    "mx_driving.ops": POOLS,
    **{f"mx_driving.ops.{name}": [name] for name in POOLS[:3]},
    "mx_driving.ops.voxel_pooling_train": POOLS[3:],
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("module", "names"), PATHS_OF_POOLS.items())
def test_pools_by_every_path(module, names):
    """tests/ops/test_bev_pool_v3_names.py calls them."""
    for name in names:
        assert getattr(importlib.import_module(module), name) is getattr(mx_driving, name)


PAIRS = [(3, 4), (2, 2)]  # the maps of GOOD
value, shapes, starts, locations, weights = ATTENDED = GOOD[MULTI_SCALE]()
KEYWORDS = {"value": value, "sampling_locations": locations, "attention_weights": weights}
HUGGING_FACE = {"value_spatial_shapes_list": PAIRS, "level_start_index": starts}
STARTS = starts.tolist()
# Arguments of MultiScaleDeformableAttnFunction.apply: by position, by name.
CALLS = {
    "mmcv": ((*ATTENDED, 64), {}),
    "mmcv by name": (ATTENDED, {"im2col_step": 64}),
    "transformers": ((value, shapes, PAIRS, starts, locations, weights, 64), {}),
    "transformers by name": ((), {**KEYWORDS, **HUGGING_FACE, "value_spatial_shapes": shapes, "im2col_step": 64}),
    "its list alone": ((), {**KEYWORDS, **HUGGING_FACE}),
    "its list, no tensor": ((value, None, PAIRS, starts, locations, weights, 64), {}),
    "names of its functions": ((), {**KEYWORDS, "spatial_shapes": shapes, "level_start_index": starts}),
    "tables as lists": ((value, PAIRS, STARTS, locations, weights), {}),
    "tables as lists by name": ((), {**KEYWORDS, "spatial_shapes": PAIRS, "level_start_index": tuple(STARTS)}),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_of_mmcv_and_transformers(name):
    args, named = CALLS[name]
    expected = mx_driving.multi_scale_deformable_attn(*ATTENDED)
    assert torch.equal(MultiScaleDeformableAttnFunction.apply(*args, **named), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_step_of_an_extension_is_taken():
    """MapTR's function, the older function and stand-ins under mmcv's names take im2col_step."""
    older, expected = mx_driving.npu_multi_scale_deformable_attn_function, mx_driving.multi_scale_deformable_attn(*ATTENDED)
    assert torch.equal(older(*ATTENDED, 64), expected)
    assert torch.equal(older(value, PAIRS, STARTS, locations, weights=weights, im2col_step=64), expected)
    for operator in (MULTI_SCALE, GEOMETRIC):
        args, public = GOOD[operator](), getattr(mx_driving, operator)
        row = next(row for row in _foreign_functions.FUNCTIONS if row.operator == operator and "step" in row.names)
        forward = stand_in(row)
        assert torch.equal(forward(**dict(zip(ATTENTION, args, strict=True)), im2col_step=64), public(*args))
    assert torch.equal(GeometricKernelAttentionFunc.apply(*args, 64), public(*args))


@pytest.mark.parametrize(
    ("args", "named", "sentence"),
    [
        ((None, PAIRS, starts, locations, weights), {}, "value must be a torch.Tensor; got NoneType"),
        ((*ATTENDED, locations), {}, "multi_scale_deformable_attn must be called with 5 arguments; got 6"),
        (ATTENDED[:4], {}, "attention_weights must be given as argument 5 of .*; got 4 arguments"),
        (ATTENDED[:2], {**KEYWORDS, "spatial_shapes": shapes}, "must be called with 5 arguments; got 6"),
        ((value,), {"step": 64}, "must be called with value, .*, attention_weights; got the name step"),
    ],
)
def test_other_calls_are_refused(args, named, sentence):
    with pytest.raises(TypeError, match=sentence):
        MultiScaleDeformableAttnFunction.apply(*args, **named)


def test_the_older_name_compiles_into_one_graph():
    call = torch.compile(lambda *args: getattr(mx_driving, OLDER)(*args), fullgraph=True, backend="aot_eager")
    assert torch.equal(call(*GOOD[MULTI_SCALE]()), mx_driving.multi_scale_deformable_attn(*GOOD[MULTI_SCALE]()))


@pytest.mark.parametrize("module", ["mx_driving.fused", "mx_driving.point", "mx_driving.common"])
def test_older_paths_warn_once(module):
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=f"{module} is deprecated"):
        importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(module)


PLACES = ("multi_scale_deformable_attn", "npu_deformable_aggregation", "geometric_kernel_attention")


@pytest.mark.parametrize("place", PLACES)
def test_vendor_places_hold_the_vendors_names(place):
    """The path is a module for imports and reloads. The function of the same name has the attributes of the module."""
    module = importlib.import_module(f"mx_driving.ops.{place}")
    assert isinstance(module, types.ModuleType)
    assert module.__name__ == f"mx_driving.ops.{place}"
    for name in module.__all__:
        assert getattr(getattr(mx_driving.ops, place), name) is getattr(module, name)


@pytest.mark.parametrize("place", [*PLACES, "deformable_aggregation"])
def test_places_are_called_as_functions(place):
    """The module is called as the function, as in torchvision and mmcv. Help, pickle and torch.compile see the function."""
    function = getattr(mx_driving.ops, place)
    assert inspect.signature(function) == inspect.signature(getattr(mx_driving, place))
    assert inspect.getdoc(function) == inspect.getdoc(getattr(mx_driving, place))
    assert pickle.loads(pickle.dumps(function)) is function
    operator = next(o for o in cases.OPERATORS if o in place)
    compiled = torch.compile(lambda *a: getattr(mx_driving.ops, place)(*a) + 0, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*GOOD[operator]()), function(*GOOD[operator]()))


CLASSES = MultiScaleDeformableAttnFunction, AdsDeformableAggregation, GeometricKernelAttentionFunc
FUNCTIONS = dict(zip((MULTI_SCALE, AGGREGATION, GEOMETRIC), CLASSES, strict=True))


class Derived(MultiScaleDeformableAttnFunction):
    """A class with mmcv's parameters that inherits from the vendor's class, as the vendor's patcher makes it."""

    @staticmethod
    def forward(ctx, value, shapes, starts, locations, weights, im2col_step):
        return MultiScaleDeformableAttnFunction.forward(ctx, value, shapes, starts, locations, weights)


def same(actual, expected):
    return all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_static_methods_take_any_ctx(operator):
    """As the vendor's gradient test calls them: a Mock for ctx, inputs that require gradients, results taken to numpy."""
    inputs = inputs_of(operator)
    expected = results(getattr(mx_driving, operator), *inputs)
    forward_ctx, ctx = Mock(), Mock()
    out = FUNCTIONS[operator].forward(forward_ctx, *inputs)
    assert same(forward_ctx.save_for_backward.call_args.args, inputs)
    ctx.saved_tensors = inputs
    actual = FUNCTIONS[operator].backward(ctx, direction_of(out))
    assert [k for k, g in enumerate(actual) if g is not None] == list(cases.DIFFERENTIABLE[operator])
    tensors = [out, *(g for g in actual if g is not None)]
    assert same(tensors, expected)
    assert not any(t.requires_grad for t in tensors)


def applied(function):
    more = [64] if function is Derived else []
    return lambda *inputs: function.apply(*inputs, *more)


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), Derived])
def test_autograd_functions_differentiate_twice_and_compile(function):
    operator = next(o for o, base in FUNCTIONS.items() if issubclass(function, base))
    assert issubclass(function, torch.autograd.Function)
    inputs, expected = inputs_of(operator), results(getattr(mx_driving, operator), *inputs_of(operator))
    assert same(results(applied(function), *inputs), expected)
    assert gradgradcheck(applied(function), inputs, fast_mode=True)
    assert same(results(torch.compile(applied(function), fullgraph=True, backend="aot_eager"), *inputs), expected)


@pytest.mark.parametrize("function", [*FUNCTIONS.values(), Derived])
def test_autograd_functions_under_autocast(function):
    """Autocast computes in float32, and gradients have the inputs' dtype, for our classes and a derived one."""
    operator = next(o for o, base in FUNCTIONS.items() if issubclass(function, base))
    inputs = cases.cast(inputs_of(operator), torch.float16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = results(applied(function), *inputs), results(getattr(mx_driving, operator), *inputs)
    assert actual[0].dtype == torch.float32
    assert [t.dtype for t in actual[1:]] == [torch.float16] * len(cases.DIFFERENTIABLE[operator])
    assert same(actual, expected)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_extension_functions(operator):
    """Functions of mx_driving._C record no graph, ignore autocast, and have separate functions for gradients."""
    inputs = cases.cast(inputs_of(operator), torch.float16)
    forwards = [n for n in _C.__all__ if operator in n and not n.endswith(("_backward", "_grad", "_forward"))]
    backwards = [n for n in _C.__all__ if operator in n and n.endswith(("_backward", "_grad"))]
    assert forwards
    assert backwards
    leaves = [i.detach().requires_grad_(k in cases.DIFFERENTIABLE[operator]) for k, i in enumerate(inputs)]
    out, *gradients = results(getattr(mx_driving, operator), *inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for name in forwards:
            found = getattr(_C, name)(*leaves)
            assert torch.equal(found, out)
            assert found.dtype == torch.float16
            assert not found.requires_grad
        zeros = [torch.zeros_like(inputs[k]) for k in cases.DIFFERENTIABLE[operator]] if operator == AGGREGATION else []
        for name in backwards:
            assert same(getattr(_C, name)(*leaves, direction_of(out), *zeros), gradients)
    if operator == GEOMETRIC:
        found = torch.zeros_like(out)
        assert _C.geometric_kernel_attention_forward(*inputs, found) is None
        assert torch.equal(found, out)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_public_modules_say_what_is_public():
    """Every module without an underscore has a true __all__: sorted, nothing missing, nothing that is not there."""
    root = pathlib.Path(mx_driving.__file__).parent
    files = [file.relative_to(root).with_suffix("").parts for file in root.rglob("*.py")]
    parts = [p[:-1] if p[-1] == "__init__" else p for p in files]
    ours = {"cli", "replay"}  # rooms of our own programs
    public = [".".join(("mx_driving", *p)) for p in parts if not ours & set(p) and not any(n.startswith("_") for n in p)]
    assert {"mx_driving", "mx_driving.viz", "mx_driving.onnx", "mx_driving.compat"} <= set(public)
    for name in public:
        module = importlib.import_module(name)
        listed = getattr(module, "__all__", None)
        assert listed is not None, name
        assert sorted(set(listed)) == sorted(listed), name
        assert [n for n in listed if not hasattr(module, n)] == [], name
        own = {n for n, thing in vars(module).items() if getattr(thing, "__module__", None) == name}
        assert {n for n in own if not n.startswith("_")} <= set(listed), name
