"""The sizes and the arguments, by role, of the examples of a trial."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ._attention import LEVELS, Attention, get_heads
from ._forms import AUTOGRAD, FUNCTION, ROWS, SPLIT, Arguments, find_role, make_tables


@dataclass(frozen=True)
class Sizes:
    """Sizes of an example, all of them different, so that two axes that change places show."""

    batches: int
    queries: int
    heads: int
    channels: int
    levels: int
    counts: tuple[int, ...]  # points of each level, where a level has its own number of them
    points: int
    maps: tuple[tuple[int, int], ...]  # more than there are levels, for classes of fixed sizes
    spread: float  # of parameters, and with them of offsets and logits

    @property
    def width(self) -> int:
        return self.heads * self.channels

    def arguments(self, uneven: Set[str]) -> dict[str, Any]:
        """Return the arguments of a module's constructor, by name. Constructors of transformers take a configuration."""
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
# The second example has sizes of 1 and far numbers, for cores that clamp; the third has one query.
_FAR = 1e6
SIZES_OF_CORES = (
    Sizes(2, 5, 3, 4, 2, (2, 4), 2, ((5, 4), (3, 6)), 1),
    Sizes(1, 40, 1, 4, 1, (1,), 1, ((1, 1),), _FAR),
    Sizes(1, 1, 1, 1, 2, (1, 1), 1, ((3, 2), (1, 4)), 1),
)


def make_core_examples(form: Any, sizes: Sizes) -> Iterator[list[Arguments]]:
    """Return an example of every kind that the form serves, each in the ways to write it."""
    if getattr(form, "example", None) is not None:
        yield [dict(zip(map(find_role, form.parameters), form.example(), strict=True))]
        return
    shapes, starts = make_tables(sizes.maps, torch.device("cpu"))
    common = {"sizes": list(sizes.maps), "starts": starts, "counts": list(sizes.counts), "step": 64, "value_shape": "default"}
    split = (sizes.levels, sizes.points)
    if form.kind == AUTOGRAD:
        yield [{**common, **_make_core_tensors(sizes, split), "shapes": shapes}]
        return
    for axes, method in itertools.product(form.axes, form.methods):
        points = (sum(sizes.counts),) if form.uneven else split if axes == SPLIT else (math.prod(split),)
        inputs = {**common, **_make_core_tensors(sizes, points), "method": method}
        if form.pixels:
            inputs["locations"] = (inputs["locations"] * 8).round().long() - 1
        tables = [[[*s] for s in sizes.maps], shapes] if form.kind == FUNCTION else [shapes]
        yield [{**inputs, "shapes": table} for table in tables]


def _make_core_tensors(sizes: Sizes, points: Sequence[int]) -> dict[str, Any]:
    """Return value, locations and weights; some locations lie outside the map, some weights are negative."""
    rand, samples = make_random(torch.float64), (sizes.batches, sizes.queries, sizes.heads, *points)
    value = rand(sizes.batches, sum(h * w for h, w in sizes.maps), sizes.heads, sizes.channels) - 0.5
    locations = rand(*samples, 2)
    locations = 9 * locations - 4 if sizes.spread == _FAR else 1.4 * locations - 0.2
    return {"value": sizes.spread * value, "locations": locations, "weights": sizes.spread * (rand(*samples) * 1.5 - 0.5)}


def make_random(dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.rand(shape, generator=generator, dtype=dtype)


def make_module_examples(
    form: Attention, module: Any, maps: Sequence[Any], sizes: Sizes, masked: bool
) -> Iterator[tuple[tuple[int, bool], Arguments]]:
    """Return arguments by role: for each shape of the reference all of them, and only what is needed. Some references lie
    outside. A module that looks at itself has as many queries as keys, and so have some others."""
    rand, keys, width = make_random(torch.float64), sum(h * w for h, w in maps), module.sampling_offsets.in_features
    width = width // form.queue if getattr(module, "num_bev_queue", 1) == form.queue else width
    shapes, starts = make_tables(maps, torch.device("cpu"))
    tables, batches = {"shapes": shapes, "sizes": maps, "starts": starts, "keys": [h * w for h, w in maps]}, sizes.batches
    heads = (width,) if form.layout is ROWS else (get_heads(module), width // get_heads(module))

    def rows(batches: int, count: int, *sides: int) -> Tensor:
        tensor = rand(batches, count, *sides) - 0.5
        return tensor if getattr(module, "batch_first", True) else tensor.transpose(0, 1)

    if "trajectories" in form.needs:
        yield from (
            ((2, True), {**tables, **i}) for i in _make_trajectory_inputs(rand, sizes.batches, keys, width, len(maps), masked)
        )
        return
    for count, numbers in form.references:
        for queries, has_memory in ((sizes.queries, True), (keys, True), (keys, False)):
            reference = 1.4 * rand(batches * form.queue, queries, len(maps) if count == LEVELS else count, numbers) - 0.2
            reference[..., 2:] = reference[..., 2:].abs()
            inputs = {**tables, "query": rows(batches, queries, width), "reference": reference}
            optional = {"value": rows(batches * form.queue, keys, *heads)}
            optional |= {name: rows(batches, queries, width) for name in ("identity", "position")}
            mask = rand(batches * form.queue, keys) < 0.3 if masked else None
            optional = {**optional, "mask": mask} if has_memory else dict.fromkeys((*optional, "mask"))
            yield (numbers, has_memory), {**inputs, **optional}


def _make_trajectory_inputs(
    rand: Callable[..., Tensor], batches: int, keys: int, width: int, levels: int, masked: bool
) -> Iterator[Arguments]:
    boxes = [(SimpleNamespace(gravity_center=20 * rand(2, 3) - 10),) + 4 * (None,) for _ in range(batches)]
    query, identity, position = (rand(batches, 2, 3, width) - 0.5 for _ in range(3))
    trajectories = 20 * rand(batches, 2, 3, 2, levels, 2) - 10
    needed = {"query": query, "value": rand(keys, batches, width) - 0.5, "trajectories": trajectories, "boxes": boxes}
    yield {**needed, "identity": identity, "position": position, "mask": rand(batches, keys) < 0.3 if masked else None}
    yield needed
