"""Warnings about inputs that are legal but look like a mistake. They are off by default.

Legal inputs cannot be refused, so a finding is a warning with a fact. The checks run below the dispatcher, where tensors hold
data: after torch.compile, vmap, autocast and DTensor, and never during tracing. We cannot use a TorchDispatchMode: a mode sees
only its thread, and disables torch.compile ("non-infra torch dispatch mode present", torch 2.13).
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ._operator import composition, geometry
from ._operator.description import OPERATORS, Operator, SamplingInputs
from ._operator.rules import flag

# The number of open data_checks() in all threads, plus 1 if the environment turns the checks on.
_open = int(flag("MX_DRIVING_CHECK"))
_when_enabled: list[Callable[[], None]] = []  # called once, when the checks are first enabled
_warned: set[tuple[str, str]] = set()  # (operator, kind) of past warnings, which are not repeated

_SOME = 0.1  # some entries are wrong: more than this fraction of them
_MOST = 0.5  # most entries are wrong: more than this fraction of them
_PIXELS = (2, 16384)  # bounds of a pixel's larger coordinate; few normalised locations have a coordinate above 2
_OBLONG = math.log(1.25)  # logarithm of the least ratio of sides of a map that is clearly wide or clearly high
# A map is too small to judge if it has fewer rows or columns than _FEW_ROWS, or if value has fewer than about _FEW_NUMBERS
# numbers at the ends of the map's rows.
_FEW_ROWS, _FEW_NUMBERS = 8, 256
# The last pixel of a row and the first pixel of the next are neighbours in value, but not in the picture. So their mean
# difference is larger than the mean difference of all neighbours: we measured ratios of 1.2 to 8 for photographs through a
# convolution and for smooth random maps (2026-11-22). A ratio above _STEP shows ends of rows. A ratio below _NO_STEP shows that
# no rows end there.
_STEP, _NO_STEP = 1.5, 1.1
_NOT_THE_CALLER = (*(os.path.dirname(str(file)) + os.sep for file in (__file__, torch.__file__)), "<eval_with_key>")
_SUMS = (0.75, 1.33)  # bounds of the median sum of a query's weights after a softmax, with room for dropout


class DataWarning(UserWarning):
    """An operator's inputs are legal, but look like a mistake."""


@contextlib.contextmanager
def data_checks() -> Iterator[None]:
    """Check the data of every call inside the block. Warn `DataWarning` once for each operator and kind of finding.

    The checks warn of:

    - NaN;
    - samples that mostly lie off their map, locations in pixels where 0..1 is the map, and the reverse in
      geometric_kernel_attention;
    - shapes that look like (W, H): wide levels beside high levels, pixels that fit the maps only when swapped, and rows of
      value that seem to end at multiples of H instead of W;
    - maps that overlap while rows of value are in no map, and maps of several cameras that lie scale by scale;
    - weights that are negative or do not sum to about 1, and negative depth in bev_pool_v3: logits before their softmax;
    - D and H exchanged in bev_pool_v3.

    The checks cannot judge square maps, or inputs without any of these signs. On a GPU, calls also refuse wrong index tables,
    as they always do on a CPU.

    Every call reads all of its inputs and, on a GPU, waits for the device. The checks are process-wide while the block is open.
    `MX_DRIVING_CHECK=1` (true, yes, on) in the environment turns the checks on for a whole program.

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


Finding = tuple[str, str, str, str]  # kind, name of the input, rule, fact


def check(operator: Operator, args: tuple[Any, ...]) -> None:
    """Warn of the findings about a call."""
    bare = OPERATORS[operator.bare or operator.name]
    inputs: Any = composition.bare_inputs(operator.name, *args) if operator.bare else args
    floating = {name: t for name, t in zip(bare.inputs, inputs, strict=False) if t.is_floating_point()}
    if not all(t.numel() for t in floating.values()):
        return
    if inputs[0].is_cuda and torch.cuda.is_current_stream_capturing():
        return  # the capture of a CUDA graph cannot wait for data
    for name, t in floating.items():
        if fraction := _fraction(t.isnan()):
            _warn(operator.name, f"NaN in {name}", name, "have no NaN", _percent(fraction))
    if bare.kind == "pooling":
        checks: list[Callable[..., Iterator[Finding]]] = [_find_wrong_pool_inputs]
    else:
        inputs = SamplingInputs(*inputs), SamplingInputs(*bare.inputs)
        # An operator that reads a single row per sample has locations in pixels.
        checks = [_find_pixels_off_maps if bare.rows == 1 else _find_samples_off_maps]
        checks += [] if operator.bare else [_find_missing_softmax]  # an operator with logits computes the softmax itself
        checks += [_find_swapped_shapes, _find_misplaced_maps]
    for find in checks:
        for finding in find(*inputs):
            _warn(operator.name, *finding)


def _warn(operator: str, kind: str, name: str, rule: str, fact: str) -> None:
    """Warn once for each operator and kind. The warning shows the caller's line."""
    if (operator, kind) not in _warned:
        _warned.add((operator, kind))
        # the nearest frame outside this file, torch, and code generated by torch.compile
        frame, level = sys._getframe(), 1
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_NOT_THE_CALLER):
            frame, level = frame.f_back, level + 1
        warnings.warn(f"{operator}: {name} should {rule}; got {fact}", DataWarning, stacklevel=level)


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.3g} %"


