"""The aliases take the calls that mmcv and transformers make."""

from __future__ import annotations

import pytest
import torch
from cases import GEOMETRIC, MULTI_SCALE
from small_cases import GOOD

import mx_driving
from mx_driving import compat

NAMES = ("value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights")
value, shapes, starts, locations, weights = GOOD[MULTI_SCALE]()
PAIRS = [tuple(pair) for pair in shapes.tolist()]
KEYWORDS = {"value": value, "sampling_locations": locations, "attention_weights": weights}

# arguments of MultiScaleDeformableAttnFunction.apply: by position, by name
CALLS = {
    "mmcv": ((value, shapes, starts, locations, weights, 64), {}),
    "mmcv by name": ((value, shapes, starts, locations, weights), {"im2col_step": 64}),
    "transformers": ((value, shapes, PAIRS, starts, locations, weights, 64), {}),
    "transformers by name": (
        (),
        {
            **KEYWORDS,
            "value_spatial_shapes": shapes,
            "value_spatial_shapes_list": PAIRS,
            "level_start_index": starts,
            "im2col_step": 64,
        },
    ),
    "its list alone": ((), {**KEYWORDS, "value_spatial_shapes_list": PAIRS, "level_start_index": starts}),
    "its list, no tensor": ((value, None, PAIRS, starts, locations, weights, 64), {}),
    "names of its functions": ((), {**KEYWORDS, "spatial_shapes": shapes, "level_start_index": starts}),
    "tables as lists": ((value, PAIRS, starts.tolist(), locations, weights), {}),
    "tables as lists by name": ((), {**KEYWORDS, "spatial_shapes": PAIRS, "level_start_index": tuple(starts.tolist())}),
}


@pytest.mark.parametrize("name", CALLS)
def test_autograd_function(name):
    args, named = CALLS[name]
    expected = mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, weights)
    assert torch.equal(mx_driving.MultiScaleDeformableAttnFunction.apply(*args, **named), expected)


def test_autograd_function_compiles():
    """By position only: torch.compile does not take names for an autograd function's arguments."""
    torch._dynamo.reset()
    run = torch.compile(lambda *a: mx_driving.MultiScaleDeformableAttnFunction.apply(*a), fullgraph=True, backend="eager")
    expected = mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, weights)
    assert torch.equal(run(value, shapes, starts, locations, weights, 64), expected)


def test_maptr():
    """The call that MapTR's modules make."""
    args = GOOD[GEOMETRIC]()
    function = mx_driving.ops.geometric_kernel_attention.GeometricKernelAttentionFunc
    assert torch.equal(function.apply(*args, 64), mx_driving.geometric_kernel_attention(*args))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_older_function():
    function = mx_driving.npu_multi_scale_deformable_attn_function
    expected = mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, weights)
    assert torch.equal(function(value, shapes, starts, locations, weights, 64), expected)
    assert torch.equal(function(value, PAIRS, starts.tolist(), locations, weights=weights, im2col_step=64), expected)


@pytest.mark.parametrize("operator", [MULTI_SCALE, GEOMETRIC])
def test_stand_ins_know_mmcvs_names(operator):
    """Stand-ins take the names that mmcv's compiled functions take."""
    args = GOOD[operator]()
    forward = compat._make_forward(getattr(mx_driving, operator))
    found = forward(**dict(zip(NAMES, args, strict=True)), im2col_step=64)
    assert torch.equal(found, getattr(mx_driving, operator)(*args))


@pytest.mark.parametrize(
    ("args", "named", "sentence"),
    [
        ((None, PAIRS, starts, locations, weights), {}, "value must be a torch.Tensor; got NoneType"),
        (
            (value, shapes, starts, locations, weights, locations),
            {},
            "multi_scale_deformable_attn must be called with 5 arguments; got 6",
        ),
        ((value, shapes, starts, locations), {}, "attention_weights must be given as argument 5 of .*; got 4 arguments"),
        ((value, shapes), {**KEYWORDS, "spatial_shapes": shapes}, "must be called with 5 arguments; got 6"),
        ((value,), {"step": 64}, "must be called with value, .*, attention_weights; got the name step"),
    ],
)
def test_other_calls_are_refused(args, named, sentence):
    with pytest.raises(TypeError, match=sentence):
        mx_driving.MultiScaleDeformableAttnFunction.apply(*args, **named)
