"""The names of bev_pool: the vendor's extension, and stand-ins for the extensions of BEVDet, BEVFusion and BEVDepth."""

import functools
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from refusals import said
from torch.autograd import gradcheck, gradgradcheck
from torch.testing import assert_close as close

import mx_driving
from mx_driving import _C
from mx_driving.ops.bev_pool_v3 import BEVPoolV3

SHAPE = B, D, H, W, C = 2, 2, 4, 5, 8


def lifted(points=60, dtype=torch.float32):
    """depth, feat, ranks_depth, ranks_feat, ranks_bev of 3 cameras and 6 depths, sorted by cell."""
    depth, feat = torch.rand(B, 3, 6, 2, 3, dtype=dtype), torch.randn(B, 3, 2, 3, C, dtype=dtype)
    ranks = [torch.randint(0, size, (points,), dtype=torch.int32) for size in (B * 108, B * 18, B * D * H * W)]
    return depth.requires_grad_(), feat.requires_grad_(), *ranks[:2], ranks[2].sort().values


def intervals(ranks):
    """Return the first point and the length of each run of equal ranks."""
    lengths = ranks.unique_consecutive(return_counts=True)[1].int()
    return (lengths.cumsum(0) - lengths).int(), lengths


def plain(depth, feat, ranks_depth, ranks_feat, ranks_bev):
    rows = depth.flatten()[ranks_depth][:, None] * feat.reshape(-1, C)[ranks_feat]
    return rows.new_zeros(B * D * H * W, C).index_add(0, ranks_bev, rows).view(SHAPE)


def results(out, *leaves):
    """Return output and gradients, for a grad_output that rises from -1 to 1, and this grad_output."""
    direction = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(SHAPE)
    return [out.detach(), *torch.autograd.grad(out, leaves, direction)], direction


def places_of(cells):
    """Return (h, w, d, b) of each cell."""
    b, d, h, w = torch.unravel_index(cells.long(), (B, D, H, W))
    return torch.stack([h, w, d, b], 1).int()


def test_extension_functions():
    """mx_driving._C: channels last, no graph, no autocast, gradients by functions of their own."""
    inputs = lifted()
    expected, grad = results(plain(*inputs), *inputs[:2])
    starts, lengths = intervals(inputs[4])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outs = [_C.npu_bev_pool_v3(*inputs, B, D, H, W), _C.npu_bev_pool_v2(*inputs, lengths, starts, B, D, H, W)]
        half = _C.npu_bev_pool_v3(*(i.half() if i.is_floating_point() else i for i in inputs), B, D, H, W)
    close(outs, [expected[0]] * 2)
    assert half.dtype == torch.float16
    assert not any(out.requires_grad for out in (*outs, half))
    close(_C.npu_bev_pool_v3_backward(grad, *inputs), expected[1:])
    order = inputs[3].argsort()  # the vendor's backward sorts by rows of feat
    by_row = *inputs[:2], *(ranks[order] for ranks in inputs[2:])
    starts, lengths = intervals(by_row[3])
    close(_C.npu_bev_pool_v2_backward(grad, *by_row, lengths, starts, B, D, H, W), expected[1:])


def test_extension_functions_without_depth():
    cells = torch.randint(0, B * D * H * W, (16,)).sort().values
    feat, places, (starts, lengths) = torch.randn(16, C, requires_grad=True), places_of(cells), intervals(cells)
    expected, grad = results(feat.new_zeros(B * D * H * W, C).index_add(0, cells, feat).view(SHAPE), feat)
    sizes = B, D, H, W
    close([_C.npu_bev_pool(feat, places, lengths, starts, *sizes)], expected[:1])
    close([_C.npu_bev_pool_backward(grad, places, lengths, starts, *sizes)], expected[1:])
    images = torch.randn(B, C, 5, 4)  # the vendor's test: channels are the second axis, rows those of view(-1, C)
    close([_C.npu_bev_pool_v3(None, images, None, None, places, *sizes)], [plain_rows(images, cells)])
    depth, found = _C.npu_bev_pool_v3_backward(grad, None, images, None, None, places)
    assert depth is None
    close([found.reshape(-1, C)[:16]], expected[1:])
    assert not found.reshape(-1, C)[16:].any()


def plain_rows(feat, cells):
    return feat.new_zeros(B * D * H * W, C).index_add(0, cells, feat.reshape(-1, C)[: len(cells)]).view(SHAPE)


