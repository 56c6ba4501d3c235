"""Calls of functions that sum points into cells: recorded, read as calls of bev_pool_v3, judged, and their mistakes named."""

from __future__ import annotations

import importlib
import json
import re
import sys
import types

import numpy as np
import pytest
import torch
from recorded_calls import replay

import mx_driving
from mx_driving import compat
from mx_driving_portable import record

B, D, H, W, C = SHAPE = 2, 2, 5, 4, 8
BINS, ROWS = 6, 12  # depths of a pixel, pixels of all cameras


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")


def lifted(points=150):
    """depth, feat, ranks_depth, ranks_feat, ranks_bev of sorted cells; a pixel has every depth."""
    random = torch.Generator().manual_seed(0)
    depth = torch.rand(1, 2, BINS, 2, 3, generator=random)
    feat = torch.randn(1, 2, 2, 3, C, generator=random)
    of_depth = torch.randint(depth.numel(), (points,), generator=random)
    of_feat = of_depth // 36 * 6 + of_depth % 6
    cell = torch.randint(B * D * H * W, (points,), generator=random).sort().values
    return [depth, feat, *(t.int() for t in (of_depth, of_feat, cell))]


def summed(depth, feat, of_depth, of_feat, cell, shape=SHAPE):
    """[b, d, h, w, c], from the equation in float64; the gradients of ones are not its affair."""
    out = np.zeros((int(np.prod(shape[:-1])), shape[-1]))
    rows = (
        depth.detach().double().numpy().reshape(-1)[of_depth.numpy(), None]
        * feat.detach().double().numpy().reshape(-1, C)[of_feat.numpy()]
    )
    np.add.at(out, cell.numpy(), rows)
    return torch.from_numpy(out).view(shape).float()


def intervals(cell):
    lengths = torch.unique_consecutive(cell, return_counts=True)[1]
    return lengths.cumsum(0) - lengths, lengths


def module(monkeypatch, name, **functions):
    """A compiled extension by name, in somebody's package."""
    made = types.ModuleType(name)
    vars(made).update(functions)
    monkeypatch.setitem(sys.modules, name, made)
    return made


def judged(folder, right=True):
    found = replay(folder)
    assert (found.exit_code == 0) == right, found.output
    return found.output


class Pool(torch.autograd.Function):
    """BEVDet's: sums in an extension, whose backward is given the points sorted by pixel."""

    @staticmethod
    def forward(ctx, depth, feat, of_depth, of_feat, cell):
        out, (starts, lengths) = feat.new_zeros(SHAPE), intervals(cell)
        Pool.ext.bev_pool_v2_forward(depth, feat, out, of_depth, of_feat, cell, lengths.int(), starts.int())
        ctx.save_for_backward(depth, feat, of_depth, of_feat, cell)
        return out

    @staticmethod
    def backward(ctx, grad):
        depth, feat, *ranks = ctx.saved_tensors
        order = ranks[1].argsort()
        ranks = [r[order] for r in ranks]
        starts, lengths = intervals(ranks[1])
        grads = torch.zeros_like(depth), torch.zeros_like(feat)
        Pool.ext.bev_pool_v2_backward(grad.contiguous(), *grads, depth, feat, *ranks, lengths.int(), starts.int())
        return (*grads, None, None, None)


def forward(depth, feat, out, of_depth, of_feat, cell, lengths, starts):
    out.copy_(summed(depth, feat, of_depth, of_feat, cell))


def backward(grad, grad_depth, grad_feat, depth, feat, of_depth, of_feat, cell, lengths, starts):
    rows, f = grad.double().numpy().reshape(-1, C)[cell.numpy()], feat.double().numpy().reshape(-1, C)
    to_depth, to_feat = np.zeros(depth.numel()), np.zeros_like(f)
    np.add.at(to_depth, of_depth.numpy(), (rows * f[of_feat.numpy()]).sum(1))
    np.add.at(to_feat, of_feat.numpy(), rows * depth.double().numpy().reshape(-1)[of_depth.numpy(), None])
    grad_depth += torch.from_numpy(to_depth).view(depth.shape).float()
    grad_feat += torch.from_numpy(to_feat).view(feat.shape).float()


