"""patch: functions that sum points into cells, over an extension for GPUs, and in plain torch."""

import functools
import re
import types

import attention_modules
import pytest
import torch
from attention_modules import floating, operators, recorded, results
from torch.testing import assert_close

import mx_driving
from mx_driving._patch._code import Reader
from mx_driving._patch._search import is_core
from mx_driving._patch.known import Known, read_table

B, D, H, W, C = 2, 2, 5, 4, 3
POOL = ["bev_pool_v3"]


def library(source, *members, known=True):
    """A Python module whose pools and autograd functions are known."""
    module = attention_modules.library(*members, source=source)
    names = re.findall(r"^(?:class|def) (\w+)", source, re.M) if known else ()
    for pool in filter(is_core, (vars(module)[name] for name in names)):
        if isinstance(pool, type) and "backward" not in vars(pool):  # Its gradients cannot be compared.
            read_table()[Reader(is_core).read(pool).key] = Known("image", "tests")
        else:
            attention_modules.admit(pool, form="pool")
    return module


LIFT = "depth, feat, ranks_depth, ranks_feat, ranks_bev, bev_feat_shape, interval_starts, interval_lengths"
RUNS = """
        starts = torch.cat([ranks[1:] != ranks[:-1], ranks.new_zeros(1).bool()]).roll(1)
        starts = starts.index_fill(0, starts.new_zeros(1, dtype=torch.long), True).nonzero()[:, 0].int()
        lengths = torch.cat([starts[1:], starts.new_full((1,), len(ranks))]) - starts
"""
BEVDET = f"""
class QuickCumsumCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {LIFT}):
        depth, feat = depth.contiguous().float(), feat.contiguous().float()
        out = feat.new_zeros(bev_feat_shape)
        ctx.save_for_backward(depth, feat, ranks_depth, ranks_feat, ranks_bev, interval_lengths, interval_starts)
        ext.bev_pool_v2_forward(depth, feat, out, *ctx.to_save[2:])
        return out

    @staticmethod
    def backward(ctx, grad):
        grads = [torch.zeros_like(t) for t in ctx.saved_tensors[:2]]
        ext.bev_pool_v2_backward(grad.contiguous(), *grads, *ctx.saved_tensors)
        return (*grads, *[None] * 6)

def bev_pool_v2({LIFT}):
    return QuickCumsumCuda.apply({LIFT}).permute(0, 4, 1, 2, 3).contiguous()
"""
BEVFUSION = f"""
class QuickCumsumCuda(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, geom_feats, ranks, B, D, H, W):
        {RUNS.strip()}
        ctx.save_for_backward(geom_feats.int(), lengths, starts)
        ctx.sizes = B, D, H, W
        return ext.bev_pool_forward(x, *ctx.to_save, *ctx.sizes)

    @staticmethod
    def backward(ctx, grad):
        return (ext.bev_pool_backward(grad.contiguous(), *ctx.saved_tensors, *ctx.sizes), *[None] * 6)

def bev_pool(feats, coords, B, D, H, W):
    order = (coords @ torch.tensor([W * D * B, D * B, B, 1])).argsort()
    ranks = (coords @ torch.tensor([W * D * B, D * B, B, 1]))[order]
    return QuickCumsumCuda.apply(feats[order], coords[order], ranks, B, D, H, W).permute(0, 4, 1, 2, 3).contiguous()
"""
BEVDEPTH = """
class VoxelPooling(torch.autograd.Function):
    @staticmethod
    def forward(ctx, geom_xyz, input_features, voxel_num):
        (x, y, z), (b, n, _) = voxel_num.tolist(), geom_xyz.shape
        out, memo = input_features.new_zeros(b, y, x, input_features.shape[-1]), geom_xyz.new_full((b, n, 3), -1)
        sizes = b, n, input_features.shape[-1], x, y, z
        ext.voxel_pooling_forward_wrapper(*sizes, geom_xyz, input_features, out, memo)
        ctx.save_for_backward(memo.long())
        return out.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx, grad):
        memo, = ctx.saved_tensors
        read = grad.permute(0, 2, 3, 1)[memo[..., 0], memo[..., 1], memo[..., 2]]
        return None, read * (memo[..., :1] != -1), None

voxel_pooling = VoxelPooling.apply
"""
# BEVDepth has no backward of it; ours has the right one.
IN_INFERENCE = """
class VoxelPoolingInference(torch.autograd.Function):
    @staticmethod
    def forward(ctx, geom_xyz, depth_features, context_features, voxel_num):
        cams, bins, height, width = depth_features.shape
        (x, y, z), channels, b = voxel_num.tolist(), context_features.shape[1], len(geom_xyz)
        out = depth_features.new_zeros(b, y, x, channels)
        sizes = b, cams // b, bins, height, width, channels, x, y, z
        ext.voxel_pooling_inference_forward_wrapper(*sizes, geom_xyz, depth_features, context_features, out)
        return out.permute(0, 3, 1, 2)

voxel_pooling_inference = VoxelPoolingInference.apply
"""
PLAIN = f"""
def bev_pool_v2({LIFT}):
    b, d, h, w, c = bev_feat_shape
    rows = depth.flatten()[ranks_depth.long(), None] * feat.reshape(-1, c)[ranks_feat.long()]
    return feat.new_zeros(b * d * h * w, c).index_add(0, ranks_bev, rows).view(b, d, h, w, c).permute(0, 4, 1, 2, 3)

def bev_pool(feats, coords, B, D, H, W):
    h, w, d, b = coords.long().unbind(1)
    return feats.new_zeros(B, D, H, W, feats.shape[1]).index_put((b, d, h, w), feats, accumulate=True).permute(0, 4, 1, 2, 3)

def Quickcumsum(feats, coords, ranks, B, D, H, W):
    cells = tuple(coords.long()[:, [3, 2, 0, 1]].T)
    return feats.new_zeros(B, D, H, W, feats.shape[1]).index_put(cells, feats, accumulate=True)

def voxel_pooling(geom_xyz, input_features, voxel_num):
    X, Y, Z = voxel_num.tolist()
    x, y, z = geom_xyz.long().unbind(-1)
    inside = (x >= 0) & (x < X) & (y >= 0) & (y < Y) & (z >= 0) & (z < Z)
    b, i = inside.nonzero(as_tuple=True)
    out = input_features.new_zeros(len(geom_xyz), Y, X, input_features.shape[-1])
    return out.index_put((b, y[inside], x[inside]), input_features[inside], accumulate=True).permute(0, 3, 1, 2)
"""
LIFT_SPLAT = """
def cumsum_trick(x, geom_feats, ranks):
    ends = torch.cat([ranks[1:] != ranks[:-1], ranks.new_ones(1).bool()])
    sums = x.cumsum(0)[ends]
    return torch.cat([sums[:1], sums[1:] - sums[:-1]]), geom_feats[ends]

class QuickCumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, {places}, ranks):
        ctx.save_for_backward(ranks)
        sums, last = cumsum_trick(x, {places}, ranks)
        ctx.mark_non_differentiable(last)
        return sums, last

    @staticmethod
    def backward(ctx, grad, _):
        return grad[torch.unique_consecutive(*ctx.saved_tensors, return_inverse=True)[1]], None, None
"""
LIFTED_BY_HAND = """
def voxel_pooling_inference(places, depth, context, number):
    rows = (depth[:, None] * context[:, :, None]).permute(0, 2, 3, 4, 1)
    return voxel_pooling(places.flatten(1, 4), rows.reshape(len(places), -1, rows.shape[-1]), number)
"""
TRUTH = library(PLAIN + LIFTED_BY_HAND, known=False)


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
    places = torch.randint(-1, 5, (B, 60, 3), generator=generator)
    return places, torch.randn(B, 60, C, generator=generator), torch.tensor([W, H, D])


