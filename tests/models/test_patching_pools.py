"""patch: functions that sum points into cells, over an extension that no CPU has, and in plain torch."""

from __future__ import annotations

import types

import attention_modules
import numpy as np
import pytest
import torch
from attention_modules import operators, results
from torch.testing import assert_close

import mx_driving

B, D, H, W, C = 2, 2, 5, 4, 3
POOL = ["bev_pool_v3"]


class Extension(types.ModuleType):
    """A compiled file of CUDA's."""

    def __getattr__(self, name):
        def no_cpu(*args):
            raise RuntimeError("depth must be a CUDA tensor")

        return no_cpu


def library(source):
    return attention_modules.library(Extension("ext"), source=source)


BEVDET = """
class QuickCumsumCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths):
        return ext.bev_pool_v2_forward(depth)

def bev_pool_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths):
    x = QuickCumsumCuda.apply(
        depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths
    )
    return x.permute(0, 4, 1, 2, 3).contiguous()
"""
BEVFUSION = """
class QuickCumsumCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, geom_feats, ranks, B, D, H, W):
        return ext.bev_pool_forward(x)

def bev_pool(feats, coords, B, D, H, W):
    order = (coords @ torch.tensor([W * D * B, D * B, B, 1])).argsort()
    return QuickCumsumCuda.apply(feats[order], coords[order], order, B, D, H, W).permute(0, 4, 1, 2, 3).contiguous()
"""
BEVDEPTH = """
class VoxelPooling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, geom_xyz, input_features, voxel_num):
        return ext.voxel_pooling_forward_wrapper(geom_xyz)

    @staticmethod
    def backward(ctx, grad):
        return None, ext.backward(grad), None

voxel_pooling = VoxelPooling.apply
"""
PLAIN = """
def bev_pool_v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths):
    b, d, h, w, c = bev_feat_shape
    rows = depth.flatten()[ranks_depth.long(), None] * feat.reshape(-1, c)[ranks_feat.long()]
    return feat.new_zeros(b * d * h * w, c).index_add(0, ranks_bev, rows).view(b, d, h, w, c).permute(0, 4, 1, 2, 3)

def bev_pool(feats, coords, B, D, H, W):
    h, w, d, b = coords.long().unbind(1)
    return feats.new_zeros(B, D, H, W, feats.shape[1]).index_put((b, d, h, w), feats, accumulate=True).permute(0, 4, 1, 2, 3)

def voxel_pooling(geom_xyz, input_features, voxel_num):
    X, Y, Z = voxel_num.tolist()
    x, y, z = geom_xyz.long().unbind(-1)
    inside = (x >= 0) & (x < X) & (y >= 0) & (y < Y) & (z >= 0) & (z < Z)
    b, i = inside.nonzero(as_tuple=True)
    out = input_features.new_zeros(len(geom_xyz), Y, X, input_features.shape[-1])
    return out.index_put((b, y[inside], x[inside]), input_features[inside], accumulate=True).permute(0, 3, 1, 2)
"""
TRUTH = library(PLAIN)


