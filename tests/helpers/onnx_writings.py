"""Deformable attention as other libraries write it in PyTorch, and the ONNX files exported from it."""

import contextlib
import itertools
import pathlib
import warnings

import onnx
import onnx_nodes
import pytest
import quick_exports  # noqa: F401
import torch
from torch.nn.functional import grid_sample

import mx_driving
import mx_driving.onnx
from mx_driving import _needs
from mx_driving.onnx import _runtimes
from mx_driving.onnx._check import check

MAPS = [(6, 5), (3, 4)]
AREAS = [h * w for h, w in MAPS]


class Stacked(torch.nn.Module):
    """The code of Deformable DETR, RT-DETR and ultralytics: levels are stacked behind queries."""

    factor, shift, order, between = 2, 1, (0, 1), None
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
        if self.between is not None:
            output = self.between(output)
            queries = -1
        return output.view(bs, heads * channels, queries).transpose(1, 2).contiguous()


class Cut(Stacked):
    """Attention to a part of the batch or queries, of the inputs or of the output."""

    def __init__(self, before=(slice(None),), after=(slice(None),)) -> None:
        super().__init__()
        self.before, self.after = before, after

    def forward(self, value, locations, weights):
        parts = value[self.before[:1]], locations[self.before], weights[self.before]
        return super().forward(*parts)[self.after]


class Summed(torch.nn.Module):
    """Levels are weighted and summed one by one. Maps in another order than (0, 1) are not our operator."""

    def __init__(self, *maps) -> None:
        super().__init__()
        self.maps = maps or (0, 1)

    def forward(self, value, locations, weights):
        value, locations, weights = value * 1.5, locations + 0.1, weights.softmax(-1).unflatten(-1, (2, 3))
        bs, _, heads, channels = value.shape
        levels, output = value.split(AREAS, 1), 0
        for level, at in enumerate(self.maps):
            image = levels[at].permute(0, 2, 3, 1).reshape(bs * heads, channels, *MAPS[at])
            grid, share = (t[:, :, :, level].transpose(1, 2).flatten(0, 1) for t in (2 * locations - 1, weights))
            output = output + (grid_sample(image, grid, align_corners=False) * share[:, None]).sum(-1)
        return output.view(bs, heads * channels, -1).transpose(1, 2).contiguous()


class Joined(torch.nn.Module):
    """The code of RT-DETR v2 and D-FINE: levels and points share an axis, and levels may differ in points."""

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
    """Return x and y in pixels, and the map's width and height."""
    height, width = image.shape[2:]
    return ((grid[..., 0] + 1) * width - 1) / 2, ((grid[..., 1] + 1) * height - 1) / 2, width, height


def clipped(places, last):
    """Clip to 0..last without Clip, which opset 11 does not have for integers."""
    return torch.where(places > last, torch.tensor(last), torch.where(places < 0, torch.tensor(0), places))


def corners(x, y):
    """Yield column, row and weight of the four pixels around (x, y)."""
    left, top = x.floor(), y.floor()
    for right, down in itertools.product((0, 1), repeat=2):
        share = (x - left if right else left + 1 - x) * (y - top if down else top + 1 - y)
        yield (left + right).long(), (top + down).long(), share


def on_a_padded_map(image, grid, **options):
    """The code of mmcv's bilinear_grid_sample and LT-DETR: a border of zeros, clipped indices, gathers along one axis."""
    x, y, width, height = pixels(image, grid)
    rows, sampled = torch.nn.functional.pad(image, [1, 1, 1, 1]).flatten(2), 0
    for column, row, share in corners(x, y):
        column, row = clipped(column + 1, width + 1), clipped(row + 1, height + 1)
        places = (column + row * (width + 2)).flatten(1)[:, None].expand(-1, image.shape[1], -1)
        sampled = sampled + rows.gather(2, places) * share.flatten(1)[:, None]
    return sampled.reshape(image.shape[0], image.shape[1], grid.shape[1], grid.shape[2])


