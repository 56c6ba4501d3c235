"""`mx_driving.onnx.fuse` on files that others' writings of deformable attention give."""

from __future__ import annotations

import itertools
import re
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
from mx_driving import _checks  # noqa: E402

MAPS = [(6, 5), (3, 4)]
AREAS = [h * w for h, w in MAPS]


class Stacked(torch.nn.Module):
    """As Deformable DETR, RT-DETR and ultralytics write it: levels stacked behind queries."""

    factor, shift, order = 2, 1, (0, 1)
    options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": False}  # noqa: RUF012

    def __init__(self, sample=grid_sample, **changes) -> None:
        super().__init__()
        self.sample = sample
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
            samples.append(self.sample(image, grids[:, :, :, level].transpose(1, 2).flatten(0, 1), **self.options))
        weights = weights.transpose(1, 2).reshape(bs * heads, 1, queries, 6)
        output = (torch.stack(samples, -2).flatten(-2) * weights).sum(-1)
        return output.view(bs, heads * channels, queries).transpose(1, 2).contiguous()


class Joined(torch.nn.Module):
    """As RT-DETR v2 and D-FINE write it: levels and points in one axis, and levels may differ in points."""

    def __init__(self, points, sample=grid_sample) -> None:
        super().__init__()
        self.points, self.sample = points, sample

    def forward(self, value, locations, weights):
        value, locations, weights = value * 1.5, locations.flatten(3, 4) + 0.1, weights.softmax(-1)
        bs, _, heads, channels = value.shape
        levels = value.permute(0, 2, 3, 1).flatten(0, 1).split(AREAS, -1)
        grids = (2 * locations - 1).permute(0, 2, 1, 3, 4).flatten(0, 1).split(self.points, -2)
        images = [v.reshape(bs * heads, channels, *size) for v, size in zip(levels, MAPS, strict=True)]
        samples = [self.sample(*pair, mode="bilinear", align_corners=False) for pair in zip(images, grids, strict=True)]
        weights = weights.permute(0, 2, 1, 3).reshape(bs * heads, 1, locations.shape[1], 6)
        output = (torch.cat(samples, -1) * weights).sum(-1).view(bs, heads * channels, locations.shape[1])
        return output.transpose(1, 2).contiguous()


def pixels(image, grid):
    """x and y in pixels, and the map's sides."""
    height, width = image.shape[2:]
    return ((grid[..., 0] + 1) * width - 1) / 2, ((grid[..., 1] + 1) * height - 1) / 2, width, height


def clipped(places, last):
    """Opset 11 has no Clip of integers."""
    return torch.where(places > last, torch.tensor(last), torch.where(places < 0, torch.tensor(0), places))


def corners(x, y):
    """Of the four pixels around (x, y): their integer places and weights."""
    left, top = x.floor(), y.floor()
    for right, down in itertools.product((0, 1), repeat=2):
        share = (x - left if right else left + 1 - x) * (y - top if down else top + 1 - y)
        yield (left + right).long(), (top + down).long(), share


def on_a_padded_map(image, grid, **options):
    """As mmcv's bilinear_grid_sample and LT-DETR's: a border of zeros, places clipped to it, gathers along one axis."""
    x, y, width, height = pixels(image, grid)
    rows, sampled = torch.nn.functional.pad(image, [1, 1, 1, 1]).flatten(2), 0
    for column, row, share in corners(x, y):
        column, row = clipped(column + 1, width + 1), clipped(row + 1, height + 1)
        places = (column + row * (width + 2)).flatten(1)[:, None].expand(-1, image.shape[1], -1)
        sampled = sampled + rows.gather(2, places) * share.flatten(1)[:, None]
    return sampled.reshape(image.shape[0], image.shape[1], grid.shape[1], grid.shape[2])


def masked(image, grid, **options):
    """As LibreYOLO's and RF-DETR's: corners outside are multiplied by false."""
    x, y, width, height = pixels(image, grid)
    rows, sampled = image.flatten(2), 0
    for column, row, share in corners(x, y):
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        places = clipped(row, height - 1) * width + clipped(column, width - 1)
        found = rows.gather(2, places.flatten(1)[:, None].expand(-1, image.shape[1], -1)).reshape(
            *image.shape[:2], *grid.shape[1:3]
        )
        sampled = sampled + found * inside[:, None] * share[:, None]
    return sampled