def test_autograd_function_by_hand_and_derived():
    """BEVPoolV3 takes a Mock for ctx, as in the vendor's test. A derived class has second derivatives."""

    class Derived(BEVPoolV3):
        @staticmethod
        def backward(ctx, grad):
            return BEVPoolV3.backward(ctx, grad)

    inputs = lifted(12, torch.float64)
    expected, grad = results(plain(*inputs), *inputs[:2])
    ctx = Mock()
    close([BEVPoolV3.forward(ctx, *inputs, SHAPE)], expected[:1])
    ctx.saved_tensors = ctx.save_for_backward.call_args.args
    assert all(t is inputs[i] for t, i in zip(ctx.saved_tensors, (0, 1, 3, 2, 4), strict=True))  # the vendor's order
    found = BEVPoolV3.backward(ctx, grad)
    close(found[:2], expected[1:])
    assert found[2:] == (None,) * 4
    assert not any(t.requires_grad for t in found[:2])
    for function in (BEVPoolV3, Derived):
        run = functools.partial(lambda apply, depth, feat: apply(depth, feat, *inputs[2:], SHAPE), function.apply)
        assert gradcheck(run, inputs[:2])
        assert gradgradcheck(run, inputs[:2], fast_mode=True)


GEOMETRY = torch.tensor([[[0, 0, 0], [2, 1, 0], [-1, 0, 0], [0, 2, 0]], [[0, 0, 1], [2, 1, 0], [3, 0, 0], [2, 1, 0]]]).int()
INSIDE = [True, True, False, False, False, True, False, True]  # of 3 x 2 x 1 voxels
CELLS = [0, 5, 11, 11]


@pytest.mark.parametrize("number", [[3, 2, 1], torch.tensor([3, 2, 1])])
def test_voxel_pooling_leaves_out_points_outside_the_grid(number):
    inside = torch.tensor(INSIDE).view(2, 4)
    feat = torch.randn(2, 4, 5).masked_fill(~inside[..., None], torch.nan).requires_grad_()
    expected = torch.zeros(12, 5).index_add(0, torch.tensor(CELLS), feat[inside]).view(2, 2, 3, 5).permute(0, 3, 1, 2)
    grad = torch.randn(2, 5, 2, 3)
    out = mx_driving.npu_voxel_pooling_train(GEOMETRY, feat, number)
    close([out], [expected])
    close(torch.autograd.grad(out, feat, grad), torch.autograd.grad(expected, feat, grad))
    frustum = mx_driving.npu_voxel_pooling_train(GEOMETRY.view(2, 2, 2, 3), feat.view(2, 2, 2, 5).double(), number)
    close([frustum], [expected.double()])
    for empty in ((0, 4), (2, 0)):
        none = mx_driving.npu_voxel_pooling_train(torch.zeros(*empty, 3).int(), torch.rand(*empty, 5), number)
        assert torch.equal(none, torch.zeros(empty[0], 5, 2, 3))


@pytest.mark.parametrize("backward", ["bev_pool_v2_backward", "bev_pool_v2_backward_opt"])
def test_bevdet(extension, backward):
    """The caller makes the outputs. backward gets points sorted by row of feat, and the intervals of these rows."""
    pool, inputs = extension("bev_pool_v2_ext"), lifted()
    expected, grad = results(plain(*inputs), *inputs[:2])
    starts, lengths = intervals(inputs[4])
    found = torch.zeros(SHAPE), torch.zeros_like(inputs[0]), torch.zeros_like(inputs[1])
    assert pool.bev_pool_v2_forward(*inputs[:2], found[0], *inputs[2:], lengths, starts) is None
    order = inputs[3].argsort()
    ranks = [r[order] for r in inputs[2:]]
    starts, lengths = intervals(ranks[1])
    assert getattr(pool, backward)(grad, *found[1:], *inputs[:2], *ranks, lengths, starts) is None
    close(found, expected)


@pytest.mark.parametrize("sizes", [(B, D, H, W), (B, *torch.tensor([D, H, W])), (B, *np.array([D, H, W]))])
def test_bevfusion(extension, sizes):
    """Programs pass the sizes of the grid as ints, or as elements of a tensor or of a NumPy array."""
    pool, cells = extension("bev_pool_ext"), torch.randint(0, B * D * H * W, (30,)).sort().values
    feat, places, (starts, lengths) = torch.randn(30, C, requires_grad=True), places_of(cells), intervals(cells)
    expected, grad = results(plain_rows(feat, cells), feat)
    out = pool.bev_pool_forward(feat, places, lengths, starts, *sizes)
    close([out, pool.bev_pool_backward(grad, places, lengths, starts, *sizes)], expected)