def lifted():
    generator = torch.Generator().manual_seed(3)
    depth, feat = torch.rand(1, 2, 6, 2, 3, generator=generator), torch.randn(1, 2, 2, 3, C, generator=generator)
    of_depth = torch.randint(72, (150,), generator=generator)
    cell = torch.randint(B * D * H * W, (150,), generator=generator).sort().values
    lengths = torch.unique_consecutive(cell, return_counts=True)[1]
    ranks = (t.int() for t in (of_depth, of_depth // 36 * 6 + of_depth % 6, cell))
    return depth, feat, *ranks, (B, D, H, W, C), lengths.cumsum(0) - lengths, lengths


def rows():
    generator = torch.Generator().manual_seed(4)
    places = torch.stack([torch.randint(n, (60,), generator=generator) for n in (H, W, D, B)], 1)
    return torch.randn(60, C, generator=generator), places, B, D, H, W


def frustum():
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randint(-1, 5, (B, 60, 3), generator=generator),
        torch.randn(B, 60, C, generator=generator),
        torch.tensor([W, H, D]),
    )


INPUTS = {"bev_pool_v2": lifted, "bev_pool": rows, "voxel_pooling": frustum}


def is_right(name, function):
    """Beside float64 truth, output and gradients."""
    args = INPUTS[name]()
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    for got, true in zip(results(function, *args), results(getattr(TRUTH, name), *wide), strict=True):
        assert got.dtype == torch.float32
        assert_close(got.double(), true, rtol=1e-5, atol=1e-5)


OVER_EXTENSIONS = {
    "bev_pool_v2": (BEVDET, ("QuickCumsumCuda", "bev_pool_v2")),
    "bev_pool": (BEVFUSION, ("QuickCumsumCuda", "bev_pool")),
    "voxel_pooling": (BEVDEPTH, ("VoxelPooling",)),
}


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("name", OVER_EXTENSIONS)
def test_over_an_extension(name, alone):
    """The class is taken by name; the function around it is tried after it. A name for `apply` from before is served, too. A
    model's file may import the function alone: the class is where the function was defined."""
    source, replaced = OVER_EXTENSIONS[name]
    module, model = library(source), types.ModuleType("a_model")
    function = vars(model)[name] = getattr(module, name)
    before = [dict(vars(thing)) for thing in vars(module).values() if isinstance(thing, type)]
    with mx_driving.patched(model if alone and len(replaced) > 1 else module) as done:
        assert done.replaced == tuple(f"a_library.{one}" for one in replaced)
        assert done.skipped == {}
        is_right(name, function)
        assert operators(function, *INPUTS[name]()) == POOL
    with pytest.raises(RuntimeError, match="must be a CUDA tensor"):
        function(*INPUTS[name]())
    after = [dict(vars(thing)) for thing in vars(module).values() if isinstance(thing, type)]
    assert before == after


@pytest.mark.parametrize("name", INPUTS)
def test_in_plain_torch(name):
    module = library(PLAIN)
    function = getattr(module, name)
    expected = results(function, *INPUTS[name]())
    with mx_driving.patched(module) as done:
        assert set(done.replaced) == {f"a_library.{one}" for one in INPUTS}
        is_right(name, function)
        assert operators(function, *INPUTS[name]()) == POOL
    assert operators(function, *INPUTS[name]()) == []
    assert_close(results(function, *INPUTS[name]()), expected)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (("* feat", "+ feat"), "bev_pool_v2"),
        (("h, w, d, b = coords", "w, h, d, b = coords"), "bev_pool"),
        ((" & (z >= 0) & (z < Z)", ""), "voxel_pooling"),
        (("x, y, z = geom", "y, x, z = geom"), "voxel_pooling"),
    ],
)
def test_what_computes_something_else_is_left_alone(change, name):
    module = library(PLAIN.replace(*change))
    with pytest.warns(UserWarning, match=f"left a_library.{name} alone"):
        done = mx_driving.patch(module)
    done.restore()
    assert set(done.replaced) == {f"a_library.{one}" for one in INPUTS if one != name}
    assert list(done.skipped) == [f"a_library.{name}"]


@pytest.mark.parametrize("name", INPUTS)
def test_other_functions_of_these_parameters_are_not_looked_at(name):
    module = library(PLAIN.replace(f"def {name}(", "def something("))
    with mx_driving.patched(module) as done:
        assert set(done.replaced) == {f"a_library.{one}" for one in INPUTS if one != name}
        assert done.skipped == {}


def test_what_calls_a_compiled_file_is_not_tried():
    """It might end the process."""
    compiled = (getattr(np, "_core", None) or np.core)._multiarray_umath  # _core from NumPy 2 on
    inner = "def inner(*args):\n    inner2()\n    return ext.zeros(1)\n\ndef inner2():\n    inner\n"
    module = library(f"{inner}\ndef bev_pool(feats, coords, B, D, H, W):\n    return inner(feats)\n")
    module.ext = compiled
    with pytest.raises(ValueError, match="it calls a compiled file"):
        mx_driving.patch(module)
    module = library("\ndef bev_pool(feats, coords, B, D, H, W):\n    return zeros(1)\n")
    module.zeros = compiled.zeros
    with pytest.raises(ValueError, match="it calls a compiled file"):
        mx_driving.patch(module)


@pytest.mark.parametrize("autocast", [False, True])
def test_half_is_summed_in_float32_where_bevdet_does(autocast):
    module = library(BEVDET)
    depth, feat, *rest = lifted()
    with mx_driving.patched(module), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module.bev_pool_v2(depth.half(), feat.half(), *rest)
    assert out.dtype == torch.float32
    assert_close(out, TRUTH.bev_pool_v2(depth.half().float(), feat.half().float(), *rest))


def test_sizes_that_are_elements_of_a_tensor_and_points_outside():
    """BEVFusion's grid is a tensor. Points outside are left out."""
    module, (feats, places, *sizes) = library(BEVFUSION), rows()
    expected = TRUTH.bev_pool(feats[:40], places[:40], *sizes)
    places[40:50, 0], places[50:, 3] = H, -1
    with mx_driving.patched(module):
        assert_close(module.bev_pool(feats, places, B, *torch.tensor(sizes[1:])), expected)