@pytest.fixture
def bevdet(monkeypatch):
    """The extension, which tests may spoil before it is recorded."""
    Pool.ext = module(monkeypatch, "someones.bev_pool_v2_ext", bev_pool_v2_forward=forward, bev_pool_v2_backward=backward)
    return Pool.ext


def recorded_step(folder, inputs):
    with record.recording(folder, every=1):
        depth, feat = (t.requires_grad_() for t in inputs[:2])
        Pool.apply(depth, feat, *inputs[2:]).sin().sum().backward()


def test_an_extensions_calls_are_right(bevdet, tmp_path, capsys):
    recorded_step(tmp_path / "calls", lifted())
    assert "record: 2 of 2 calls recorded" in capsys.readouterr().err
    found = judged(tmp_path / "calls")
    for words in (
        "2 calls are right",
        "150 points, sorted by cell",
        "not sorted by cell",
        "cells 2x2x5x4",
        "grad_depth",
        "grad_feat",
    ):
        assert words in found


def test_an_output_that_was_not_zero_is_not_judged(bevdet, tmp_path):
    with record.recording(tmp_path / "calls", every=1):
        cell = (inputs := lifted())[4]
        starts, lengths = intervals(cell)
        bevdet.bev_pool_v2_forward(*inputs[:2], torch.ones(SHAPE), *inputs[2:], lengths, starts)
    assert "output of call-000000 must be zero before a function adds to them; got others" in judged(tmp_path / "calls", False)


def test_names_of_ours_with_gradients(tmp_path):
    """Each is called as its library calls it. `bev_pool_v3` is recorded as what autograd brings, too."""
    depth, feat, *ranks = lifted()
    leaves = [t.clone().requires_grad_() for t in (depth, feat)]
    starts, lengths = intervals(ranks[2])
    places = torch.stack(
        [t.flatten() for t in torch.meshgrid(*(torch.arange(n) for n in (H, W, D, B)), indexing="ij")], 1
    ).int()
    rows = torch.randn(len(places), C, requires_grad=True)
    geometry = torch.randint(-1, 5, (2, 3, 7, 3), dtype=torch.int32)
    frustum = torch.randn(2, 3, 7, C, requires_grad=True)
    with record.recording(tmp_path / "calls", every=1):
        outputs = [
            mx_driving.bev_pool_v3(*leaves, *ranks, SHAPE),
            mx_driving.bev_pool_v3(
                depth=None, feat=rows, ranks_depth=None, ranks_feat=None, ranks_bev=places, bev_feat_shape=SHAPE
            ),
            mx_driving.bev_pool_v2(*leaves, *ranks, SHAPE, starts, lengths),
            mx_driving.bev_pool(rows, places, B, D, H, W),
            importlib.import_module("mx_driving.ops.bev_pool_v3").BEVPoolV3.apply(*leaves, *ranks, SHAPE),
            mx_driving.npu_voxel_pooling_train(geometry, frustum, torch.tensor([4, 5, 2])),
            mx_driving.npu_voxel_pooling_train(geometry, input_features=frustum, voxel_num=(4, 5, 2)),
        ]
        for out in outputs:
            out.sin().sum().backward()
    found = judged(tmp_path / "calls")
    assert "7 calls are right" in found
    assert found.count("grad_feat") == 7
    assert found.count("grad_depth") == 3