@pytest.mark.parametrize("name", ["voxel_pooling_train", "voxel_pooling"])
def test_bevdepth_in_training(extension, name):
    feat, number = torch.randn(2, 4, 5, requires_grad=True), torch.tensor([3, 2, 1])
    output, memo = torch.zeros(2, 2, 3, 5), torch.full((2, 4, 3), -1, dtype=torch.int32)
    function = getattr(extension(f"{name}_ext"), f"{name}_forward_wrapper")
    assert function(2, 4, 5, *number, GEOMETRY, feat, output, memo) == 1
    close([output.permute(0, 3, 1, 2)], [mx_driving.npu_voxel_pooling_train(GEOMETRY, feat, number).detach()])
    inside = torch.tensor(INSIDE)
    assert memo.view(-1, 3)[inside].tolist() == [[0, 0, 0], [0, 1, 2], [1, 1, 2], [1, 1, 2]]
    assert (memo.view(-1, 3)[~inside] == -1).all()


def test_bevdepth_in_inference(extension):
    """The function multiplies depth [B * cams, D, H, W] by context [B * cams, C, H, W]."""
    geometry, number = torch.randint(-1, 4, (2, 3, 4, 2, 3, 3), dtype=torch.int32), torch.tensor([3, 2, 2])
    depth, context = torch.rand(6, 4, 2, 3), torch.randn(6, C, 2, 3)
    rows = (depth[:, None] * context[:, :, None]).permute(0, 2, 3, 4, 1).reshape(2, -1, C)
    output = torch.zeros(2, 2, 3, C)
    sizes = (2, 3, 4, 2, 3, C, *number)
    extension("voxel_pooling_inference_ext").voxel_pooling_inference_forward_wrapper(*sizes, geometry, depth, context, output)
    close([output.permute(0, 3, 1, 2)], [mx_driving.npu_voxel_pooling_train(geometry, rows, number)])


# Each name that sums rows at places (h, w, d, b), as a function of feat and places.
PLACED = {
    "bev_pool": lambda feat, places: mx_driving.bev_pool(feat, places, B, D, H, W),
    "bev_pool_v3": lambda feat, places: mx_driving.bev_pool_v3(None, feat, None, None, places, SHAPE),
    "BEVPoolV3": lambda feat, places: BEVPoolV3.apply(None, feat, None, None, places, SHAPE),
    "BEVPoolV3.forward": lambda feat, places: BEVPoolV3.forward(Mock(), None, feat, None, None, places, SHAPE),
    "_C.npu_bev_pool": lambda feat, places: _C.npu_bev_pool(feat, places, FIRST, FIRST, B, D, H, W),
    "_C.npu_bev_pool_v3": lambda feat, places: _C.npu_bev_pool_v3(None, feat, None, None, places, B, D, H, W),
    "_C.npu_bev_pool_backward": lambda feat, places: _C.npu_bev_pool_backward(GRAD, places, FIRST, FIRST, B, D, H, W),
    "_C.npu_bev_pool_v3_backward": lambda feat, places: _C.npu_bev_pool_v3_backward(GRAD, None, feat, None, None, places),
}
FIRST, GRAD = torch.zeros(1).int(), torch.ones(SHAPE)
NO_INDEX = [torch.float32, torch.float64, torch.bfloat16, torch.bool, torch.complex64, torch.int16, torch.uint8]


@pytest.mark.parametrize("dtype", NO_INDEX, ids=str)
@pytest.mark.parametrize("name", PLACED)
def test_places_are_int32_or_int64(name, dtype):
    """Truncated, -0.5 would count in cell 0."""
    with pytest.raises(TypeError, match=r"^(geom_feat|ranks_bev) must have dtype int32 or int64; got "):
        PLACED[name](torch.rand(3, C), torch.zeros(3, 4, dtype=dtype))