def images(dtype):
    generator = torch.Generator().manual_seed(6)
    places = torch.randint(-1, 5, (B, 3, 4, 2, 3, 3), generator=generator).to(dtype)
    depth, context = torch.rand(B * 3, 4, 2, 3, generator=generator), torch.randn(B * 3, C, 2, 3, generator=generator)
    return places, depth, context, torch.tensor([W, H, D])


def sorted_rows():
    feats, places, *sizes = rows()
    ranks = places @ torch.tensor([W * D * B, D * B, B, 1])
    order = ranks.argsort()
    return feats[order], places[order], ranks[order], *sizes


INPUTS = {"bev_pool_v2": lifted, "bev_pool": rows, "Quickcumsum": sorted_rows, "voxel_pooling": frustum}


def is_right(name, function, args):
    """Compare output and gradients with float64 truth. The call is one operator."""
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    for got, true in zip(results(function, *args), results(getattr(TRUTH, name), *wide), strict=True):
        assert got.dtype == torch.float32
        assert_close(got.double(), true, rtol=1e-5, atol=1e-5)
    assert operators(function, *args) == POOL


OVER_EXTENSIONS = [
    ("bev_pool_v2", BEVDET, ("QuickCumsumCuda", "bev_pool_v2"), lifted),
    ("bev_pool", BEVFUSION, ("QuickCumsumCuda", "bev_pool"), rows),
    ("voxel_pooling", BEVDEPTH, ("VoxelPooling",), frustum),
]
INFERRED = "voxel_pooling_inference", IN_INFERENCE, ("VoxelPoolingInference",)
OVER_EXTENSIONS += [(*INFERRED, functools.partial(images, dtype)) for dtype in (torch.int32, torch.int64)]


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(("name", "source", "replaced", "inputs"), OVER_EXTENSIONS)
def test_over_an_extension(name, source, replaced, inputs, alone):
    """An older reference to `apply` calls the operator, too. A model's file may import the function alone."""
    module, model = library(source, types.ModuleType("ext")), types.ModuleType("a_model")
    function = vars(model)[name] = getattr(module, name)
    before = [dict(vars(kind)) for kind in vars(module).values() if isinstance(kind, type)]
    with mx_driving.patched(model if alone and len(replaced) > 1 else module) as done:
        assert done.replaced == tuple(f"a_library.{one}" for one in replaced)
        assert done.skipped == {}
        is_right(name, function, inputs())
    with pytest.raises(AttributeError, match="has no attribute"):
        function(*inputs())
    assert before == [dict(vars(kind)) for kind in vars(module).values() if isinstance(kind, type)]


