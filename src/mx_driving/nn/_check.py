"""Checks of the modules' inputs, in the form of `mx_driving._operator.rules`. They read no data, so that graphs stay whole."""

from __future__ import annotations

import numbers
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .. import _torch_private
from .._operator.composition import autocasts
from .._operator.rules import fail, fail_shape, need_dtype, need_one_device, need_tensors

# torch's functions, read at import, because libraries may replace these functions later.
_FORWARDS: dict[type, Any] = {nn.Linear: nn.Linear.forward, nn.Dropout: nn.Dropout.forward}
_CALL = nn.Module.__call__


def positive(**counts: object) -> None:
    for name, count in counts.items():
        at_least(1, name, count)


def divisors(embed_dims: int, **counts: object) -> None:
    """Check embed_dims, and that the counts divide it."""
    positive(embed_dims=embed_dims)
    for name, count in counts.items():
        divides(name, whole_number(name, count), "embed_dims", embed_dims)


def dropout_rates(**rates: object) -> None:
    for name, rate in rates.items():
        if not isinstance(rate, numbers.Real) or not 0 <= float(rate) < 1:
            fail(ValueError, name, "be a fraction below 1", rate)


def whole_number(name: str, count: object) -> int:
    if not isinstance(count, numbers.Integral):
        fail(ValueError, name, "be a whole number", repr(count))
    return int(count)


def at_least(least: int, name: str, count: object) -> None:
    if whole_number(name, count) < least:
        fail(ValueError, name, f"be at least {least}", count)


def divides(name: str, part: int, whole_name: str, whole: int) -> None:
    if part <= 0 or whole % part != 0:
        fail(ValueError, name, f"divide {whole_name}={whole}", part)


def kernel_size(sizes: object) -> None:
    if not isinstance(sizes, (list, tuple)) or len(sizes) != 2:
        fail(ValueError, "kernel_size", "be (height, width)", repr(sizes))
    for i, size in enumerate(sizes):
        at_least(1, f"kernel_size[{i}]", size)


def fix_scale(rows: Sequence[Sequence[float]], num_learnable_pts: int) -> Tensor:
    """Return the fixed key points of an anchor as a tensor. `rows` may be empty if num_learnable_pts is positive."""
    at_least(0, "num_learnable_pts", num_learnable_pts)
    try:
        points = torch.as_tensor(rows, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError):
        fail(ValueError, "fix_scale", "be rows of three numbers", repr(rows))
    if points.numel():
        shapes({}, fix_scale=(points, "points, 3"))
    elif num_learnable_pts < 1:
        fail(ValueError, "fix_scale", f"hold a point where num_learnable_pts is {num_learnable_pts}", "none")
    return points.view(-1, 3)


def maps(levels: Iterable[Tensor], axes: str) -> list[Tensor]:
    """Check the levels of a pyramid, and return them as a list. Only the axes H and W may differ from level to level."""
    if isinstance(levels, Tensor) or not isinstance(levels, Iterable):
        fail(TypeError, "maps", "be a list of tensors, one for each level", type(levels).__name__)
    named = [(f"maps[{i}]", level) for i, level in enumerate(levels)]
    if not named:
        fail(ValueError, "maps", "hold at least one level", "none")
    sizes: dict[str, int] = {}
    for name, level in named:
        sizes = shapes(sizes, **{name: (level, axes)})
        if 0 in (sizes.pop("H"), sizes.pop("W")):
            fail(ValueError, name, "have a height and a width of at least 1", tuple(level.shape))
    need_one_device(*named)
    return [level for _, level in named]


def shapes(sizes: dict[str, int], **inputs: tuple[Any, str]) -> dict[str, int]:
    """Check that inputs are tensors with axes: `shapes({"embed_dims": 256}, query=(query, "bs, num_queries, embed_dims"))`.

    An axis is a number, numbers ("2 or 4"), a least number ("8 or more"), or a name. If a name is not in `sizes`, the first
    input with this axis sets the size. An input whose axes end with " or None" may be None. Return `sizes`, extended by the
    sizes of all other names.
    """
    inputs = {name: (t, text) for name, (t, text) in inputs.items() if t is not None or not text.endswith(" or None")}
    need_tensors(*((name, t) for name, (t, _) in inputs.items()))
    need_one_device(*((name, t) for name, (t, _) in inputs.items()))
    sizes = dict(sizes)
    for name, (t, text) in inputs.items():
        axes = text.removesuffix(" or None").split(", ")
        if t.dim() != len(axes) or not all(_fits(axis, size, sizes) for axis, size in zip(axes, t.shape, strict=True)):
            fail_shape(name, t, ", ".join(axes), tuple(sizes.get(axis) for axis in axes))
        for axis, size in zip(axes, t.shape, strict=True):
            if axis.isidentifier():
                sizes.setdefault(axis, size)
    return sizes


def _fits(axis: str, size: int, sizes: dict[str, int]) -> bool:
    if not axis[0].isdigit():
        return size == sizes.get(axis, size)
    numbers = axis.split(" or ")
    return size >= int(numbers[0]) if numbers[-1] == "more" else any(size == int(number) for number in numbers)


def mask(name: str, t: Tensor) -> None:
    need_dtype(name, t, frozenset((torch.bool,)), "have dtype bool")


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return whether the layer is unmodified, so that other code may replace its call. Examples of modified layers have hooks,
    a forward that is not their class's (accelerate sets one), or a weight of a Tensor subclass (quantisers set one)."""
    if type(layer) is not kind or getattr(layer.forward, "__func__", None) is not _FORWARDS.get(kind, kind.forward):
        return False
    if _torch_private.is_compiled_in_place(layer) or kind.__call__ is not _CALL:  # some libraries set __call__
        return False
    weights = (getattr(layer, name, None) for name in ("weight", "bias"))
    plain = all(t is None or (type(t) in (Tensor, nn.Parameter) and t.is_floating_point()) for t in weights)
    return plain and not _torch_private.has_hooks(layer)


def layer_dtype(layer: nn.Module, **inputs: Tensor) -> None:
    """Check that inputs have the dtype of the linear layer that reads them, unless autocast converts them."""
    dtype = layer.weight.dtype if is_plain(layer) else None  # pyright: ignore[reportAttributeAccessIssue]
    for name, t in inputs.items():
        if dtype not in (None, t.dtype) and not autocasts(t.device.type):
            rule = f"have the dtype of the module's parameters, {str(dtype).removeprefix('torch.')}"
            fail(TypeError, name, rule, str(t.dtype).removeprefix("torch."))


def counts(queries: Sequence[int], pictures: int) -> None:
    if len(queries) != pictures or any(count < 0 for count in queries):
        fail(ValueError, "counts", f"hold a number from 0 on for each of {pictures} pictures", list(queries))