@pytest.mark.parametrize("dtype", NO_INDEX, ids=str)
def test_voxels_and_intervals_are_int32_or_int64(extension, dtype):
    voxels, intervals = GEOMETRY.to(dtype), FIRST.to(dtype)
    feat, places, output = torch.rand(2, 4, 5), torch.zeros(3, 4).int(), torch.zeros(2, 2, 3, 5)
    train = extension("voxel_pooling_train_ext").voxel_pooling_train_forward_wrapper
    inference = extension("voxel_pooling_inference_ext").voxel_pooling_inference_forward_wrapper
    pool, memo = extension("bev_pool_ext"), torch.zeros(2, 4, 3).int()
    calls = (
        lambda: mx_driving.npu_voxel_pooling_train(voxels, feat, (3, 2, 1)),
        lambda: train(2, 4, 5, 3, 2, 1, voxels, feat, output, memo),
        lambda: inference(2, 1, 4, 1, 1, 5, 3, 2, 1, voxels, torch.rand(2, 4, 1, 1), torch.rand(2, 5, 1, 1), output),
        lambda: pool.bev_pool_forward(torch.rand(3, C), places, intervals, FIRST, B, D, H, W),
        lambda: pool.bev_pool_backward(GRAD, places, FIRST, intervals, B, D, H, W),
        lambda: _C.npu_bev_pool_v2_backward(GRAD, *lifted(), intervals, intervals, B, D, H, W),
        lambda: mx_driving.bev_pool_v2(*lifted(), SHAPE, FIRST, intervals),
    )
    for call in calls:
        with pytest.raises(TypeError, match=r"^(geom_xyz|interval_\w+) must have dtype int32 or int64; got "):
            call()


@pytest.mark.parametrize("name", PLACED)
def test_a_place_outside_is_named_by_the_caller_s_argument(name):
    """The sentence does not name the rank that is computed from the place."""
    places = torch.tensor([[0, 0, 0, 0], [3, 4, 1, 2], [0, -1, 0, 0]])
    argument = "geom_feat" if name in ("bev_pool", "_C.npu_bev_pool") else "ranks_bev"
    sentence = f"{argument}[1] must lie in (H=4, W=5, D=2, B=2); got (3, 4, 1, 2)"
    assert said(lambda: PLACED[name](torch.rand(3, C), places)) == sentence


def test_without_channels_the_output_is_empty():
    places = torch.zeros(3, 4).long()
    assert PLACED["bev_pool"](torch.rand(3, 0), places).shape == (B, 0, D, H, W)
    feat = torch.rand(4, 0, requires_grad=True)
    mx_driving.bev_pool_v3(None, feat, None, None, places, (B, D, H, W, 0)).sum().backward()
    assert feat.grad.shape == (4, 0)


HUGE = 2**40, 2**40, 2, 3
NONE, FLAT = torch.zeros(0, 4).long(), torch.zeros(0).long()
FEW = "output must have fewer than 2**48 elements, an axis of 0 counted as 1; got "
META, THREE = FIRST.to("meta"), torch.zeros(3, 4).int()


def voxels(**changes):
    given = {"geom_xyz": GEOMETRY, "input_features": torch.rand(2, 4, 5), "voxel_num": (3, 2, 1), **changes}
    return lambda: mx_driving.npu_voxel_pooling_train(**given)


def v2(starts, lengths, *ranks):
    return lambda: mx_driving.bev_pool_v2(*lifted()[: 5 - len(ranks)], *ranks, SHAPE, starts, lengths)


def v3(shape=SHAPE, **changes):
    given = dict(zip(("depth", "feat", "ranks_depth", "ranks_feat", "ranks_bev"), lifted(), strict=True)) | changes
    return lambda: mx_driving.bev_pool_v3(**given, bev_feat_shape=shape)