@pytest.mark.parametrize("name", INPUTS)
def test_in_plain_torch(name):
    module = library(PLAIN)
    function, args = getattr(module, name), INPUTS[name]()
    expected = results(function, *args)
    with mx_driving.patched(module) as done:
        assert set(done.replaced) == {f"a_library.{one}" for one in INPUTS}
        is_right(name, function, args)
    assert operators(function, *args) == []
    assert_close(results(function, *args), expected)


SPLATS = [("QuickCumsum", "geom_feats", "lift_splat_function"), ("VoxelsSumming", "geometry", "fiery")]


@pytest.mark.parametrize(("function", "places", "form"), SPLATS)
def test_lift_splat(function, places, form):
    """FIERY has another name and another parameter. An autograd function in plain torch may be named, too."""
    module = library(LIFT_SPLAT.replace("{places}", places).replace("QuickCumsum", function), known=form != "fiery")
    x, places, ranks, *_ = sorted_rows()

    def forward():
        return [module.cumsum_trick(x, places, ranks), getattr(module, function).apply(x, places, ranks)]

    def all_results():
        outputs = forward()
        assert all(torch.equal(last, outputs[0][1]) for _, last in outputs)
        return [t for sums, _ in outputs for t in (sums, *torch.autograd.grad(sums.square().sum(), x))]

    x.requires_grad_()
    expected = all_results()
    forms = {getattr(module, function): form, module.cumsum_trick: "pool"} if form == "fiery" else None
    with mx_driving.patched(module, forms=forms) as done:
        assert set(done.replaced) == {"a_library.cumsum_trick", f"a_library.{function}"}
        assert_close(all_results(), expected, rtol=1e-5, atol=1e-5)
        assert operators(forward) == 2 * POOL
    assert operators(forward) == []


