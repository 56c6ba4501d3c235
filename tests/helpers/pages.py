"""Make looks for pages, and parse pages."""

import base64
import html.parser
import json
import pathlib

import cases
import numpy
import torch

import mx_driving
from mx_driving import viz


class Parser(html.parser.HTMLParser):
    """Collects the attributes of a page by name, and the text of its scripts, styles and titles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.name = ""
        self.texts: dict[str, str] = {}
        self.attributes: dict[str, list[str]] = {}
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        for name, value in attributes.items():
            self.attributes.setdefault(name, []).append(value)
        self.name = attributes.get("id", tag) if tag == "script" else tag

    def handle_data(self, data):
        self.texts[self.name] = self.texts.get(self.name, "") + data

    def handle_endtag(self, tag):
        self.name = ""


def written(path: pathlib.Path) -> tuple[Parser, dict]:
    parsed = Parser(path.read_text(encoding="utf-8"))
    return parsed, json.loads(parsed.texts["data"])


def numbers(packed: str, kind: str) -> torch.Tensor:
    return torch.from_numpy(numpy.frombuffer(base64.b64decode(packed), kind).astype("float64"))


def samples(facts: dict, call: int = 0) -> dict[tuple[int, int], list[tuple[int, int, int, float, float, float]]]:
    """Return (query, camera) -> (head, level, point, x, y, weight) of the samples that read something and have a weight."""
    look = facts["looks"][call]
    ends, cameras = numbers(look["ends"], "<u4").long().tolist(), numbers(look["camera"], "<u2").long().tolist()
    heads, levels, points = look["heads"], look["levels"], look["points"]
    places = numbers(look["locations"], "<u2").view(-1, *look["shared"], points, 2)
    places = places.expand(-1, heads, levels, points, 2)
    weights = numbers(look["weights"], "<i2").view(-1, heads, levels, points) / 32767 * look["largest"]
    by_query: dict = {}
    for row, query in enumerate(numbers(facts["queries"]["numbers"], "<u4").long().tolist()):
        for block in range(ends[row - 1] if row else 0, ends[row]):
            kept = ((places[block, ..., 0] != 65535) & (weights[block] != 0)).nonzero().tolist()
            by_query[query, cameras[block]] = [
                (h, l, p, *(places[block, h, l, p] / 32767 - 0.5).tolist(), float(weights[block, h, l, p])) for h, l, p in kept
            ]
    return by_query


def attention() -> viz.Look:
    """Return a look of two cameras. Some samples lie off their maps."""
    shapes, starts = cases.levels_of((6, 8), (3, 4))
    locations = torch.rand(2, 4, 2, 2, 2, 2) * 1.4 - 0.2
    with viz.recording() as looks:
        weights = torch.rand(2, 4, 2, 2, 2) + 0.01
        mx_driving.multi_scale_deformable_attn(torch.rand(2, 60, 2, 4), shapes, starts, locations, weights)
    return looks[0]


def geometric() -> viz.Look:
    """Return a look of two cameras. Locations are truncated and clamped to pixels."""
    shapes, starts = cases.levels_of((4, 10))
    locations = torch.rand(2, 4, 2, 1, 3, 2) * 14 - 2
    locations[0, 0, 0, 0, 0] = torch.tensor([float("nan"), float("inf")])
    with viz.recording() as looks:
        weights = torch.rand(2, 4, 2, 1, 3) + 0.01
        mx_driving.geometric_kernel_attention(torch.rand(2, 40, 2, 4), shapes, starts, locations, weights)
    return looks[0]


def aggregation() -> viz.Look:
    """Return a look of three cameras. Points count strictly inside the picture."""
    maps = [torch.rand(1, 3, 8, 8 // 2**s, 12 // 2**s) for s in range(2)]
    locations, weight = torch.rand(1, 4, 5, 3, 2) * 2 - 0.5, torch.rand(1, 4, 5, 3, 2, 4) + 0.01
    with viz.recording() as looks:
        mx_driving.deformable_aggregation(*mx_driving.nn.flatten_cameras(maps), locations, weight)
    return looks[0]


class BirdsEyeLayer(torch.nn.Module):
    """A layer of BEVFormer and a decoder's layer: 12 cells, three cameras, four queries."""

    def __init__(self) -> None:
        super().__init__()
        self.temporal = mx_driving.nn.TemporalSelfAttention(16)
        self.spatial = mx_driving.nn.SpatialCrossAttention(16, num_levels=1)
        self.decoder = torch.nn.ModuleList([mx_driving.nn.MultiScaleDeformableAttention(16, num_levels=1) for _ in range(2)])

    def forward(self, mask):
        (grid, *image), cells = [cases.levels_of(size) for size in ((3, 4), (5, 6))], torch.rand(1, 12, 16)
        cells = self.temporal(cells, torch.rand(1, 2, 12, 1, 2), None, *grid)
        pillars = torch.rand(1, 3, 12, 4, 2)
        cells = self.spatial(cells, pillars, torch.rand(1, 3, 30, 16), *image[0], mask[None, ..., None].expand(-1, -1, -1, 4))
        for layer in self.decoder:
            layer(torch.rand(1, 4, 16), torch.rand(1, 4, 1, 2), cells, *grid)


PICTURE = torch.rand(6, 8, 3)
