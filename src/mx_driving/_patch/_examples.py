"""The small examples of a trial (_trial.py): sizes, arguments of constructors, and arguments of calls by role."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._operator.geometry import starts_of
from ._attention import LEVELS, Attention, get_sizes
from ._forms import CORES, FUNCTION, ROWS, SPLIT, Arguments, Core, find_role, make_shapes
from ._parameters import Parameters

_LISTED = {"value_spatial_shapes", "value_shapes"}  # parameters of modules that take the shapes as a list
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Sizes:
    """Sizes of an example. Most sizes differ, so that results show whether a form exchanges two axes."""

    batches: int
    queries: int
    heads: int
    channels: int
    levels: int
    counts: tuple[int, ...]  # points of each level, for code whose levels have different numbers of points
    points: int
    maps: tuple[tuple[int, int], ...]  # (H, W) of each level. SMALL has spare maps, for classes with a fixed number of levels.
    spread: float  # the scale of a module's parameters, or of a core's value and weights

    @property
    def width(self) -> int:
        return self.heads * self.channels

    def list_arguments(self, uneven: Set[str]) -> dict[str, Any]:
        """Return the arguments of a module's constructor, by name. In the library transformers, it takes a `config`."""
        configuration = {
            **{"d_model": self.width, "num_feature_levels": self.levels, "decoder_attention_heads": self.heads},
            **{"decoder_n_levels": self.levels, "decoder_n_points": self.points, "decoder_offset_scale": 0.5},
            **{"decoder_method": "default", "disable_custom_kernels": True},
        }
        small = {
            **dict.fromkeys(("d_model", "embed_dim", "embed_dims"), self.width),
            **dict.fromkeys(("n_heads", "num_heads"), self.heads),
            **dict.fromkeys(("n_levels", "num_levels"), self.levels),
            **dict.fromkeys(("n_points", "num_points"), self.points),
            "num_steps": self.levels + 1,
        }
        lists = {name: list(self.counts) for name in uneven}
        return {**small, **lists, "config": SimpleNamespace(**{**configuration, **lists})}


SMALL = Sizes(2, 14, 3, 4, 2, (2, 4), 4, ((3, 2), (2, 4), (1, 3), (2, 1), (1, 1)), 1)
# The second example has one batch, head, level and point, and large numbers, because a core may clamp its inputs. The third
# example has one query.
_FAR = 1e6
SIZES_OF_CORES = (
    Sizes(2, 5, 3, 4, 2, (2, 4), 2, ((5, 4), (3, 6)), 1),
    Sizes(1, 40, 1, 4, 1, (1,), 1, ((1, 1),), _FAR),
    Sizes(1, 1, 1, 1, 2, (1, 1), 1, ((3, 2), (1, 4)), 1),
)


class Example(NamedTuple):
    """One call of a trial.

    Attributes:
        ways: the ways to write the call, each as arguments by role. The original may accept only one of the ways.
        width: the size of the last axis of a module's reference points.
        has_memory: whether a module gets a value. A module without a value samples its query.
        masked: whether a module gets a mask.
    """

    ways: Sequence[Arguments]
    width: int = 0
    has_memory: bool = True
    masked: bool = False


def make_random() -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.rand(shape, generator=generator, dtype=torch.float64)


def make_examples(form: Any, module: Any, parameters: Parameters) -> Iterator[Example]:
    """Yield an example of every kind of call that the form serves."""
    if isinstance(form, Attention):
        yield from _make_module_calls(form, module, parameters)
        return
    if getattr(form, "example", ""):
        yield Example([dict(zip(map(find_role, form.parameters), _make_arguments(form.example), strict=True))])
        return
    core = form if isinstance(form, Core) else CORES["layer"]  # An autograd function takes a core's arguments.
    for sizes, axes, method in itertools.product(SIZES_OF_CORES, core.axes, core.methods):
        shapes = make_shapes(sizes.maps, _CPU)
        split = (sizes.levels, sizes.points)
        points = (sum(sizes.counts),) if core.uneven else split if axes == SPLIT else (math.prod(split),)
        rand, samples = make_random(), (sizes.batches, sizes.queries, sizes.heads, *points)
        value = rand(sizes.batches, sum(h * w for h, w in sizes.maps), sizes.heads, sizes.channels) - 0.5
        # Some locations lie outside the map. Some weights are negative.
        locations = rand(*samples, 2)
        locations = 9 * locations - 4 if sizes.spread == _FAR else 1.4 * locations - 0.2
        inputs = {
            **{"value": sizes.spread * value, "sizes": list(sizes.maps), "starts": starts_of(shapes)},
            **{"locations": (locations * 8).round().long() - 1 if core.pixels else locations, "method": method},
            **{"weights": sizes.spread * (rand(*samples) * 1.5 - 0.5), "counts": list(sizes.counts)},
            **{"step": 64, "value_shape": "default"},
        }
        tables = [[[*s] for s in sizes.maps], shapes] if core.kind == FUNCTION else [shapes]
        yield Example([{**inputs, "shapes": table} for table in tables])