MEAN = """
class Mean(QuickCumsum):
    @staticmethod
    def forward(ctx, x, places, ranks):
        sums, last = QuickCumsum.forward(ctx, x, places, ranks)
        return sums / 2, last

    @staticmethod
    def backward(ctx, grad, of_last):
        return tuple(None if g is None else g / 2 for g in QuickCumsum.backward(ctx, grad, of_last))
"""
HALVES_FORWARD = MEAN[: MEAN.rindex("    @")]
HALVES_BACKWARD = """
class Mean(QuickCumsum):
    @staticmethod
    def backward(ctx, grad, _):
        return grad[torch.unique_consecutive(*ctx.saved_tensors, return_inverse=True)[1]] / 2, None, None
"""


@pytest.mark.parametrize("text", [MEAN, HALVES_FORWARD, HALVES_BACKWARD], ids=["both", "forward", "backward"])
@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
def test_a_subclass_of_a_known_autograd_function_runs_its_own_methods(text):
    module = library(LIFT_SPLAT.replace("{places}", "geom_feats"))
    exec(text, vars(module))
    x, places, ranks, *_ = sorted_rows()
    x = x.double()
    expected = [results(kind.apply, x, places, ranks) for kind in (module.QuickCumsum, module.Mean)]
    with mx_driving.patched(module) as done:
        assert "a_library.QuickCumsum" in done.replaced
        assert "a_library.Mean" not in done.replaced
        assert operators(module.QuickCumsum.apply, x, places, ranks) == POOL
        for kind, right in zip((module.QuickCumsum, module.Mean), expected, strict=True):
            assert_close(results(kind.apply, x, places, ranks), right)


@pytest.mark.parametrize("name", INPUTS)
def test_pools_that_have_no_gradient_have_none_afterwards(name):
    """MapTR's in plain torch read each number by `item`."""
    module, args = library(re.sub("    return (.*)", r"    return (\1).detach()", PLAIN)), INPUTS[name]()
    function, args = getattr(module, name), [a.requires_grad_() if floating(a) else a for a in args]
    with mx_driving.patched(module) as done:
        assert set(done.replaced) == {f"a_library.{one}" for one in INPUTS}
        assert recorded(function, *args) == POOL
        out = function(*args)
    assert not out.requires_grad
    assert_close(out, getattr(TRUTH, name)(*args).detach())


CHANGES = [
    *(("bev_pool_v2", "* feat", "+ feat", True), ("bev_pool", "h, w, d, b = coords", "w, h, d, b = coords", True)),
    *(("voxel_pooling", " & (z >= 0) & (z < Z)", "", True), ("voxel_pooling", "x, y, z = geom", "y, x, z = geom", True)),
    *((name, f"def {name}(", "def something(", False) for name in INPUTS),
]


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize(("name", "words", "others", "said"), CHANGES)
def test_what_computes_something_else_or_has_another_name_is_left_alone(name, words, others, said):
    """Another name is not looked at. A pool that is named is tried."""
    library(PLAIN)
    module = library(PLAIN.replace(words, others), known=False)
    with mx_driving.patched(module) as done:
        assert set(done.replaced) == {f"a_library.{one}" for one in INPUTS if one != name}
        assert list(done.skipped) == [f"a_library.{name}"] * said
        assert all(reason.endswith(f'forms={{{name}: "pool"}})') for reason in done.skipped.values())
    pool = getattr(module, name if said else "something")
    words = f"{name}: (its result .* differs|it does not run)" if said else "something: it looks like no core"
    with pytest.raises(ValueError, match=f"'pool' for {words}"):
        mx_driving.patch(module, forms={pool: "pool"})