def _fraction(where: Tensor) -> float:
    return where.float().mean().item()


def _on_map(call: SamplingInputs, sizes: Tensor) -> Tensor:
    """Return whether samples are on maps of these sizes. Computed in float64, which holds every pixel exactly."""
    locations = call.locations.double()
    return geometry.on_map(geometry.pixels(locations, sizes) if call.locations.is_floating_point() else locations, sizes)


def _find_samples_off_maps(call: SamplingInputs, names: SamplingInputs) -> Iterator[Finding]:
    """Find samples off their maps, or points that no camera sees, in multi_scale_deformable_attn and deformable_aggregation.

    A sample looks like a pixel if both coordinates are at least 0 and the larger coordinate lies in the range of pixels.
    """
    locations, cameras = call.locations, call.shapes.dim() == 3
    off = ~geometry.inside(locations).any(-1) if cameras else ~_on_map(call, call.shapes.flip(-1)[:, None].double())
    if (fraction := _fraction(off)) <= _MOST:
        return
    largest = locations.amax(-1)
    like = (locations >= 0).all(-1) & (largest > _PIXELS[0]) & (largest <= _PIXELS[1])
    if (pixels := _fraction(like.any(-1) if cameras else like)) > _MOST:
        fact = f"{_percent(pixels)} that look like pixels, up to {largest[like].max().item():.4g}"
        yield "pixels", names.locations, "be fractions of the map, 0..1", fact
    elif cameras:
        rule = "lie in some camera's picture, 0..1, for most points"
        yield "off the map", names.locations, rule, f"{_percent(fraction)} of points in none"
    else:
        low, high = locations.min().item(), locations.max().item()
        grid = " and all in -1..1, the range of grid_sample" if -1 <= low < -0.5 and high <= 1 else ""
        fact = f"{_percent(fraction)} of samples off them{grid}"
        yield "off the map", names.locations, "mostly lie on their maps, 0..1", fact


def _find_pixels_off_maps(call: SamplingInputs, names: SamplingInputs) -> Iterator[Finding]:
    """Find normalised locations, swapped shapes, and samples off their maps in geometric_kernel_attention."""
    locations, sizes = call.locations, call.shapes.flip(-1)[:, None].double()
    if locations.numel() > 2 and call.shapes.max() > 2 and bool(((locations >= 0) & (locations <= 1)).all()):
        height, width = call.shapes[call.shapes.prod(-1).argmax()].tolist()
        fact = f"none beyond 1 on a map of {height} x {width}, as if 0..1 were the map"
        yield "normalised", names.locations, "be pixels of each level", fact
        return
    off, swapped = (_fraction(~_on_map(call, sides)) for sides in (sizes, sizes.flip(-1)))
    # how far samples reach into the swapped maps: the largest x / H or the largest y / W, whichever is smaller
    reach = (locations / sizes.flip(-1)).flatten(0, -2).amax(0).min()
    if off > 0.05 and swapped < 0.1 * off and reach > 0.75:
        fact = f"{_percent(off)} of samples off their maps, and {_percent(swapped)} if the shapes were (W, H)"
        yield "swapped", names.shapes, "be (H, W)", fact
    elif off > _MOST:
        yield "off the map", names.locations, "mostly lie on their maps", f"{_percent(off)} of samples off them"


def _find_swapped_shapes(call: SamplingInputs, names: SamplingInputs) -> Iterator[Finding]:
    """Find shapes that look swapped: a pyramid with a wide and a high level, although all levels show the same picture; or
    neighbours in value that differ more than usual at the row ends of (W, H), and not at those of (H, W)."""
    for levels in call.shapes.view(-1, *call.shapes.shape[-2:]).tolist():
        aspects = [math.log(width / height) for height, width in levels]
        if min(aspects) < -_OBLONG and max(aspects) > _OBLONG:
            wide, high = (levels[aspects.index(pick(aspects))] for pick in (max, min))
            fact = f"{tuple(wide)} beside {tuple(high)} in one pyramid"
            yield "swapped", names.shapes, "be (H, W) on every level", fact

    maps = zip(call.shapes.flatten(0, -2).tolist(), call.starts.flatten().tolist(), strict=True)
    oblong = [(h * w, h, w, start) for (h, w), start in maps if abs(math.log(w / h)) > _OBLONG and _is_large(call, h, w)]
    if not oblong:
        return
    _, height, width, start = max(oblong)
    steps, swapped = (_steps_at_ends(call.value, start, *size) for size in ((height, width), (width, height)))
    not_shared = torch.arange(1, height, device=steps.device) * width % height != 0  # False where a row of (W, H) also ends
    if steps[not_shared].mean() < _NO_STEP and swapped.mean() > _STEP:
        fact = f"({height}, {width}), while rows of {names.value} seem to end every {height}"
        yield "swapped", names.shapes, "be (H, W)", fact