def _make_module_calls(form: Attention, module: Any, parameters: Parameters) -> Iterator[Example]:
    """For each width of reference points, yield three calls: with value and mask, without a mask, and without a value, too.

    Some reference points lie outside the maps. One way of each call has as many queries as keys, because a module without a
    value samples its query, and some modules with a value require equal numbers, too.
    """
    heads, levels, _ = get_sizes(module)
    maps, batches, width = list(SMALL.maps[:levels]), SMALL.batches, module.sampling_offsets.in_features
    if getattr(module, "num_bev_queue", 1) == form.queue:
        width //= form.queue
    rand, keys, shapes = make_random(), sum(h * w for h, w in maps), make_shapes(maps, _CPU)
    table = maps if set(parameters.all) & _LISTED else shapes
    tables = {"shapes": table, "sizes": maps, "starts": starts_of(shapes), "keys": [h * w for h, w in maps]}
    if "trajectories" in form.needs:  # UniAD's queries follow trajectories in metres.
        boxes = [(SimpleNamespace(gravity_center=20 * rand(2, 3) - 10),) + 4 * (None,) for _ in range(batches)]
        query, identity, position = (rand(batches, 2, 3, width) - 0.5 for _ in range(3))
        trajectories, value = 20 * rand(batches, 2, 3, 2, len(maps), 2) - 10, rand(keys, batches, width) - 0.5
        needed = {"query": query, "value": value, "trajectories": trajectories, "boxes": boxes, **tables}
        full = {**needed, "identity": identity, "position": position, "mask": rand(batches, keys) < 0.3}
        yield Example([full], 2, masked=True)
        yield Example([needed], 2)
        return
    sides, memories = (width,) if form.layout is ROWS else (heads, width // heads), batches * form.queue

    def rows(batches: int, count: int, *sides: int) -> Tensor:
        tensor = rand(batches, count, *sides) - 0.5
        return tensor if getattr(module, "batch_first", True) else tensor.transpose(0, 1)

    def arguments(levels: int, last: int, queries: int, has_memory: bool, masked: bool) -> Arguments:
        reference = 1.4 * rand(memories, queries, len(maps) if levels == LEVELS else levels, last) - 0.2
        reference[..., 2:] = reference[..., 2:].abs()
        optional: dict[str, Any] = dict.fromkeys(("value", "identity", "position", "mask"))
        if has_memory:
            optional = {name: rows(batches, queries, width) for name in ("identity", "position")}
            optional |= {"value": rows(memories, keys, *sides), "mask": rand(memories, keys) < 0.3 if masked else None}
        return {**tables, "query": rows(batches, queries, width), "reference": reference, **optional}

    for last in dict.fromkeys(last for _, last in form.references):
        counts = [count for count, other in form.references if other == last]
        for has_memory, masked in ((True, True), (True, False), (False, False)):
            numbers = (SMALL.queries, keys) if has_memory else (keys,)
            ways = [arguments(count, last, queries, has_memory, masked) for count in counts for queries in numbers]
            yield Example(ways, last, has_memory, masked)


def _make_arguments(name: str) -> tuple[Any, ...]:
    """Return the arguments of an example for a function over an extension (_extensions.py). Some points lie off the grid."""
    generator = torch.Generator().manual_seed(0)
    rand, draw = functools.partial(torch.rand, generator=generator), functools.partial(torch.randint, generator=generator)
    if name == "aggregation":  # features of 2 cameras with 2 levels each, and 5 anchors of 3 points, in 2 groups
        shapes, starts = torch.tensor([[[3, 4], [2, 2]]] * 2), torch.tensor([[0, 12], [16, 28]])
        features, places, weights = rand(2, 32, 4), rand(2, 5, 3, 2, 2), rand(2, 5, 3, 2, 2, 2)
        return features - 0.5, shapes.int(), starts.int(), 1.4 * places - 0.2, weights
    if name == "lifted":
        depth, feat = rand(1, 2, 3, 2, 2).double() - 0.5, rand(1, 2, 2, 2, 3).double() - 0.5
        points, cells = torch.randperm(24, generator=generator)[:20], draw(12, (20,)).sort().values
        rows, lengths = points // 12 * 4 + points % 4, torch.unique_consecutive(cells, return_counts=True)[1]
        points, rows, cells, starts, lengths = (t.int() for t in (points, rows, cells, lengths.cumsum(0) - lengths, lengths))
        return depth, feat, points, rows, cells, (1, 1, 3, 4, 3), starts, lengths
    if name in ("frustum", "image"):
        geometry, features, sizes = draw(-1, 5, (2, 40, 3)).int(), rand(2, 40, 3).double() - 0.5, torch.tensor([4, 3, 2])
        if name == "frustum":
            return geometry, features, sizes
        # a batch of one frustum: 2 cameras, 3 depths and 2 x 2 pixels
        depth, context = (features.flatten()[first : first + 24].view(2, 3, 2, 2) for first in (0, 24))
        return geometry[:1, :24].view(1, 2, 3, 2, 2, 3), depth, context, sizes
    coords = torch.stack([draw(size, (30,)) for size in (3, 4, 2, 2)], 1)
    feats, sizes = rand(30, 3).double() - 0.5, (2, 2, 3, 4)
    if name == "rows":
        return feats, coords, *sizes
    ranks = coords @ torch.tensor([16, 4, 2, 1])
    order = ranks.argsort()
    feats, coords, ranks = feats[order], coords[order], ranks[order]
    if name == "sorted_xyzb":  # As in FlashOCC, the innermost axis is x.
        return feats, coords[:, [1, 0, 2, 3]], ranks, *sizes, "sum"
    return (feats, coords, ranks) if name == "runs" else (feats, coords, ranks, *sizes)
