"""Every name a caller can use, by position and by keyword, and what each of them warns."""

from __future__ import annotations

import importlib
import sys
import warnings

import cases
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE
from test_errors import GOOD

import mx_driving

MULTI_SCALE_KEYS = ("value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights")
OLD_KEYS = ("value", "shape", "offset", "locations", "weights")
AGGREGATION_KEYS = ("feature_maps", "spatial_shape", "scale_start_index", "sample_locations", "weight")
GEOMETRIC_KEYS = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights")

NAMES = [
    ("mx_driving", "multi_scale_deformable_attn", MULTI_SCALE, MULTI_SCALE_KEYS),
    ("mx_driving", "npu_multi_scale_deformable_attn_function", MULTI_SCALE, OLD_KEYS),
    ("mx_driving", "MultiScaleDeformableAttnFunction.apply", MULTI_SCALE, MULTI_SCALE_KEYS),
    ("mx_driving", "deformable_aggregation", AGGREGATION, AGGREGATION_KEYS),
    ("mx_driving", "npu_deformable_aggregation", AGGREGATION, AGGREGATION_KEYS),
    ("mx_driving", "geometric_kernel_attention", GEOMETRIC, GEOMETRIC_KEYS),
    ("mx_driving.point", "npu_multi_scale_deformable_attn_function", MULTI_SCALE, OLD_KEYS),
    ("mx_driving.fused", "npu_deformable_aggregation", AGGREGATION, AGGREGATION_KEYS),
    ("mx_driving.fused", "multi_scale_deformable_attn", MULTI_SCALE, MULTI_SCALE_KEYS),
    ("mx_driving.fused", "npu_multi_scale_deformable_attn_function", MULTI_SCALE, OLD_KEYS),
    ("mx_driving.fused", "MultiScaleDeformableAttnFunction.apply", MULTI_SCALE, MULTI_SCALE_KEYS),
    ("mx_driving.ops.multi_scale_deformable_attn", "multi_scale_deformable_attn", MULTI_SCALE, MULTI_SCALE_KEYS),
    ("mx_driving.ops.npu_deformable_aggregation", "npu_deformable_aggregation", AGGREGATION, AGGREGATION_KEYS),
    ("mx_driving.ops.geometric_kernel_attention", "geometric_kernel_attention", GEOMETRIC, GEOMETRIC_KEYS),
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("module", "name", "operator", "keys"), NAMES)
def test_by_position_and_by_keyword(module, name, operator, keys):
    function = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    args = GOOD[operator]()
    expected = getattr(torch.ops.mx_driving, operator).default(*args)
    assert torch.equal(function(*args), expected)
    assert torch.equal(function(**dict(zip(keys, args, strict=True))), expected)


def test_deprecated_function_warns_on_each_call():
    args = GOOD[MULTI_SCALE]()
    for _ in range(2):
        with pytest.warns(DeprecationWarning, match="npu_multi_scale_deformable_attn_function is deprecated") as caught:
            mx_driving.npu_multi_scale_deformable_attn_function(*args)
        assert caught[0].filename == __file__


@pytest.mark.parametrize("name", ["npu_deformable_aggregation", "multi_scale_deformable_attn"])
def test_current_names_are_silent(name):
    operator = AGGREGATION if "aggregation" in name else MULTI_SCALE
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(mx_driving, name)(*GOOD[operator]())


@pytest.mark.parametrize("module", ["mx_driving.fused", "mx_driving.point"])
def test_older_paths_warn_once(module):
    sys.modules.pop(module, None)
    with pytest.warns(DeprecationWarning, match=f"{module} is deprecated"):
        importlib.import_module(module)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        importlib.import_module(module)


def test_vendor_places_are_modules():
    for name in ("multi_scale_deformable_attn", "npu_deformable_aggregation", "geometric_kernel_attention"):
        assert getattr(mx_driving.ops, name).__name__ == f"mx_driving.ops.{name}"


def test_operators_have_their_names_in_torch_ops():
    for operator in cases.OPERATORS:
        assert hasattr(torch.ops.mx_driving, operator)
        assert hasattr(torch.ops.mx_driving, operator + "_backward")