def _is_large(call: SamplingInputs, height: int, width: int) -> bool:
    return min(height, width) >= _FEW_ROWS and (height * width) ** 0.5 * call.value[:, 0].numel() >= _FEW_NUMBERS


def _steps_at_ends(value: Tensor, start: int, height: int, width: int) -> Tensor:
    """Return the difference of neighbours at the end of each row, divided by the mean difference of neighbours on the map."""
    steps = value[:, start : start + height * width].float().diff(dim=1).abs().flatten(2).mean((0, 2))
    return steps[width - 1 :: width] / steps.mean()


def _find_misplaced_maps(call: SamplingInputs, names: SamplingInputs) -> Iterator[Finding]:
    """Find maps that overlap while rows of value are in no map: starts may be wrong. Overlap or gaps alone may be intended.

    Find maps of several cameras that are stored scale by scale, not camera by camera: neighbours in value differ more than
    usual at the row ends of the first order, and not at those of the second.
    """
    maps = torch.stack([call.starts.flatten(), call.starts.flatten() + call.shapes.prod(-1).flatten()], 1)
    begins, ends = maps.unique(dim=0).unbind(1)  # count a map only once, even if cameras share it
    rows = call.value.shape[1]
    covered = (torch.bincount(begins, minlength=rows + 1) - torch.bincount(ends, minlength=rows + 1)).cumsum(0)[:rows]
    unread = int((covered == 0).sum())
    if unread and bool((covered > 1).any()):
        fact = f"maps that overlap, while {unread} of {rows} rows of {names.value} are in none"
        yield "overlap", names.starts, "give each map rows of its own", fact

    camera_major = geometry.starts_of(call.shapes)
    if call.starts.dim() == 1 or min(call.starts.shape) < 2 or not torch.equal(call.starts.long(), camera_major):
        return
    by_scale = geometry.starts_of(call.shapes.transpose(0, 1)).transpose(0, 1)
    sizes, last_row = call.shapes[:, 1].tolist(), int(by_scale[-1, -1] + call.shapes[-1, -1].prod())
    if last_row > rows or not _is_large(call, *sizes[0]):
        return

    def steps_of_cameras(starts: Tensor) -> list[float]:
        """Return the mean of `_steps_at_ends` for each camera's second map. If the map's rows are in fact those of a map twice
        as wide, every second end is also an end of the wide map. So take the smaller of two means: of even and of odd ends."""
        steps = [_steps_at_ends(call.value, start, *size) for size, start in zip(sizes, starts[:, 1].tolist(), strict=True)]
        return [min(step[::2].mean().item(), step[1::2].mean().item()) for step in steps]

    steps = steps_of_cameras(by_scale)
    if min(steps_of_cameras(camera_major)) < _NO_STEP and sum(steps) / len(steps) > _STEP:
        fact = "maps that seem to lie scale by scale, all cameras of a scale together"
        yield "scale-major", names.value, "hold the maps camera by camera, as the starts say", fact


def _find_missing_softmax(call: SamplingInputs, names: SamplingInputs) -> Iterator[Finding]:
    """Find weights without a softmax: many weights are negative, as logits are, or the weights do not sum to about 1."""
    name, weights = names.weights, call.weights.double()
    if (fraction := _fraction(weights < 0)) > _SOME:
        yield "no softmax", name, "come from a softmax, 0..1", f"{_percent(fraction)} below 0, as if they were logits"
        return
    cameras = call.shapes.dim() == 3
    if cameras and weights.shape[2] == 1:
        # A model may sum points after the operator. Then an anchor has one point, and only weights of several anchors sum to 1.
        return
    sums = weights.sum((2, 3, 4) if cameras else (3, 4))
    median = sums[sums != 0].nanmedian().item() if sums.any() else 1.0
    if not _SUMS[0] <= median <= _SUMS[1]:
        yield "no softmax", name, "sum to about 1 for each query, as after a softmax", f"sums around {median:.3g}"


def _find_wrong_pool_inputs(feat: Tensor, depth: Tensor, *inputs: Any) -> Iterator[Finding]:
    """Find depth that looks like logits, and D and H that look exchanged, in bev_pool_v3."""
    if (fraction := _fraction(depth < 0)) > _SOME:
        fact = f"{_percent(fraction)} below 0, as if they were logits"
        yield "logits", "depth", "say how much of a pixel lies at each depth, 0..1", fact
    d, h, w = inputs[-3:]
    if d > h > 0 and abs(math.log(d / w)) < abs(math.log(h / w)):
        fact = f"D={d} beside H={h} and W={w}, as if D and H were exchanged"
        yield "exchanged", "bev_feat_shape", "be (B, D, H, W, C)", fact
