"""Warnings about inputs that are legal but look like a mistake. They are off by default.

Legal inputs cannot be refused, so a finding is a warning with a fact. The checks run below the dispatcher, where tensors hold
data: after torch.compile, vmap, autocast and DTensor, and never during tracing.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._operator import composition, geometry
from ._operator.description import OPERATORS, Operator, SamplingInputs
from ._operator.rules import flag

# The number of open data_checks(), plus one if the environment turns them on. Process-wide, as in limits.py.
_open = int(flag("MX_DRIVING_CHECK"))
_when_enabled: list[Callable[[], None]] = []  # actions at the first time that the checks are enabled
_warned: set[tuple[str, str]] = set()  # (operator, kind) of warnings: each is given once

_SOME = 0.1  # "some"
_MOST = 0.5  # "most" of something is more than this fraction of it
_PIXELS = (2, 16384)  # a pixel's larger coordinate lies between these; that of a location in 0..1 seldom does
_OBLONG = math.log(1.25)  # a map is clearly wide or clearly high if its sides have this ratio or more
_FEW_ROWS, _FEW_NUMBERS = 8, 256  # with fewer rows, or fewer numbers at their ends, a map is too small to judge
# Times the mean difference of neighbours: more than usual from _STEP on, usual up to _NO_STEP. At the ends of rows we measured
# 1.2 to 8, for photographs through a convolution and for smooth random maps (2026-11-22).
_STEP, _NO_STEP = 1.5, 1.1
_SUMS = (0.75, 1.33)  # the median sum of a query's weights after a softmax; dropout moves sums by less


class DataWarning(UserWarning):
    """An operator's inputs are legal, but look like a mistake."""


@contextlib.contextmanager
def data_checks() -> Iterator[None]:
    """Look at the data of every call inside, and warn `DataWarning` once for each operator and kind of finding.

    It warns of:

    - NaN;
    - samples that mostly lie off their map, locations in pixels where 0..1 is the map, and the reverse in
      geometric_kernel_attention;
    - shapes that look like (W, H): wide levels beside high ones, pixels that fit the maps only when swapped, and rows of value
      that end where (W, H) would have them end;
    - maps that overlap while rows of value are in none, and maps of several cameras that lie scale by scale;
    - weights that are negative or do not sum to about 1, and negative depth in bev_pool_v3, as logits are before their softmax;
    - D and H exchanged in bev_pool_v3.

    It cannot judge square maps, or inputs without any of these signs. On a GPU it also refuses wrong index tables, as every
    call does on a CPU.

    Every call reads all of its inputs and, on a GPU, waits for them. Process-wide while it is open; `MX_DRIVING_CHECK=1`
    (true, yes, on) in the environment does the same for a whole program.

    >>> import torch, mx_driving
    >>> value, shapes, start = torch.ones(1, 16, 1, 1), torch.tensor([[4, 4]]), torch.tensor([0])
    >>> pixel = torch.tensor([3, 2.0]).view(1, 1, 1, 1, 1, 2)
    >>> with warnings.catch_warnings(record=True) as caught, data_checks():
    ...     out = mx_driving.multi_scale_deformable_attn(value, shapes, start, pixel, torch.ones(1, 1, 1, 1, 1))
    >>> print(str(caught[0].message).partition(": ")[2])
    sampling_locations should be fractions of the map, 0..1; got 100 % that look like pixels, up to 3
    """
    global _open
    if not _open:
        _warned.clear()
    _open += 1
    while _when_enabled:
        _when_enabled.pop()()
    try:
        yield
    finally:
        _open -= 1


def enabled() -> bool:
    return _open > 0


def when_enabled(action: Callable[[], None]) -> None:
    """Call `action` once, as soon as the checks are enabled."""
    if _open:
        action()
    else:
        _when_enabled.append(action)


