"""Calls of functions that sum points into cells: recorded, read as calls of bev_pool_v3, judged, and their mistakes named."""

import importlib
import json
import re
import sys
import types

import pytest
import torch
from recorded_calls import replay

import mx_driving
from mx_driving._vendor import limits
from mx_driving_portable import record

B, D, H, W, C = SHAPE = 2, 2, 5, 4, 8
BINS, ROWS = 6, 12  # depths of a pixel, pixels of all cameras

pytestmark = pytest.mark.usefixtures("wide_terminal")


def lifted(points=150):
    """Return depth, feat, ranks_depth, ranks_feat, ranks_bev of points sorted by cell. A pixel has every depth."""
    random = torch.Generator().manual_seed(0)
    depth = torch.rand(1, 2, BINS, 2, 3, generator=random)
    feat = torch.randn(1, 2, 2, 3, C, generator=random)
    of_depth = torch.randint(depth.numel(), (points,), generator=random)
    of_feat = of_depth // 36 * 6 + of_depth % 6
    cell = torch.randint(B * D * H * W, (points,), generator=random).sort().values
    return [depth, feat, *(t.int() for t in (of_depth, of_feat, cell))]


def summed(depth, feat, of_depth, of_feat, cell):
    """Compute the equation in float64, [b, d, h, w, c]."""
    rows = depth.double().flatten()[of_depth, None] * feat.double().view(-1, C)[of_feat]
    return torch.zeros(B * D * H * W, C, dtype=torch.float64).index_add(0, cell, rows).view(SHAPE)


def intervals(cell):
    lengths = torch.unique_consecutive(cell, return_counts=True)[1]
    return lengths.cumsum(0) - lengths, lengths


def judged(folder, right=True):
    result = replay(folder)
    assert (result.exit_code == 0) == right, result.output
    return result.output


def save(folder, form, tensors, **about):
    """Write the file of a call of a function of BEVDet's extension."""
    about = {"operator": "bev_pool_v3", "form": form, **about}
    metadata = {"format": str(record.FORMAT), "call": json.dumps(about)}
    folder.mkdir(exist_ok=True)
    torch.save({"metadata": metadata, "tensors": tensors}, folder / "call-000000.pt")


NAMES = ("depth", "feat", "ranks_depth", "ranks_feat", "ranks_bev")
LIFTED = dict(zip(NAMES, lifted(), strict=True))


def judged_output(folder, output, inputs=None):
    """Return what replay prints about the output of a forward."""
    inputs = inputs or lifted()
    starts, lengths = intervals(inputs[4])
    of_intervals = {"interval_starts": starts, "interval_lengths": lengths}
    save(folder, "bev_pool_v2_forward", {**dict(zip(NAMES, inputs, strict=True)), **of_intervals, "output": output.float()})
    return replay(folder).output


def test_an_output_that_was_not_zero_is_not_recorded(monkeypatch, tmp_path, capsys):
    extension = types.ModuleType("someones.bev_pool_v2_ext")
    extension.bev_pool_v2_forward = lambda *args: None
    monkeypatch.setitem(sys.modules, extension.__name__, extension)
    depth, feat, *ranks = lifted()
    with record.recording(tmp_path / "calls", every=1):
        extension.bev_pool_v2_forward(depth, feat, torch.ones(SHAPE), *ranks, *intervals(ranks[2])[::-1])
    assert not list((tmp_path / "calls").glob("*.pt"))
    assert "the last: output must be zero before a function adds to it; got other numbers" in capsys.readouterr().err


def test_names_of_ours_with_gradients(tmp_path):
    """Functions are called as libraries call them. The gradients of `bev_pool_v3` are recorded, too."""
    depth, feat, *ranks = lifted()
    leaves = [t.clone().requires_grad_() for t in (depth, feat)]
    starts, lengths = intervals(ranks[2])
    places = torch.cartesian_prod(*(torch.arange(n) for n in (H, W, D, B))).int()
    rows = torch.randn(len(places), C, requires_grad=True)
    geometry = torch.randint(-1, 5, (2, 3, 7, 3), dtype=torch.int32)
    frustum = torch.randn(2, 3, 7, C, requires_grad=True)
    with record.recording(tmp_path / "calls", every=1):
        outputs = [
            mx_driving.bev_pool_v3(*leaves, *ranks, SHAPE),
            mx_driving.bev_pool_v3(**{**dict.fromkeys(NAMES), "feat": rows, "ranks_bev": places, "bev_feat_shape": SHAPE}),
            mx_driving.bev_pool_v2(*leaves, *ranks, SHAPE, starts, lengths),
            mx_driving.bev_pool(rows, places, B, D, H, W),
            importlib.import_module("mx_driving.ops.bev_pool_v3").BEVPoolV3.apply(*leaves, *ranks, SHAPE),
            mx_driving.npu_voxel_pooling_train(geometry, frustum, torch.tensor([4, 5, 2])),
            mx_driving.npu_voxel_pooling_train(geometry, input_features=frustum, voxel_num=(4, 5, 2)),
        ]
        for out in outputs:
            out.sin().sum().backward()
    shown = judged(tmp_path / "calls")
    assert "7 calls are right" in shown
    assert shown.count("grad_feat") == 7
    assert shown.count("grad_depth") == 3