@pytest.mark.parametrize("more", ["*more", "scale=1"])
def test_a_further_parameter_of_a_pool_or_of_an_autograd_function_is_not_known(more):
    plain = PLAIN.replace("def bev_pool(feats, coords, B, D, H, W", f"def bev_pool(feats, coords, B, D, H, W, {more}")
    library(PLAIN)
    module = library(plain, known=False)
    with pytest.warns(UserWarning, match="left a_library.bev_pool alone: its code is not known$"):
        mx_driving.patch(module).restore()
    with pytest.raises(ValueError, match="no known form has the parameters"):
        mx_driving.patch(module, forms={module.bev_pool: "pool"})
    source = IN_INFERENCE.replace("context_features, voxel_num):", f"context_features, voxel_num, {more}):")
    module = library(source, types.ModuleType("ext"), known=False)
    with pytest.raises(ValueError, match=r"a_library\.VoxelPoolingInference: its code is not known$"):
        mx_driving.patch(module)
    with pytest.raises(ValueError, match="no known form has the parameters"):
        mx_driving.patch(module, forms={module.VoxelPoolingInference: "pool"})


def test_unknown_code_that_calls_a_compiled_file_is_not_run():
    """A trial of compiled code might end the process."""
    source = "def bev_pool(feats, coords, B, D, H, W):\n    return ext.zeros(1)\n"
    extension = types.ModuleType("ext")
    vars(extension)["zeros"] = lambda *args: pytest.fail("was run")
    with pytest.raises(ValueError, match=r'its code is not known, .*forms=\{bev_pool: "pool"\}'):
        mx_driving.patch(library(source, extension, known=False))


@pytest.mark.parametrize("autocast", [False, True])
def test_half_is_summed_in_float32_where_bevdet_does(autocast):
    module = library(BEVDET, types.ModuleType("ext"))
    depth, feat, *rest = lifted()
    with mx_driving.patched(module), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = module.bev_pool_v2(depth.half(), feat.half(), *rest)
    assert out.dtype == torch.float32
    assert_close(out, TRUTH.bev_pool_v2(depth.half().float(), feat.half().float(), *rest))


def test_sizes_that_are_elements_of_a_tensor_and_points_outside():
    """BEVFusion's grid is a tensor. Points outside are left out."""
    module, (feats, places, *sizes) = library(BEVFUSION, types.ModuleType("ext")), rows()
    expected = TRUTH.bev_pool(feats[:40], places[:40], *sizes)
    places[40:50, 0], places[50:, 3] = H, -1
    with mx_driving.patched(module):
        assert_close(module.bev_pool(feats, places, B, *torch.tensor(sizes[1:])), expected)


@pytest.mark.parametrize(
    ("name", "index", "change"),
    [
        ("bev_pool", 1, lambda places: places + 0.5),
        ("bev_pool", 0, lambda feats: (feats * 8).long()),
        ("voxel_pooling", 0, lambda places: places + 0.5),
        ("bev_pool_v2", 2, lambda ranks: ranks.to(torch.int16)),
    ],
)
def test_what_operators_refuse_runs_the_pools_own_code(name, index, change):
    module, args = library(PLAIN), list(INPUTS[name]())
    args[index] = change(args[index])
    expected = getattr(module, name)(*args)
    with mx_driving.patched(module):
        assert torch.equal(getattr(module, name)(*args), expected)


def test_rows_without_a_place_are_the_pools_own_matter():
    module, over_extension, (feats, places, *sizes) = library(PLAIN), library(BEVFUSION, types.ModuleType("ext")), rows()
    with mx_driving.patched(module), pytest.raises(RuntimeError, match="shape mismatch"):
        module.bev_pool(feats, places[:40], *sizes)
    words = r"feats must have shape \(n=40, C\); got \(60, 3\)"
    with mx_driving.patched(over_extension), pytest.raises(ValueError, match=words):
        over_extension.QuickCumsumCuda.apply(feats, places[:40], places[:40, 0], *sizes)