def by_three_indices(image, grid, **options):
    """GatherND from channels last: shares are triangles around a pixel, or 0 where that is outside."""
    x, y, width, height = pixels(image, grid)
    batch, rows, sampled = torch.arange(image.shape[0]).view(-1, 1, 1), image.permute(0, 2, 3, 1), 0
    for column, row, _ in corners(x, y):
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        share = torch.where(inside, (1 - (x - column).abs()) * (1 - (y - row).abs()), 0.0)
        sampled = sampled + rows[batch, clipped(row, height - 1), clipped(column, width - 1)] * share[..., None]
    return sampled.permute(0, 3, 1, 2)


def decomposed(image, grid, **options):
    """torch's own decomposition."""
    from torch._decomp.decompositions import grid_sampler_2d

    return grid_sampler_2d(image, grid, 0, 0, False)


def at_the_border(image, grid, **options):
    """Not ours: samples outside repeat the outermost pixels."""
    x, y, width, height = pixels(image, grid)
    rows, sampled = image.flatten(2), 0
    for column, row, share in corners(x, y):
        places = clipped(row, height - 1) * width + clipped(column, width - 1)
        found = rows.gather(2, places.flatten(1)[:, None].expand(-1, image.shape[1], -1)).reshape(
            *image.shape[:2], *grid.shape[1:3]
        )
        sampled = sampled + found * share[:, None]
    return sampled


def of_capped_values(image, grid, **options):
    """Not ours, and no trial with values within 1 would tell."""
    sampled = masked(image, grid)
    return torch.where(sampled > 1000, 0.0, sampled)


WRITINGS = {"stacked": Stacked(), "joined": Joined([3, 3]), "unequal points": Joined([2, 4])}
GATHERS = (on_a_padded_map, masked, by_three_indices, decomposed)


def inputs(bs=2, queries=7):
    random = torch.Generator().manual_seed(1)
    locations = torch.rand(bs, queries, 4, 2, 3, 2, generator=random) * 1.4 - 0.3
    return torch.rand(bs, 42, 4, 8, generator=random), locations, torch.rand(bs, queries, 4, 6, generator=random)