def test_stand_ins_of_extensions(tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/__init__.py").write_text("")
    sys.path.insert(0, str(tmp_path))
    compat.install()
    try:
        with record.recording(tmp_path / "calls", every=1):
            depth, feat, *ranks = lifted()
            starts, lengths = intervals(ranks[2])
            ext = importlib.import_module("theirs.bev_pool_v2_ext")
            ext.bev_pool_v2_forward(depth, feat, torch.zeros(SHAPE), *ranks, lengths, starts)
            grads = torch.zeros_like(depth), torch.zeros_like(feat)
            ext.bev_pool_v2_backward_opt(torch.randn(SHAPE), *grads, depth, feat, *ranks, lengths, starts)
            ext, places = importlib.import_module("theirs.bev_pool_ext"), torch.tensor([[0, 1, 1, 0], [4, 3, 1, 1]])
            one = torch.ones(2, dtype=torch.long)
            ext.bev_pool_forward(torch.randn(2, C), places, one, one.cumsum(0) - 1, B, D, H, W)
            ext.bev_pool_backward(torch.randn(SHAPE), places, one, one.cumsum(0) - 1, B, D, H, W)
            geometry, number = torch.randint(-1, 4, (2, 3, BINS, 2, 3, 3), dtype=torch.int32), torch.tensor([4, 5, 1])
            ext = importlib.import_module("theirs.voxel_pooling_train_ext")
            memo = torch.full((2, 18 * BINS, 3), -1, dtype=torch.int32)
            rows = torch.randn(2, 18 * BINS, C)
            out = torch.zeros(2, 5, 4, C)
            ext.voxel_pooling_train_forward_wrapper(2, 18 * BINS, C, *number, geometry.view(2, -1, 3), rows, out, memo)
            ext = importlib.import_module("theirs.voxel_pooling_inference_ext")
            depth, context, out = torch.rand(6, BINS, 2, 3), torch.randn(6, C, 2, 3), torch.zeros(2, 5, 4, C)
            ext.voxel_pooling_inference_forward_wrapper(2, 3, BINS, 2, 3, C, 4, 5, 1, geometry, depth, context, out)
    finally:
        compat.uninstall()
        sys.path.remove(str(tmp_path))
        for name in [n for n in sys.modules if n.partition(".")[0] == "theirs"]:
            del sys.modules[name]
    assert "6 calls are right" in judged(tmp_path / "calls")


def chosen(keep):
    """A forward that sums only some points."""

    def spoilt(depth, feat, out, of_depth, of_feat, cell, lengths, starts):
        some = torch.tensor([i for s, n in zip(starts.tolist(), lengths.tolist(), strict=True) for i in keep(range(s, s + n))])
        out.copy_(summed(depth, feat, of_depth[some], of_feat[some], cell[some]))

    return spoilt


def overwritten(depth, feat, out, of_depth, of_feat, cell, lengths, starts):
    """As CUDA does it: each interval writes its cell."""
    for s, n in zip(starts.tolist(), lengths.tolist(), strict=True):
        sums = summed(depth, feat, *(t[s : s + n] for t in (of_depth, of_feat, cell)))
        out.view(-1, C)[cell[s].item()] = sums.view(-1, C)[cell[s].item()]


def exchanged(depth, feat, out, of_depth, of_feat, cell, lengths, starts):
    inside = of_depth < ROWS
    out.copy_(summed(depth, feat, *(t[inside] for t in (of_feat, of_depth, cell))))


MISTAKES = {
    "ranks_depth and ranks_feat are exchanged": exchanged,
    "depth is not used": lambda depth, *rest: forward(torch.ones_like(depth), *rest),
    "H and W of the cells are exchanged": lambda d, f, out, a, b, cell, *_: out.copy_(
        summed(d, f, a, b, cell).view(B, D, W, H, C).transpose(2, 3)
    ),
    "the output has its channels last": lambda d, f, out, a, b, cell, *_: out.copy_(
        summed(d, f, a, b, cell).reshape(B, C, D, H, W).movedim(1, -1)
    ),
    "a cell has its last point alone": chosen(lambda points: points[-1:]),
    "a run of points of one cell has its first point alone": chosen(lambda points: points[:1]),
    "the first point of each run of one cell is left out": chosen(lambda points: points[1:]),
    "the last point of each run of one cell is left out": chosen(lambda points: points[:-1]),
    "it is zero everywhere": lambda *args: None,
    "it is 2 times the truth": lambda d, f, out, *rest: out.copy_(2 * summed(d, f, *rest[:3])),
}


@pytest.mark.parametrize("words", MISTAKES)
def test_mistakes_are_named(bevdet, tmp_path, words):
    bevdet.bev_pool_v2_forward = MISTAKES[words]
    recorded_step(tmp_path / "calls", lifted())
    assert f"wrong: call-000000, output: {words}" in judged(tmp_path / "calls", False)


def test_points_that_are_not_sorted(bevdet, tmp_path):
    """Each camera's points are sorted: a kernel that writes each interval's sum loses those of the cameras before."""
    depth, feat, *ranks = lifted()
    order = torch.cat([torch.arange(150)[ranks[1] // 6 == camera] for camera in (0, 1)])
    inputs = depth, feat, *(r[order] for r in ranks)
    recorded_step(tmp_path / "right", inputs)
    judged(tmp_path / "right")
    bevdet.bev_pool_v2_forward = overwritten
    recorded_step(tmp_path / "calls", [t.detach() for t in inputs])
    assert "output: a cell has its last run of points alone" in judged(tmp_path / "calls", False)


def test_a_gradient_that_is_wrong(bevdet, tmp_path):
    def spoilt(grad, grad_depth, grad_feat, depth, *rest):
        backward(grad, grad_depth, torch.zeros_like(grad_feat), depth, *rest)
        backward(grad, torch.zeros_like(grad_depth), grad_feat, torch.ones_like(depth), *rest)

    bevdet.bev_pool_v2_backward = spoilt
    recorded_step(tmp_path / "calls", lifted())
    assert "call-000001, grad_feat: depth is not used" in judged(tmp_path / "calls", False)


def test_a_function_of_a_name_of_its_own(monkeypatch, tmp_path, capsys):
    """Its parameters are those of bev_pool_v3, unless its name ends as one of the known functions."""
    own = module(
        monkeypatch,
        "own_ops",
        lift=lambda *args: mx_driving.bev_pool_v3(*args),
        bev_pool_v2=lambda *args: mx_driving.bev_pool_v2(*args),
        back=lambda *args: args,
    )
    depth, feat, *ranks = lifted()
    named = {"own_ops.lift": "bev_pool_v3", "own_ops.bev_pool_v2": "bev_pool_v3", "own_ops.back": "bev_pool_v3_backward"}
    with record.recording(tmp_path / "calls", every=1, functions=named):
        own.lift(depth, feat, *ranks, SHAPE)
        own.bev_pool_v2(depth, feat, *ranks, SHAPE, *intervals(ranks[2]))
        own.back(depth, feat)
        with pytest.raises(TypeError, match="must be given"):
            own.lift(depth, feat)
    said = capsys.readouterr().err
    reason = "a function of the gradients of bev_pool_v3 must have the name of a known one"
    assert f"not recorded of own_ops.back: 1, calls and gradients; the last: {reason}" in said
    reason = "ranks_depth must be given; got depth, feat"
    assert f"not recorded of own_ops.lift: 1, calls and gradients; the last: {reason}" in said
    assert "2 calls are right" in judged(tmp_path / "calls")


LIFTED = dict(zip(("depth", "feat", "ranks_depth", "ranks_feat", "ranks_bev"), lifted(), strict=True))
EDITED = {
    "no such form": ({"form": "lift"}, {}, "the form of call-000000 must be one of bev_pool_v3, BEVPoolV3.apply"),
    "no sizes": ({"sizes": {}}, {}, "call-000000 must hold bev_feat_shape; got depth"),
    "four sizes": ({"sizes": {"bev_feat_shape": [1, 1, 1, 1]}}, {}, "got bev_feat_shape must be five ints"),
    "a float rank": ({}, {"ranks_bev": torch.rand(150)}, "got ranks_bev must have dtype int32 or int64"),
    "another output": ({}, {"output": torch.rand(3)}, "floating, of shape (2, 8, 2, 5, 4); got (3,)"),
    "ranks_depth": (
        {},
        {"ranks_depth": torch.full((150,), 72)},
        "got ranks_depth[0] must be one of the 72 elements of depth; got 72",
    ),
    "ranks_feat": ({}, {"ranks_feat": torch.full((150,), 12)}, "got ranks_feat[0] must be one of the 12 rows of feat; got 12"),
    "ranks_bev": ({}, {"ranks_bev": torch.full((150,), -1)}, "got ranks_bev[0] must be one of the 80 cells; got -1"),
}


@pytest.mark.parametrize("what", EDITED)
def test_what_cannot_be_judged_is_one_sentence(tmp_path, what):
    facts, tensors, words = EDITED[what]
    about = {"operator": "bev_pool_v3", "form": "bev_pool_v3", "sizes": {"bev_feat_shape": SHAPE}, **facts}
    output = summed(*LIFTED.values()).movedim(-1, 1).contiguous()
    metadata = {"format": str(record.FORMAT), "call": json.dumps(about)}
    torch.save({"metadata": metadata, "tensors": {**LIFTED, "output": output, **tensors}}, tmp_path / "call-000000.pt")
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