IN_INFERENCE = """
class VoxelPoolingInference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, geom_xyz, depth_features, context_features, voxel_num):
        return ext.voxel_pooling_inference_forward_wrapper(geom_xyz)

voxel_pooling_inference = VoxelPoolingInference.apply
"""


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bevdepths_pool_of_inference(dtype):
    """It lifts the context itself. BEVDepth has no backward of it; ours has the right one."""
    generator = torch.Generator().manual_seed(6)
    places = torch.randint(-1, 5, (B, 3, 4, 2, 3, 3), generator=generator).to(dtype)
    depth, context = torch.rand(B * 3, 4, 2, 3, generator=generator), torch.randn(B * 3, C, 2, 3, generator=generator)
    number = torch.tensor([W, H, D])

    def lifted_by_hand(places, depth, context, number):
        rows = (depth[:, None] * context[:, :, None]).permute(0, 2, 3, 4, 1)
        return TRUTH.voxel_pooling(places.flatten(1, 4), rows.reshape(B, -1, C), number)

    module = library(IN_INFERENCE)
    expected = results(lifted_by_hand, places, depth.double(), context.double(), number)
    with mx_driving.patched(module) as done:
        assert done.replaced == ("a_library.VoxelPoolingInference",)
        found = results(module.voxel_pooling_inference, places, depth, context, number)
        assert operators(module.voxel_pooling_inference, places, depth, context, number) == POOL
    assert_close([t.double() for t in found], expected, rtol=1e-5, atol=1e-5)


MAPTR = """
def Quickcumsum_cpu(feats, coords, ranks, B, D, H, W):
    out = feats.new_zeros(int(B), int(D), int(H), int(W), feats.shape[1])
    for row, (h, w, d, b) in zip(feats, coords.tolist()):
        for c, number in enumerate(row):
            out[b, d, h, w, c] += number.item()
    return out

def bev_pool(feats, coords, B, D, H, W):
    ranks = coords @ torch.tensor([W * D * B, D * B, B, 1])
    order = ranks.argsort()
    return Quickcumsum_cpu(feats[order], coords[order], ranks[order], B, D, H, W).permute(0, 4, 1, 2, 3).contiguous()
"""


def test_pools_that_have_no_gradient_have_none_afterwards():
    """MapTR's in plain torch read each number by `item`."""
    module, args = library(MAPTR), rows()
    args[0].requires_grad_()
    with mx_driving.patched(module) as done:
        assert (set(done.replaced), done.skipped) == ({"a_library.Quickcumsum_cpu", "a_library.bev_pool"}, {})
        out = module.bev_pool(*args)
        assert operators(module.bev_pool, *args) == POOL
        ranks = torch.arange(len(args[0]))
        sorted_out = module.Quickcumsum_cpu(*args[:2], ranks, *args[2:])
    assert [out.requires_grad, sorted_out.requires_grad] == [False, False]
    assert_close(out, TRUTH.bev_pool(*args).detach())
    assert_close(sorted_out.permute(0, 4, 1, 2, 3), out)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("bev_pool", lambda feats, places, *sizes: (feats, places + 0.5, *sizes)),
        ("bev_pool", lambda feats, places, *sizes: ((feats * 8).long(), places, *sizes)),
        ("voxel_pooling", lambda places, feats, number: (places + 0.5, feats, number)),
        ("bev_pool_v2", lambda depth, feat, ranks, *rest: (depth, feat, ranks.to(torch.int16), *rest)),
    ],
)
def test_what_operators_refuse_runs_the_pools_own_code(name, change):
    module = library(PLAIN)
    args = change(*INPUTS[name]())
    expected = getattr(module, name)(*args)
    with mx_driving.patched(module):
        assert torch.equal(getattr(module, name)(*args), expected)


def test_rows_without_a_place_are_the_pools_own_matter():
    module, over_extension, (feats, places, *sizes) = library(PLAIN), library(BEVFUSION), rows()
    with mx_driving.patched(module), pytest.raises(RuntimeError, match="shape mismatch"):
        module.bev_pool(feats, places[:40], *sizes)
    with (
        mx_driving.patched(over_extension),
        pytest.raises(ValueError, match=r"feats must have shape \(n=40, C\); got \(60, 3\)"),
    ):
        over_extension.QuickCumsumCuda.apply(feats, places[:40], places[:40, 0], *sizes)