def masked(image, grid, inside_only=True, **options):
    """The code of LibreYOLO and RF-DETR: corners off the map are multiplied by false."""
    x, y, width, height = pixels(image, grid)
    rows, sampled = image.flatten(2), 0
    for column, row, share in corners(x, y):
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        places = clipped(row, height - 1) * width + clipped(column, width - 1)
        gathered = rows.gather(2, places.flatten(1)[:, None].expand(-1, image.shape[1], -1))
        gathered = gathered.reshape(*image.shape[:2], *grid.shape[1:3])
        sampled = sampled + (gathered * inside[:, None] if inside_only else gathered) * share[:, None]
    return sampled


def by_three_indices(image, grid, **options):
    """GatherND from channels last. The weight of a pixel is a triangle function of the distance, or 0 off the map."""
    x, y, width, height = pixels(image, grid)
    batch, rows, sampled = torch.arange(image.shape[0]).view(-1, 1, 1), image.permute(0, 2, 3, 1), 0
    for column, row, _ in corners(x, y):
        inside = (column >= 0) & (column < width) & (row >= 0) & (row < height)
        share = torch.where(inside, (1 - (x - column).abs()) * (1 - (y - row).abs()), 0.0)
        sampled = sampled + rows[batch, clipped(row, height - 1), clipped(column, width - 1)] * share[..., None]
    return sampled.permute(0, 3, 1, 2)


def decomposed(image, grid, **options):
    """torch's own decomposition of grid_sample."""
    from torch._decomp.decompositions import grid_sampler_2d

    return grid_sampler_2d(image, grid, 0, 0, False)


def at_the_border(image, grid, **options):
    """Not our operator: samples off the map repeat the outermost pixels."""
    return masked(image, grid, inside_only=False)


def of_capped_values(image, grid, **options):
    """Not our operator, and a trial with values within 1 does not show it."""
    sampled = masked(image, grid)
    return torch.where(sampled > 1000, 0.0, sampled)