def test_limits_of_the_environment_do_not_hold_for_recorded_calls(tmp_path):
    """A recorded call with 5 channels is judged, although the limits refuse it."""
    rows, places = torch.randn(2, 5), torch.tensor([[0, 1, 1, 0], [4, 3, 1, 1]])
    with record.recording(tmp_path / "calls", every=1):
        mx_driving.bev_pool(rows, places, B, D, H, W)
    with limits.atlas_limits():
        with pytest.raises(ValueError, match="multiple of 8"):
            mx_driving.bev_pool(rows, places, B, D, H, W)
        judged(tmp_path / "calls")
        assert limits.open_releases


def test_stand_ins_of_extensions(extension, tmp_path):
    depth, feat, *ranks = lifted()
    starts, lengths = intervals(ranks[2])
    by_pixel = [r[ranks[1].argsort()] for r in ranks]
    places, one = torch.tensor([[0, 1, 1, 0], [4, 3, 1, 1]]), torch.ones(2, dtype=torch.long)
    geometry, number = torch.randint(-1, 4, (2, 3, BINS, 2, 3, 3), dtype=torch.int32), torch.tensor([4, 5, 1])
    memo = torch.full((2, 18 * BINS, 3), -1, dtype=torch.int32)
    rows, out = torch.randn(2, 18 * BINS, C), torch.zeros(2, 5, 4, C)
    with record.recording(tmp_path / "calls", every=1):
        pool = extension("bev_pool_v2_ext")
        pool.bev_pool_v2_forward(depth, feat, torch.zeros(SHAPE), *ranks, lengths, starts)
        grads = torch.zeros_like(depth), torch.zeros_like(feat)
        pool.bev_pool_v2_backward_opt(torch.randn(SHAPE), *grads, depth, feat, *by_pixel, lengths, starts)
        pool = extension("bev_pool_ext")
        pool.bev_pool_forward(torch.randn(2, C), places, one, one.cumsum(0) - 1, B, D, H, W)
        pool.bev_pool_backward(torch.randn(SHAPE), places, one, one.cumsum(0) - 1, B, D, H, W)
        train = extension("voxel_pooling_train_ext").voxel_pooling_train_forward_wrapper
        train(2, 18 * BINS, C, *number, geometry.view(2, -1, 3), rows, out, memo)
        infer = extension("voxel_pooling_inference_ext").voxel_pooling_inference_forward_wrapper
        depth, context = torch.rand(6, BINS, 2, 3), torch.randn(6, C, 2, 3)
        infer(2, 3, BINS, 2, 3, C, 4, 5, 1, geometry, depth, context, torch.zeros(2, 5, 4, C))
    shown, words = judged(tmp_path / "calls"), ("6 calls are right", "150, sorted by cell", "not sorted by cell", "2x2x5x4")
    assert [word for word in words if word not in shown] == []


def of_points(keep):
    """Return a forward that sums only some points of each run of a cell."""

    def spoilt(depth, feat, *ranks):
        runs = [range(s, s + n) for s, n in zip(*(t.tolist() for t in intervals(ranks[2])), strict=True)]
        points = torch.tensor([point for run in runs for point in keep(run)])
        return summed(depth, feat, *(r[points] for r in ranks))

    return spoilt


def exchanged(depth, feat, of_depth, of_feat, cell):
    inside = of_depth < ROWS
    return summed(depth, feat, *(t[inside] for t in (of_feat, of_depth, cell)))


def overwritten(depth, feat, *ranks):
    """Let each run of a cell write the cell, as a CUDA kernel does."""
    out, cell = torch.zeros(SHAPE), ranks[2]
    for start, length in zip(*(t.tolist() for t in intervals(cell)), strict=True):
        sums = summed(depth, feat, *(r[start : start + length] for r in ranks))
        out.view(-1, C)[cell[start]] = sums.view(-1, C)[cell[start]].float()
    return out