# A sentence that ends with a space goes on. torch.ops raises RuntimeError.
REFUSED = [
    *((v3((*SHAPE[:4], c)), f"feat must have shape (..., C={c}); got (2, 3, 2, 3, 8)") for c in (9, 7)),
    (v3((2, 1)), "bev_feat_shape must be five ints, (B, D, H, W, C); got (2, 1)"),
    (v3((2, 2, -4, 5, 8)), "bev_feat_shape must have no negative size; got (2, 2, -4, 5, 8)"),
    (v3((2**22, 2**22, 1, 7, 8)), "output must have fewer than 2**48 elements; got (4194304, 8, 4194304, 1, 7)"),
    (v3(ranks_feat=FLAT), "ranks_feat must have shape (n=60,); got (0,)"),
    (v3(ranks_bev=torch.zeros(60)), "ranks_bev must have dtype int32 or int64; got float32"),
    (v3(ranks_depth=None), "ranks_depth must be a torch.Tensor; got NoneType"),
    (v3(depth=None), "ranks_bev must be 2D when running without depth"),
    (v3(depth=None, ranks_bev=torch.zeros(60, 3).int()), "ranks_bev must have shape (n, 4); got (60, 3)"),
    (v3(depth=None, ranks_bev=torch.zeros(60, 4).int()), "feat must hold 60 or more rows of C=8; got shape (2, 3, 2, 3, 8)"),
    (voxels(geom_xyz=[0]), "geom_xyz must be a torch.Tensor, as torch.tensor(geom_xyz) makes it; got list"),
    (voxels(geom_xyz=GEOMETRY.float()), "geom_xyz must have dtype int32 or int64; got float32"),
    (voxels(geom_xyz=GEOMETRY[..., :2]), "geom_xyz must have shape (B, ..., 3); got (2, 4, 2)"),
    (voxels(geom_xyz=GEOMETRY.to("meta")), "geom_xyz must be on input_features's device (cpu); got meta"),
    (voxels(input_features=torch.rand(2, 3, 5)), "input_features must have shape (2, 4, C); got (2, 3, 5)"),
    (voxels(input_features=torch.rand(4, 2, 5)), "input_features must have shape (2, 4, C); got (4, 2, 5)"),
    *((voxels(voxel_num=n), f"voxel_num must be three ints, (X, Y, Z); got {n}") for n in (3, (3, 2), (3, 2, 1.5))),
    (voxels(voxel_num=(3, -2, 1)), "voxel_num must have no negative size; got (3, -2, 1)"),
    (voxels(voxel_num=(2**63, 2, 1)), "voxel_num must have sizes below 2**48; got "),
    (lambda: _C.npu_bev_pool_v3_backward(torch.rand(2, 8), *lifted()), "grad_out must have shape (B, D, H, W, C); got (2, 8)"),
    (lambda: _C.npu_bev_pool_v3_backward(torch.rand(B, D, H, W, 3), *lifted()),
     "feat must have shape (..., C=3); got (2, 3, 2, 3, 8)"),
    (lambda: _C.npu_bev_pool_v3(None, torch.rand(8), None, None, THREE, 1, 1, 2, 2), "feat must have shape (n, C); got (8,)"),
    (lambda: _C.npu_bev_pool_v3(torch.rand(1), torch.tensor(1.0), *[FIRST] * 3, 1, 1, 2, 2),
     "feat must have shape (..., C); got ()"),
    # bev_pool_v3 alone reads the first rows of a longer view.
    *((lambda name=name, shape=shape: PLACED[name](torch.rand(shape), THREE), "feat must have shape (n=3, C); got ")
      for name in ("bev_pool", "_C.npu_bev_pool") for shape in ((4, C), (2, C), (3, 1, C), (3 * C,), (3, C, 1))),
    (lambda: mx_driving.bev_pool(torch.rand(0, 0), NONE, *HUGE), FEW),
    (lambda: mx_driving.bev_pool_v3(None, torch.rand(0, 0), None, None, NONE, (*HUGE, 0)), FEW),
    (lambda: torch.ops.mx_driving.bev_pool_v3(torch.rand(0, 0), torch.rand(0), *[FLAT] * 3, *HUGE), FEW),
    (lambda: mx_driving.bev_pool(torch.rand(0, 1), NONE, 2**63, 1, 1, 1), "bev_feat_shape must have sizes below 2**48; got "),
    (lambda: mx_driving.bev_pool(torch.rand(0, 1), NONE.to("meta"), 1, 1, 1, 1),
     "geom_feat must be on feat's device (cpu); got meta"),
    (v2(META, FIRST), "interval_starts must be on ranks_bev's device (cpu); got meta"),
    (v2(FIRST, FIRST, *[FIRST[0]] * 3), "ranks_bev must have shape (n,); got ()"),
    *((v2(torch.tensor([start]), torch.tensor([n])), f"interval_starts[0] must leave room for {n} of 60 points; got {start}")
      for start, n in ((0, 61), (-1, 1), (2**62, 2**62), (1, 2**63 - 1))),
    (v2(torch.tensor([0, 4]), torch.tensor([1, -1])), "interval_lengths[1] must not be negative; got -1"),
    (v2(torch.tensor([0, 1]), torch.tensor([1])), "interval_lengths must have shape (n_intervals=2,); got (1,)"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "sentence"), REFUSED)