class Projected(torch.nn.Module):
    """Attention behind a linear layer, whose weights a file may keep outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.projection = torch.nn.Linear(8, 8)

    def forward(self, value, locations, weights):
        return Stacked()(self.projection(value), locations, weights)


def nearest(image, grid, **options):
    """Not our operator: the method "discrete" of RT-DETR v2 and D-FINE."""
    height, width = image.shape[2:]
    column, row = ((grid / 2 + 0.5) * torch.tensor([[width, height]]) + 0.5).to(torch.int64).flatten(1, 2).unbind(-1)
    batch = torch.arange(image.shape[0]).unsqueeze(-1).repeat(1, column.shape[1])
    sampled = image[batch, :, clipped(row, height - 1), clipped(column, width - 1)]
    return sampled.transpose(1, 2).reshape(*image.shape[:2], *grid.shape[1:3])


class Calls(torch.nn.Module):
    """Our operator. With `free`, the sizes of the maps depend on value."""

    def __init__(self, free=False) -> None:
        super().__init__()
        self.free = free
        self.register_buffer("shapes", torch.tensor(MAPS))
        self.register_buffer("starts", torch.tensor([0, AREAS[0]]))

    def forward(self, value, locations, weights):
        shapes = self.shapes + (value[0, 0, 0, 0] * 0).long() if self.free else self.shapes
        weights = weights.unflatten(-1, (2, 3))
        return mx_driving.multi_scale_deformable_attn(value, shapes, self.starts, locations, weights)


class Logits(Calls):
    """Our operator with logits. Locations become offsets."""

    def forward(self, value, locations, weights):
        points = locations[:, :, 0, :, 0]
        weights = weights.unflatten(-1, (2, 3))
        return mx_driving.multi_scale_deformable_attn_with_logits(value, self.shapes, self.starts, points, locations, weights)


WRITINGS = {"stacked": Stacked(), "summed": Summed(), "joined": Joined([3, 3]), "unequal points": Joined([2, 4])}
GATHERS = (on_a_padded_map, masked, by_three_indices, decomposed)


def inputs(bs=2, queries=7):
    random = torch.Generator().manual_seed(1)
    locations = torch.rand(bs, queries, 4, 2, 3, 2, generator=random) * 1.4 - 0.3
    return torch.rand(bs, 42, 4, 8, generator=random), locations, torch.rand(bs, queries, 4, 6, generator=random)


_WRITTEN: dict[tuple, dict[str, bytes]] = {}


def export(module, path, exporter, opset=17, arguments=None):
    """Write the file, and the file of its weights if there is one. A module that was exported before is not exported again."""
    path, arguments = pathlib.Path(path), arguments or inputs()
    values = [(type(m), {k: v for k, v in vars(m).items() if k[0] != "_" and k != "training"}) for m in module.modules()]
    key = (repr(values), path.name, exporter, opset, *((t.dtype, t.shape) for t in arguments))
    if key not in _WRITTEN:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _export(module.eval(), path, exporter, opset, arguments)
        _WRITTEN[key] = {file.name: file.read_bytes() for file in path.parent.glob(path.name + "*")}
    for name, content in _WRITTEN[key].items():
        (path.parent / name).write_bytes(content)


def _export(module, path, exporter, opset, arguments):
    """Export by torch's older exporter or by `dynamo`, with free or fixed sizes, with our nodes or samples."""
    names, free = ["v", "l", "w"], {"v": {0: "bs"}, "l": {0: "bs", 1: "q"}, "w": {0: "bs", 1: "q"}}
    is_free = "fixed sizes" not in exporter
    if "older" in exporter:
        old = {"dynamo": False, "opset_version": opset, "dynamic_axes": free if is_free else None}
        return torch.onnx.export(module, arguments, path, input_names=names, **old)
    if sentence := _needs.lacks("An ONNX file of opset 20"):
        pytest.skip(sentence)
    sizes = tuple({axis: torch.export.Dim(n) for axis, n in free[name].items()} for name in names)
    more = {"dynamic_shapes": sizes} if is_free else {}
    forms = {"our nodes": "onnxruntime", "our samples": "grid_sample"}
    if form := next((form for words, form in forms.items() if words in exporter), None):
        more["custom_translation_table"] = mx_driving.onnx.translations(form)
    torch.onnx.export(module, arguments, path, input_names=names, dynamo=True, opset_version=20, verbose=False, **more)


@contextlib.contextmanager
def edit(path):
    """Load a file, and save it after the block."""
    model = onnx.load(path)
    yield model
    onnx.save(model, path)


def assert_refused(path, why, form="onnxruntime", **options):
    """`fuse` raises a sentence that matches `why`, and leaves no new file in the folder."""
    files = sorted(path.parent.iterdir())
    with pytest.raises(ValueError, match=why):
        mx_driving.onnx.fuse(path, path.with_name("after.onnx"), form, **options)
    assert sorted(path.parent.iterdir()) == files


def set_size(path, tensor, axis, size):
    """Give an axis of an input another size, or a name."""
    with edit(path) as model:
        (dimension,) = (i.type.tensor_type.shape.dim[axis] for i in model.graph.input if i.name == tensor)
        dimension.Clear()
        setattr(dimension, "dim_param" if isinstance(size, str) else "dim_value", size)
        del model.graph.value_info[:]


def feeds(arguments=None):
    """Return arrays by the names of a file's inputs."""
    return {name: t.numpy().copy() for name, t in zip("vlw", arguments or inputs(), strict=True)}


def run(path, arguments, **more):
    session = onnx_nodes.session(path, mx_driving.onnx.library())
    return session.run(None, feeds(arguments) | more)[0]


def verified(path, arguments=None):
    """Return the report of `verify` on onnxruntime."""
    return check(path, _runtimes.find_runtime("onnxruntime"), feeds(arguments))


def kinds(path):
    return [node.op_type for node in onnx.load(path).graph.node]