def export(module, path, exporter, opset=17):
    names, free = ["v", "l", "w"], {"v": {0: "bs"}, "l": {0: "bs", 1: "q"}, "w": {0: "bs", 1: "q"}}
    dynamo = {"dynamo": True, "opset_version": 20, "verbose": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if "older" in exporter:
            old = {"dynamo": False, "opset_version": opset, "dynamic_axes": free if exporter == "older" else None}
            return torch.onnx.export(module, inputs(), path, input_names=names, **old)
        if sentence := _checks.needs.lacks("An ONNX file of opset 20"):
            pytest.skip(sentence)
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


def judge(writing, before, after, arguments):
    """Both files are within rounding of the writing in float64."""
    true = writing(*(t.double() for t in arguments)).numpy()
    scale = np.full_like(true, 1.5)  # values are at most 1.5, and the weights of a query sum up to 1
    dtype = arguments[0].dtype
    limit = allowed(dtype, dtype, true, scale, 24, 6)
    for path in (before, after):
        assert (np.abs(run(path, arguments) - true) <= limit).all()


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
    judge(WRITINGS[writing], before, after, inputs() if exporter == "fixed sizes" else inputs(3, 11))


@pytest.mark.parametrize(
    ("sample", "exporter"),
    [
        *((sample, "fixed sizes") for sample in GATHERS),
        *((decomposed, opset) for opset in (11, 13, 15)),
        *zip((on_a_padded_map, masked, by_three_indices), (11, 13, 15), strict=True),
    ],
)
def test_gathers_become_the_node(sample, exporter, tmp_path):
    """Opsets 11 to 15 have no GridSample; batch and queries are free in these files."""
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    writing = Stacked(sample)
    export(writing, before, *((exporter,) if exporter == "fixed sizes" else ("older", exporter)))
    report = mx_driving.onnx.fuse(before, after)
    assert len(report.replaced) == 1
    assert not report.left
    assert not {"GridSample", "Floor"} & set(kinds(after))
    assert "Floor" in kinds(before)
    judge(writing, before, after, inputs() if exporter == "fixed sizes" else inputs(3, 11))


def test_gathers_of_levels_that_differ_in_points(tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    writing = Joined([2, 4], masked)
    export(writing, before, "older", 13)
    assert "2 + 4 points" in str(mx_driving.onnx.fuse(before, after))
    judge(writing, before, after, inputs(3, 11))


@pytest.mark.parametrize("writing", [WRITINGS["stacked"], Stacked(masked)], ids=["GridSample", "gathers"])
def test_float64(writing, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    arguments = tuple(t.double() for t in inputs())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(writing, arguments, before, dynamo=False, opset_version=20, input_names=["v", "l", "w"])
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    np.testing.assert_allclose(run(after, arguments), run(before, arguments), rtol=0, atol=1e-13)


@pytest.mark.parametrize(("opset", "mode"), [(16, b"bilinear"), (20, b"linear")])
def test_both_names_of_the_mode(opset, mode, tmp_path):
    """Opset 20 renamed it."""
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    export(WRITINGS["stacked"], before, *(("older", 16) if opset == 16 else ("fixed sizes",)))
    samplers = [node for node in onnx.load(before).graph.node if node.op_type == "GridSample"]
    assert {onnx.helper.get_node_attr_value(node, "mode") for node in samplers} == {mode}
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1


class Chosen(torch.nn.Module):
    """The older exporter computes the numbers of Pad in the file, and onnx's inference knows no size behind it. Where ReduceMax
    and TopK are there, onnxruntime's stops."""

    def forward(self, value, locations, weights):
        value = torch.nn.functional.pad(value[:, :-2], (0, 0, 0, 0, 0, 2))
        best = weights.amax((2, 3)).topk(3).indices
        return Stacked()(value, locations, weights)[:, best[0]]


def test_sizes_that_the_file_computes(tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    export(Chosen(), before, "older, fixed sizes", 18)
    assert {"Pad", "ConstantOfShape", "ReduceMax", "TopK"} <= set(kinds(before))
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    judge(Chosen(), before, after, inputs())


class Projected(torch.nn.Module):
    """Weights of a size that a file may keep outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = torch.nn.Linear(8, 8)

    def forward(self, value, locations, weights):
        return Stacked(decomposed)(self.projection(value), locations, weights)


def test_weights_outside_the_file(tmp_path):
    """All constants lie in another file, those of the part that is tried too, and so they do afterwards."""
    before, after = tmp_path / "in" / "before.onnx", tmp_path / "out" / "after.onnx"
    before.parent.mkdir()
    after.parent.mkdir()
    module = Projected().eval()
    export(module, before, "older")
    onnx.save(onnx.load(before), before, save_as_external_data=True, location="weights", size_threshold=0)
    assert len(mx_driving.onnx.fuse(before, after).replaced) == 1
    assert [path.name for path in sorted(after.parent.iterdir())] == ["after.onnx", "after.onnx.data"]
    (before.parent / "weights").unlink()
    with torch.no_grad():
        np.testing.assert_allclose(run(after, inputs()), module(*inputs()).numpy(), atol=1e-5)


NEAR_MISSES = {
    "align_corners": (Stacked(align_corners=True), "GridSample's align_corners is 1; the operator's is 0"),
    "padding": (Stacked(padding_mode="border"), "GridSample's padding_mode is border; the operator's is zeros"),
    "mode": (Stacked(mode="nearest"), "GridSample's mode is nearest; the operator's is linear"),
    "factor": (Stacked(factor=3), "its grid is not 2 * locations - 1"),
    "shift": (Stacked(shift=0.5), "its grid is not 2 * locations - 1"),
    "order": (Stacked(order=(1, 0)), "it computes something else"),
    "gathers, factor": (Stacked(masked, factor=3), "it computes something else"),
    "gathers, padding": (Stacked(at_the_border), "it computes something else"),
    "gathers, values": (Stacked(of_capped_values), "Where ("),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_a_near_miss_stays(name, tmp_path):
    module, why = NEAR_MISSES[name]
    export(module, tmp_path / "before.onnx", "older, fixed sizes")
    with pytest.raises(ValueError, match="path_in must hold deformable attention made of GridSample or gathers") as error:
        mx_driving.onnx.fuse(tmp_path / "before.onnx", tmp_path / "after.onnx")
    assert why in str(error.value)
    assert not (tmp_path / "after.onnx").exists()


class Both(torch.nn.Module):
    def forward(self, value, locations, weights):
        return Stacked()(value, locations, weights) + Stacked(padding_mode="border")(value, locations, weights)


def test_the_rest_is_untouched_and_reported(tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    export(Both(), before, "older")
    report = mx_driving.onnx.fuse(before, after)
    assert len(report.replaced) == len(report.left) == 1
    assert "padding_mode is border" in str(report)
    assert kinds(after).count("GridSample") == 2
    np.testing.assert_allclose(run(after, inputs()), Both()(*inputs()).numpy(), atol=1e-5)


def test_bad_files(tmp_path):
    out = tmp_path / "out.onnx"
    plain = tmp_path / "plain.onnx"
    torch.onnx.export(torch.nn.Linear(2, 2).eval(), (torch.ones(1, 2),), plain, dynamo=True, verbose=False)
    with pytest.raises(ValueError, match=r"made of GridSample or gathers; got .*plain.onnx \(it has no weighted samples\)"):
        mx_driving.onnx.fuse(plain, out)
    with pytest.raises(ValueError, match="path_out must be another file than path_in"):
        mx_driving.onnx.fuse(plain, plain)
    with pytest.raises(ValueError, match="path_in must be a file that can be read"):
        mx_driving.onnx.fuse(tmp_path / "none.onnx", out)
    (tmp_path / "text.onnx").write_text("not a graph")
    export(Stacked(), tmp_path / "whole.onnx", "older")
    (tmp_path / "cut.onnx").write_bytes((tmp_path / "whole.onnx").read_bytes()[:-1000])
    for name in ("text.onnx", "cut.onnx"):
        with pytest.raises(ValueError, match=f"path_in must be an ONNX file; got .*{name}"):
            mx_driving.onnx.fuse(tmp_path / name, out)
    assert not out.exists()


@pytest.mark.needs("An ONNX file of opset 20")
def test_equal_sizes_do_not_mislead(tmp_path):
    """Where queries and heads are four each, shapes alone do not tell which axis is which."""
    path = tmp_path / "before.onnx"
    torch.onnx.export(
        Stacked().eval(), inputs(1, 4), path, dynamo=True, opset_version=20, input_names=["v", "l", "w"], verbose=False
    )
    assert len(mx_driving.onnx.fuse(path, tmp_path / "after.onnx").replaced) == 1
    np.testing.assert_allclose(run(tmp_path / "after.onnx", inputs(1, 4)), Stacked()(*inputs(1, 4)).numpy(), atol=1e-5)


@pytest.fixture
def fuse_command(monkeypatch, capsys):
    """`mx-driving fuse` as a shell runs it: exit status, standard output and standard error."""
    from mx_driving.cli.app import main

    def run(*args):
        monkeypatch.setattr("sys.argv", ["mx-driving", "fuse", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        said = capsys.readouterr()
        return stop.value.code, said.out, said.err

    return run


def test_the_command_compares_and_times(fuse_command, tmp_path):
    before, after, given = tmp_path / "before.onnx", tmp_path / "after.onnx", tmp_path / "inputs.npz"
    export(Stacked(), before, "older")
    np.savez(given, **{name: t.numpy() for name, t in zip("vlw", inputs(), strict=True)})
    status, said, problem = fuse_command(before, after, "--time", "--inputs", given, "--seconds", 0)
    assert (status, problem) == (0, "")
    found = re.search(r"outputs differ by (\S+) of their magnitude; \S+ ms before, \S+ ms after, medians of 3 rounds", said)
    assert found, said
    assert float(found[1]) < 1e-5


def test_the_command_refuses_inputs_in_a_sentence(fuse_command, tmp_path):
    before, after = tmp_path / "before.onnx", tmp_path / "after.onnx"
    export(Stacked(), before, "older")
    status, _, problem = fuse_command(before, after, "--time")
    assert status == 1
    assert "--inputs must have 'l', whose sizes q the file leaves free; got none" in problem
    np.save(tmp_path / "one.npy", np.ones(3))
    assert (
        "--inputs must be an .npz file, of arrays by name" in fuse_command(before, after, "--inputs", tmp_path / "one.npy")[2]
    )
    assert "--inputs must be an .npz file; got" in fuse_command(before, after, "--inputs", tmp_path / "none.npz")[2]
    (tmp_path / "text.npz").write_text("words")
    assert "--inputs must be an .npz file; got" in fuse_command(before, after, "--inputs", tmp_path / "text.npz")[2]