def test_refusals(call, sentence):
    with pytest.raises((RuntimeError, TypeError, ValueError)) as refused:
        call()
    found = str(refused.value)
    assert found.startswith(sentence) if sentence.endswith(" ") else found == sentence


def test_every_name_serves_meta_tensors():
    """The shape of the output does not depend on data, so that meta tensors suffice."""
    depth, feat, *ranks = (t.detach().to("meta") for t in lifted())
    start = FIRST.to("meta")
    outputs = [mx_driving.bev_pool_v3(depth, feat, *ranks, SHAPE)]
    outputs += [mx_driving.bev_pool_v2(depth, feat, *ranks, SHAPE, start, start)]
    outputs += [mx_driving.bev_pool(torch.rand(3, C, device="meta"), THREE.to("meta"), B, D, H, W)]
    assert [(out.device.type, *out.shape) for out in outputs] == [("meta", B, C, D, H, W)] * 3
    out = mx_driving.npu_voxel_pooling_train(GEOMETRY.to("meta"), torch.rand(2, 4, 5, device="meta"), (3, 2, 1))
    assert (out.device.type, *out.shape) == ("meta", 2, 5, 2, 3)


@pytest.mark.parametrize("kind", [set, dict.fromkeys, bytes, iter, lambda sizes: range(5), torch.tensor, None.__class__])
def test_only_a_tuple_or_a_list_is_a_shape(kind):
    """A set of five ints would be taken in the order of its hashes."""
    shape = kind((0, 4, 1, 2, 3)) if kind is not type(None) else None
    rank = torch.zeros(1, dtype=torch.long)
    with pytest.raises(ValueError, match=r"^bev_feat_shape must be five ints, \(B, D, H, W, C\); got "):
        mx_driving.bev_pool_v3(torch.ones(1), torch.ones(1, 3), rank, rank, rank, shape)


def test_a_single_row_may_have_one_axis():
    depth, feat, rank, zero = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 3.0]), torch.tensor([0, 1]), torch.tensor([0, 0])
    expected = torch.tensor([[0.5, 1.5], [2.0, 6.0]]).T.reshape(1, 2, 1, 1, 2)
    intervals = torch.tensor([0, 1]), torch.tensor([1, 1])
    for call in (
        lambda f: mx_driving.bev_pool_v3(depth, f, rank, zero, rank, (1, 1, 1, 2, 2)),
        lambda f: mx_driving.bev_pool_v2(depth, f, rank, zero, rank, (1, 1, 1, 2, 2), *intervals),
        lambda f: BEVPoolV3.apply(depth, f, rank, zero, rank, (1, 1, 1, 2, 2)).permute(0, 4, 1, 2, 3),
    ):
        leaf = feat.clone().requires_grad_()
        output = call(leaf)
        assert torch.equal(output, expected)
        (output * expected).sum().backward()
        assert torch.equal(leaf.grad, torch.tensor([0.5 * 0.5 + 2 * 2, 0.5 * 1.5 + 2 * 6]))


RANK, FOUR, OF_FOUR = torch.arange(4), (torch.rand(4), torch.rand(4, 8)), (1, 1, 2, 2, 8)
MAPPED = [  # a call, and what vmap maps
    (lambda s: mx_driving.bev_pool_v2(*FOUR, *[RANK] * 3, OF_FOUR, s, s + 4), torch.zeros(1).long()),
    (lambda r: mx_driving.bev_pool_v3(*FOUR, RANK, RANK, r, OF_FOUR), RANK),
    (lambda p: mx_driving.bev_pool(FOUR[1], p, 1, 1, 2, 2), torch.zeros(4, 4).long()),
    (lambda p: mx_driving.npu_voxel_pooling_train(p[None, :, :3], FOUR[1][None], (2, 2, 1)), torch.zeros(4, 4).long()),
]


@pytest.mark.parametrize(("call", "mapped"), MAPPED)
def test_vmap_over_nothing_is_refused_in_a_sentence(call, mapped):
    assert torch.vmap(call)(mapped.expand(2, *mapped.shape)).shape[0] == 2
    with pytest.raises(ValueError, match=r"^in_dims must name axes with entries where vmap calls .* for each; got size 0$"):
        torch.vmap(call)(mapped.expand(0, *mapped.shape))