def followed(operator: Operator, kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a kernel that also looks at its legal inputs; with logits, at those of the bare operator."""

    def run(*args: Any) -> Tensor:
        output = kernel(*args)
        if _open:
            inputs: Any = composition.bare_inputs(operator.name, *args) if operator.bare else args
            _look(
                _Call(operator, *inputs) if operator.kind != "pooling" else _Points(operator, inputs[0], inputs[1], inputs[5:])
            )
        return output

    return run


class _Call(NamedTuple):
    operator: Operator
    value: Tensor  # [bs, rows, ...]
    shapes: Tensor
    starts: Tensor
    locations: Tensor
    weights: Tensor

    @property
    def names(self) -> SamplingInputs:
        return SamplingInputs(*OPERATORS[self.operator.bare or self.operator.name].inputs)

    @property
    def floating(self) -> tuple[tuple[str, Tensor], ...]:
        names = self.names
        return (names.value, self.value), (names.locations, self.locations), (names.weights, self.weights)


class _Points(NamedTuple):
    """A call of bev_pool_v3. Its ranks are legal."""

    operator: Operator
    feat: Tensor
    depth: Tensor
    sizes: tuple[int, ...]  # B, D, H, W

    @property
    def floating(self) -> tuple[tuple[str, Tensor], ...]:
        return ("feat", self.feat), ("depth", self.depth)


def _look(call: _Call | _Points) -> None:
    if not all(t.numel() for t in call if isinstance(t, Tensor)):
        return
    if call[1].is_cuda and torch.cuda.is_current_stream_capturing():
        return  # a graph's capture cannot wait for data
    for look in (_nan, *_LOOKS[call.operator.bare or call.operator.name]):
        look(call)


def _warn(call: _Call | _Points, kind: str, name: str, rule: str, fact: str) -> None:
    """Warn once, at the caller's line: the nearest that is neither ours nor torch's."""
    operator = call.operator.name
    if (operator, kind) not in _warned:
        _warned.add((operator, kind))
        warnings.warn(f"{operator}: {name} should {rule}; got {fact}", DataWarning, stacklevel=_caller())


@functools.cache
def _passed_over() -> tuple[str, ...]:
    folders = (os.path.dirname(str(module.__file__)) + os.sep for module in (sys.modules[__name__.partition(".")[0]], torch))
    return *folders, "<eval_with_key>"  # the file name of what torch.compile writes


def _caller() -> int:
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_passed_over()):
        frame, level = frame.f_back, level + 1
    return level


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _fraction(where: Tensor) -> float:
    return where.float().mean().item()


def _nan(call: _Call | _Points) -> None:
    for name, t in call.floating:
        if t.is_floating_point() and (fraction := _fraction(t.isnan())):
            _warn(call, f"NaN in {name}", name, "have no NaN", _percent(fraction))


class _Samples(NamedTuple):
    """Locations in pixels, and the sizes of their maps."""

    x: Tensor
    y: Tensor
    width: Tensor
    height: Tensor

    def on_map(self) -> Tensor:
        """True where a sample of multi_scale_deformable_attn reads, and where geometric_kernel_attention clamps nothing."""
        return (self.x > -1) & (self.y > -1) & (self.x < self.width) & (self.y < self.height)

    def reach(self) -> float:
        """How far samples reach right and down, as fractions of the map's sides; the smaller of the two."""
        return min((self.x / self.width).max().item(), (self.y / self.height).max().item())

    def swapped(self) -> _Samples:
        return self._replace(width=self.height, height=self.width)


def _pixels(call: _Call, normalised: bool) -> _Samples:
    """The samples of an attention operator. float64 holds every pixel."""
    x, y = call.locations.double().unbind(-1)
    height, width = (side[:, None].double() for side in call.shapes.unbind(-1))
    return _Samples(x * width - 0.5, y * height - 0.5, width, height) if normalised else _Samples(x, y, width, height)


def _like_pixels(locations: Tensor) -> Tensor:
    """Where no coordinate is negative, and the larger one is as large as those of pixels."""
    largest = locations.amax(-1)
    return (locations >= 0).all(-1) & (largest > _PIXELS[0]) & (largest <= _PIXELS[1])


def _warn_of_pixels(call: _Call, like: Tensor, fraction: float) -> None:
    largest = call.locations.amax(-1)[like].max().item()
    fact = f"{_percent(fraction)} that look like pixels, up to {largest:.4g}"
    _warn(call, "pixels", call.names.locations, "be fractions of the map, 0..1", fact)


def _normalised(call: _Call) -> None:
    """multi_scale_deformable_attn."""
    off = _fraction(~_pixels(call, normalised=True).on_map())
    if off <= _MOST:
        return
    like = _like_pixels(call.locations)
    if (fraction := _fraction(like)) > _MOST:
        _warn_of_pixels(call, like, fraction)
        return
    low, high = call.locations.min().item(), call.locations.max().item()
    grid = " and all in -1..1, the range of grid_sample" if low < -0.5 and low >= -1 and high <= 1 else ""
    fact = f"{_percent(off)} of samples off them{grid}"
    _warn(call, "off the map", call.names.locations, "mostly lie on their maps, 0..1", fact)


def _seen(call: _Call) -> None:
    """deformable_aggregation. It counts points, not samples, because one camera sees a point and the others do not."""
    within = geometry.inside(call.locations)
    unseen = _fraction(~within.any(-1))
    if unseen <= _MOST:
        return
    like = _like_pixels(call.locations)
    if (fraction := _fraction(like.any(-1))) > _MOST:
        _warn_of_pixels(call, like, fraction)
        return
    rule = "lie in some camera's picture, 0..1, for most points"
    _warn(call, "off the map", call.names.locations, rule, f"{_percent(unseen)} of points in none")


def _in_pixels(call: _Call) -> None:
    """geometric_kernel_attention."""
    locations = call.locations
    if locations.numel() > 2 and call.shapes.max() > 2 and bool(((locations >= 0) & (locations <= 1)).all()):
        height, width = call.shapes[call.shapes.prod(-1).argmax()].tolist()
        fact = f"none beyond 1 on a map of {height} x {width}, as if 0..1 were the map"
        _warn(call, "normalised", call.names.locations, "be pixels of each level", fact)
        return
    samples = _pixels(call, normalised=False)
    off, swapped = _fraction(~samples.on_map()), _fraction(~samples.swapped().on_map())
    if off > 0.05 and swapped < 0.1 * off and samples.swapped().reach() > 0.75:
        fact = f"{_percent(off)} of samples off their maps, and {_percent(swapped)} if the shapes were (W, H)"
        _warn(call, "swapped", call.names.shapes, "be (H, W)", fact)
    elif off > _MOST:
        fact = f"{_percent(off)} of samples off them"
        _warn(call, "off the map", call.names.locations, "mostly lie on their maps", fact)


def _swapped_levels(call: _Call) -> None:
    """The levels of one pyramid show one picture: one cannot be wide and another one high."""
    pyramids = call.shapes if call.shapes.dim() == 3 else call.shapes[None]
    for levels in pyramids.tolist():
        aspects = [math.log(width / height) for height, width in levels]
        if min(aspects) < -_OBLONG and max(aspects) > _OBLONG:
            wide, high = (levels[aspects.index(pick(aspects))] for pick in (max, min))
            fact = f"{tuple(wide)} beside {tuple(high)} in one pyramid"
            _warn(call, "swapped", call.names.shapes, "be (H, W) on every level", fact)


def _row_ends(call: _Call) -> None:
    """Compare neighbours in value: they differ more than usual where a row of the picture ends and the next one begins."""
    numbers = call.value[:, 0].numel()
    maps = zip(call.shapes.flatten(0, -2).tolist(), call.starts.flatten().tolist(), strict=True)
    oblong = [(h * w, h, w, start) for (h, w), start in maps if abs(math.log(w / h)) > _OBLONG and min(h, w) >= _FEW_ROWS]
    if not oblong or max(oblong)[0] ** 0.5 * numbers < _FEW_NUMBERS:
        return
    rows, height, width, start = max(oblong)
    steps = _steps(call.value, start, rows)
    end = torch.arange(1, rows, device=steps.device)
    as_given = steps[(end % width == 0) & (end % height != 0)].mean()  # but not ends that (W, H) has too
    as_swapped = steps[end % height == 0].mean()
    if as_given < _NO_STEP and as_swapped > _STEP:
        fact = f"({height}, {width}), while rows of {call.names.value} seem to end every {height}"
        _warn(call, "swapped", call.names.shapes, "be (H, W)", fact)


def _steps(value: Tensor, start: int, rows: int) -> Tensor:
    """Return how much neighbours among some rows of value differ, of what they differ on average."""
    steps = value[:, start : start + rows].float().diff(dim=1).abs().flatten(2).mean((0, 2))
    return steps / steps.mean()


def _scale_major(call: _Call) -> None:
    """deformable_aggregation. Read scale by scale, a small map shows rows of a larger one, of which half end elsewhere."""
    camera_major = geometry.starts_of(call.shapes)
    if min(call.starts.shape) < 2 or not torch.equal(call.starts.long(), camera_major):
        return
    by_scale = geometry.starts_of(call.shapes.transpose(0, 1)).transpose(0, 1)
    (height, width), rows = call.shapes[0, 1].tolist(), int(by_scale[-1, -1] + call.shapes[-1, -1].prod())
    numbers = call.value[:, 0].numel()
    if rows > call.value.shape[1] or min(height, width) < _FEW_ROWS or (height * width) ** 0.5 * numbers < _FEW_NUMBERS:
        return
    as_given, as_by_scale = (_ends_of_rows(call.value, call.shapes[:, 1], starts[:, 1]) for starts in (camera_major, by_scale))
    if min(as_given) < _NO_STEP and sum(as_by_scale) / len(as_by_scale) > _STEP:
        fact = "maps that seem to lie scale by scale, all cameras of a scale together"
        _warn(call, "scale-major", call.names.value, "hold the maps camera by camera, as the starts say", fact)


def _ends_of_rows(value: Tensor, shapes: Tensor, starts: Tensor) -> list[float]:
    """Return for each map how much neighbours differ where a row ends: the smaller number of even and odd rows."""
    steps = [
        _steps(value, start, height * width)[width - 1 :: width]
        for (height, width), start in zip(shapes.tolist(), starts.tolist(), strict=True)
    ]
    return [min(ends[::2].mean().item(), ends[1::2].mean().item()) for ends in steps]


def _rows_of_maps(call: _Call) -> None:
    """Maps that share rows while other rows are in none: starts are of maps of other sizes. Each alone may be meant."""
    maps = torch.stack([call.starts.flatten(), call.starts.flatten() + call.shapes.prod(-1).flatten()], 1)
    begins, ends = maps.unique(dim=0).unbind(1)  # cameras may share a whole map
    rows = call.value.shape[1]
    covered = (torch.bincount(begins, minlength=rows + 1) - torch.bincount(ends, minlength=rows + 1)).cumsum(0)[:rows]
    unread = int((covered == 0).sum())
    if unread and bool((covered > 1).any()):
        fact = f"maps that overlap, while {unread} of {rows} rows of {call.names.value} are in none"
        _warn(call, "overlap", call.names.starts, "give each map rows of its own", fact)


def _like_logits(call: _Points) -> None:
    if (fraction := _fraction(call.depth < 0)) > _SOME:
        fact = f"{_percent(fraction)} below 0, as if they were logits"
        _warn(call, "logits", "depth", "say how much of a pixel lies at each depth, 0..1", fact)


def _exchanged_axes(call: _Points) -> None:
    _, depth, height, width = call.sizes
    if depth > height and depth * height > 0 and abs(math.log(depth / width)) < abs(math.log(height / width)):
        fact = f"D={depth} beside H={height} and W={width}, as if D and H were exchanged"
        _warn(call, "exchanged", "bev_feat_shape", "be (B, D, H, W, C)", fact)


def _softmaxed(call: _Call) -> None:
    """Logits before their softmax are negative, and other numbers do not sum to 1."""
    if call.operator.bare:
        return
    name, weights = call.names.weights, call.weights.double()
    if (fraction := _fraction(weights < 0)) > _SOME:
        fact = f"{_percent(fraction)} below 0, as if they were logits"
        _warn(call, "no softmax", name, "come from a softmax, 0..1", fact)
        return
    if call.operator.kind == "aggregation" and weights.shape[2] == 1:
        return  # of a point alone: where points are summed later, they share the 1
    sums = weights.sum((2, 3, 4) if call.operator.kind == "aggregation" else (3, 4))
    median = sums[sums != 0].nanmedian().item() if sums.any() else 1.0
    if median < _SUMS[0] or median > _SUMS[1]:
        _warn(call, "no softmax", name, "sum to about 1 for each query, as after a softmax", f"sums around {median:.3g}")


_MAPS = (_softmaxed, _swapped_levels, _row_ends, _rows_of_maps)
_LOOKS: dict[str, tuple[Callable[[Any], None], ...]] = {
    "multi_scale_deformable_attn": (_normalised, *_MAPS),
    "deformable_aggregation": (_seen, *_MAPS, _scale_major),
    "geometric_kernel_attention": (_in_pixels, *_MAPS),
    "bev_pool_v3": (_like_logits, _exchanged_axes),
}