MISTAKES = {
    "ranks_depth and ranks_feat are exchanged": exchanged,
    "depth is not used": lambda depth, *rest: summed(torch.ones_like(depth), *rest),
    "H and W of the cells are exchanged": lambda *inputs: summed(*inputs).view(B, D, W, H, C).transpose(2, 3),
    "the output has its channels last": lambda *inputs: summed(*inputs).reshape(B, C, D, H, W).movedim(1, -1),
    "a cell has its last point alone": of_points(lambda run: run[-1:]),
    "a run of points of one cell has its first point alone": of_points(lambda run: run[:1]),
    "the first point of each run of one cell is left out": of_points(lambda run: run[1:]),
    "the last point of each run of one cell is left out": of_points(lambda run: run[:-1]),
    "it is zero everywhere": lambda *inputs: torch.zeros(SHAPE),
    "it is 2 times the truth": lambda *inputs: 2 * summed(*inputs),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named(tmp_path, words):
    assert f"wrong: call-000000, output: {words}" in judged_output(tmp_path / "calls", MISTAKES[words](*lifted()).contiguous())


def test_points_that_are_not_sorted(tmp_path):
    """The points of each camera are sorted. A kernel that writes the sum of each run loses the sums of earlier cameras."""
    depth, feat, *ranks = lifted()
    order = torch.cat([torch.arange(150)[ranks[1] // 6 == camera] for camera in (0, 1)])
    inputs = depth, feat, *(r[order] for r in ranks)
    assert "1 call is right" in judged_output(tmp_path / "right", summed(*inputs), inputs)
    assert "output: a cell has its last run of points alone" in judged_output(tmp_path / "calls", overwritten(*inputs), inputs)


def test_a_gradient_that_is_wrong(tmp_path):
    depth, feat, *ranks = lifted()
    grad, grads = torch.randn(SHAPE), {}
    for name, factors in (("grad_depth", depth), ("grad_feat", torch.ones_like(depth))):
        leaves = {"grad_depth": factors.clone().requires_grad_(), "grad_feat": feat.clone().requires_grad_()}
        (grads[name],) = torch.autograd.grad(summed(*leaves.values(), *ranks), leaves[name], grad.double())
    of_intervals = dict(zip(("interval_starts", "interval_lengths"), intervals(ranks[2]), strict=True))
    save(tmp_path / "calls", "bev_pool_v2_backward", {**LIFTED, **of_intervals, "grad_output": grad, **grads})
    assert "wrong: call-000000, grad_feat: depth is not used" in judged(tmp_path / "calls", False)


def test_a_function_of_a_name_of_its_own(monkeypatch, tmp_path):
    """It has the parameters of bev_pool_v3."""
    own = types.ModuleType("own_ops")
    own.lift = lambda *args: mx_driving.bev_pool_v3(*args)
    monkeypatch.setitem(sys.modules, "own_ops", own)
    depth, feat, *ranks = lifted()
    with record.recording(tmp_path / "calls", every=1, functions={"own_ops.lift": "bev_pool_v3"}):
        own.lift(depth, feat, *ranks, SHAPE)
    assert "1 call is right" in judged(tmp_path / "calls")


EDITED = {
    "no such form": ({"form": "lift"}, {}, "the form of call-000000 must be one of bev_pool_v3, BEVPoolV3.apply"),
    "no sizes": ({"sizes": {}}, {}, "call-000000 must hold bev_feat_shape; got depth"),
    "a float rank": ({}, {"ranks_bev": torch.rand(150)}, "got ranks_bev must have dtype int32 or int64"),
    "another output": ({}, {"output": torch.rand(3)}, "floating, of shape (2, 8, 2, 5, 4); got (3,)"),
    "ranks_bev": ({}, {"ranks_bev": torch.full((150,), -1)}, "got ranks_bev[0] must be one of the 80 cells; got -1"),
}


@pytest.mark.parametrize("what", EDITED)
def test_what_cannot_be_judged_is_one_sentence(tmp_path, what):
    facts, tensors, words = EDITED[what]
    about = {"form": "bev_pool_v3", "sizes": {"bev_feat_shape": SHAPE}, **facts}
    output = summed(*LIFTED.values()).movedim(-1, 1).float()
    save(tmp_path, tensors={**LIFTED, "output": output, **tensors}, **about)
    (sentence,) = re.findall("not read: (.*)", judged(tmp_path, False))
    assert words in sentence


@pytest.mark.parametrize("axis", ["points", "channels", "cells"])
def test_empty_calls_are_right(tmp_path, axis):
    depth, feat, *ranks = lifted()
    ranks = [r[: 0 if axis != "channels" else None] for r in ranks]
    shape = (B, D, 0 if axis == "cells" else H, W, 0 if axis == "channels" else C)
    feat = feat[..., : shape[-1]].clone().requires_grad_()
    with record.recording(tmp_path / "calls", every=1):
        mx_driving.bev_pool_v3(depth, feat, *ranks, shape).sum().backward()
    assert "1 call is right" in judged(tmp_path / "calls")
