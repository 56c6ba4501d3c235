"""`mx_driving.onnx.fuse` on files that others' writings of deformable attention give."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.nn.functional import grid_sample

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

from tolerance import allowed  # noqa: E402

import mx_driving  # noqa: E402
import mx_driving.onnx  # noqa: E402

MAPS = [(6, 5), (3, 4)]
AREAS = [h * w for h, w in MAPS]


class Stacked(torch.nn.Module):
    """As Deformable DETR, RT-DETR and ultralytics write it: levels stacked behind queries."""

    factor, shift, order = 2, 1, (0, 1)
    options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": False}  # noqa: RUF012

    def __init__(self, **changes) -> None:
        super().__init__()
        self.options = {**self.options, **{k: v for k, v in changes.items() if k in self.options}}
        self.__dict__.update({k: v for k, v in changes.items() if k not in self.options})

    def forward(self, value, locations, weights):
        value, locations, weights = value * 1.5, locations + 0.1, weights.softmax(-1)
        bs, _, heads, channels = value.shape
        queries = locations.shape[1]
        weights = weights.reshape(bs, queries, heads, 2, 3)
        grids, levels = self.factor * locations - self.shift, value.split(AREAS, 1)
        samples = []
        for level in self.order:
            image = levels[level].flatten(2).transpose(1, 2).reshape(bs * heads, channels, *MAPS[level])
            samples.append(grid_sample(image, grids[:, :, :, level].transpose(1, 2).flatten(0, 1), **self.options))
        weights = weights.transpose(1, 2).reshape(bs * heads, 1, queries, 6)
        output = (torch.stack(samples, -2).flatten(-2) * weights).sum(-1)
        return output.view(bs, heads * channels, queries).transpose(1, 2).contiguous()


class Joined(torch.nn.Module):
    """As RT-DETR v2 and D-FINE write it: levels and points in one axis, and levels may differ in points."""

    def __init__(self, points) -> None:
        super().__init__()
        self.points = points

    def forward(self, value, locations, weights):
        value, locations, weights = value * 1.5, locations.flatten(3, 4) + 0.1, weights.softmax(-1)
        bs, _, heads, channels = value.shape
        levels = value.permute(0, 2, 3, 1).flatten(0, 1).split(AREAS, -1)
        grids = (2 * locations - 1).permute(0, 2, 1, 3, 4).flatten(0, 1).split(self.points, -2)
        images = [v.reshape(bs * heads, channels, *size) for v, size in zip(levels, MAPS, strict=True)]
        samples = [grid_sample(*pair, mode="bilinear", align_corners=False) for pair in zip(images, grids, strict=True)]
        weights = weights.permute(0, 2, 1, 3).reshape(bs * heads, 1, locations.shape[1], 6)
        output = (torch.cat(samples, -1) * weights).sum(-1).view(bs, heads * channels, locations.shape[1])
        return output.transpose(1, 2).contiguous()


WRITINGS = {"stacked": Stacked(), "joined": Joined([3, 3]), "unequal points": Joined([2, 4])}


def inputs(bs=2, queries=7):
    random = torch.Generator().manual_seed(1)
    locations = torch.rand(bs, queries, 4, 2, 3, 2, generator=random) * 1.4 - 0.3
    return torch.rand(bs, 42, 4, 8, generator=random), locations, torch.rand(bs, queries, 4, 6, generator=random)


def export(module, path, exporter):
    names, free = ["v", "l", "w"], {"v": {0: "bs"}, "l": {0: "bs", 1: "q"}, "w": {0: "bs", 1: "q"}}
    dynamo = {"dynamo": True, "opset_version": 20, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "older":
            old = {"dynamo": False, "opset_version": 17, "dynamic_axes": free}
            return torch.onnx.export(module, inputs(), path, input_names=names, **old)
        shapes = tuple({a: torch.export.Dim(n) for a, n in free[name].items()} for name in names)
        more = {"dynamic_shapes": shapes} if exporter == "free sizes" else {}
        torch.onnx.export(module.eval(), inputs(), path, input_names=names, **dynamo, **more)


def run(path, arguments):
    options = onnxruntime.SessionOptions()
    options.register_custom_ops_library(mx_driving.onnx.library())
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {name: t.numpy() for name, t in zip("vlw", arguments, strict=True)})[0]


def kinds(path):
    return [node.op_type for node in onnx.load(path).graph.node]


@pytest.mark.parametrize("exporter", ["fixed sizes", "free sizes", "older"])
@pytest.mark.parametrize("writing", WRITINGS)
def test_the_node_gives_the_same(writing, exporter, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    export(WRITINGS[writing], before, exporter)
    report = mx_driving.onnx.fuse(before, after)
    assert len(report.replaced) == 1
    assert not report.left
    assert "4 heads of 8 channels" in str(report)
    assert "GridSample" in kinds(before)
    assert "GridSample" not in kinds(after)
    assert kinds(after).count("multi_scale_deformable_attn") == 1
    arguments = inputs() if exporter == "fixed sizes" else inputs(3, 11)
    true = WRITINGS[writing](*(t.double() for t in arguments)).numpy()
    scale = np.full_like(true, 1.5)  # values are at most 1.5, and the weights of a query sum up to 1
    limit = allowed(torch.float32, torch.float32, true, scale, 24, 6)
    for path in (before, after):
        assert (np.abs(run(path, arguments) - true) <= limit).all()


NEAR_MISSES = {
    "align_corners": (Stacked(align_corners=True), "GridSample's align_corners is 1; the operator's is 0"),
    "padding": (Stacked(padding_mode="border"), "GridSample's padding_mode is border; the operator's is zeros"),
    "mode": (Stacked(mode="nearest"), "GridSample's mode is nearest; the operator's is linear"),
    "factor": (Stacked(factor=3), "its grid is not 2 * locations - 1"),
    "shift": (Stacked(shift=0.5), "its grid is not 2 * locations - 1"),
    "order": (Stacked(order=(1, 0)), "it computes something else"),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_stays(name, tmp_path):
    module, why = NEAR_MISSES[name]
    export(module, tmp_path / "before.onnx", "fixed sizes")
    with pytest.raises(ValueError, match="path_in must hold deformable attention made of GridSample") as error:
        mx_driving.onnx.fuse(tmp_path / "before.onnx", tmp_path / "after.onnx")
    assert why in str(error.value)
    assert not (tmp_path / "after.onnx").exists()


class Both(torch.nn.Module):
    def forward(self, value, locations, weights):
        return Stacked()(value, locations, weights) + Stacked(padding_mode="border")(value, locations, weights)


def test_the_rest_is_untouched_and_reported(tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    export(Both(), before, "fixed sizes")
    report = mx_driving.onnx.fuse(before, after)
    assert len(report.replaced) == len(report.left) == 1
    assert "padding_mode is border" in str(report)
    assert kinds(after).count("GridSample") == 2
    np.testing.assert_allclose(run(after, inputs()), Both()(*inputs()).numpy(), atol=1e-5)


def test_bad_files(tmp_path):
    out = tmp_path / "out.onnx"
    plain = tmp_path / "plain.onnx"
    torch.onnx.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),), plain, dynamo=True, verbose=False)
    with pytest.raises(ValueError, match=r"made of GridSample; got .*plain.onnx \(no GridSample\)"):
        mx_driving.onnx.fuse(plain, out)
    with pytest.raises(ValueError, match="path_out must be another file than path_in"):
        mx_driving.onnx.fuse(plain, plain)
    with pytest.raises(ValueError, match="path_in must be a file that can be read"):
        mx_driving.onnx.fuse(tmp_path / "none.onnx", out)
    (tmp_path / "text.onnx").write_text("not a graph")
    with pytest.raises(ValueError, match="path_in must be an ONNX file; got"):
        mx_driving.onnx.fuse(tmp_path / "text.onnx", out)
    assert not out.exists()


def test_equal_sizes_do_not_mislead(tmp_path):
    """Where queries and heads are four each, shapes alone do not tell which axis is which."""
    path = tmp_path / "before.onnx"
    torch.onnx.export(
        Stacked().eval(), inputs(1, 4), path, dynamo=True, opset_version=20, input_names=["v", "l", "w"], verbose=False
    )
    assert len(mx_driving.onnx.fuse(path, tmp_path / "after.onnx").replaced) == 1
    np.testing.assert_allclose(run(tmp_path / "after.onnx", inputs(1, 4)), Stacked()(*inputs(1, 4)).numpy(), atol=1e-5)
