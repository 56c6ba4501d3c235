"""The forms in which libraries write a deformable sampling core, and the operator in each form.

A core that is a function has the four arguments that all libraries name alike, and perhaps some of `_OPTIONS`. What the names
do not show (how values lie in memory, whether levels and points share an axis) is one of the alternatives of `CORES`, which
are tried in turn. A core that is a class is known by its exact parameters.
"""

from __future__ import annotations

import functools
import math
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._operator import geometry
from .._operator.rules import INDEX
from ..ops._other_shapes import aggregation_inputs, attention_inputs, can_be_read
from ..ops.geometric_kernel_attention import geometric_kernel_attention
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn
from ..ops.npu_deformable_aggregation import deformable_aggregation
from ._parameters import Parameters

FUNCTION, MODULE, AUTOGRAD = "function", "module", "autograd function"


@dataclass(frozen=True)
class Form:
    """One way to write a core that is a class: its kind, its parameters, and its replacement."""

    kind: str
    parameters: tuple[str, ...]
    replacement: Callable[..., Any]
    called: str = ""  # a pattern: autograd functions of different operators have the same parameters
    inputs: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs  # from an extension's shapes to the operator's

    def fits(self, name: str, kind: str, parameters: Parameters) -> bool:
        """Return whether something of this kind, with this name and these parameters, may be written in this form."""
        named = kind == self.kind and re.search(self.called, name) is not None
        return named and parameters.all == self.parameters and not parameters.variadic


def levels(sizes: Tensor | Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return spatial_shapes and level_start_index of levels that lie one after the other.

    Some libraries keep the sizes as floats, and read them by `int`.
    """
    shapes = sizes if isinstance(sizes, Tensor) else torch.tensor([list(s) for s in sizes], device=device)
    shapes = shapes if shapes.dtype in INDEX else shapes.long()
    return shapes, geometry.starts_of(shapes)


def levels_by_points(counts: Sequence[int]) -> list[int]:
    """Return the levels, each as often as its count of points has gcd(counts)."""
    return [level for level, count in enumerate(counts) for _ in range(count // math.gcd(*counts))]


def keys_last(value: Tensor) -> Tensor:
    """Return value [bs, num_keys, num_heads, channels], with a gradient in the layout of `_KeysLast`."""
    return _KeysLast.apply(value) if value.shape[0] == 1 and value.requires_grad and value.device.type == "cpu" else value


class _KeysLast(torch.autograd.Function):
    """The identity. Its gradient has keys last in memory, as the libraries' own core makes it.

    D-FINE's values come straight from a BatchNorm2d. For one picture, PyTorch 2.13's batch_norm_backward on a CPU misreads
    the other layout: strides (c, 1, W * c, c) of a [1, c, H, W] gradient.
    """

    @staticmethod
    def forward(ctx, value):
        return value.view_as(value)

    @staticmethod
    def backward(ctx, grad):
        return grad.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ValueLayout:
    """How a core's value lies in memory: from it to ours, [bs, num_keys, num_heads, channels], and back for a trial."""

    ours: Callable[[Any, int], Tensor]  # of their value and the number of heads
    theirs: Callable[[Tensor, Sequence[Sequence[int]]], Any]  # of our value and the levels' (H, W)


def _level_by_level(value: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [level.contiguous() for level in value.permute(0, 2, 3, 1).split([h * w for h, w in sizes], -1)]


def _as_images(value: Tensor, sizes: Sequence[Sequence[int]]) -> tuple[Tensor, ...]:
    levels = _level_by_level(value, sizes)
    return tuple(level.flatten(0, 1).unflatten(-1, tuple(size)) for level, size in zip(levels, sizes, strict=True))


def _joined(levels: Sequence[Tensor]) -> Tensor:
    """Return levels [bs, heads, channels, keys] in one tensor.

    Without a gradient, levels that were split from one tensor are not copied: a copy takes longer than the samples of 300
    queries.
    """
    first, total = levels[0], sum(level.shape[-1] for level in levels)
    if _lie_together(levels):
        return first.as_strided((*first.shape[:-1], total), first.stride(), first.storage_offset())
    return torch.cat(list(levels), -1)


def _lie_together(levels: Sequence[Tensor]) -> bool:
    """Return whether each level begins in memory where the level before it ends."""
    first = levels[0]
    if torch.is_grad_enabled() or not all(map(can_be_read, levels)):
        return False
    offset = first.storage_offset()
    for level in levels:
        same = level.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and level.dtype == first.dtype
        if not same or level.stride() != first.stride() or level.storage_offset() != offset:
            return False
        offset += level.shape[-1] * level.stride(-1)
    return True


ROWS = ValueLayout(lambda value, _: value, lambda value, _: value)  # mmcv, Deformable-DETR, ultralytics
KEYS_LAST = ValueLayout(
    lambda value, _: value.permute(0, 3, 1, 2), lambda value, _: value.permute(0, 2, 3, 1).contiguous()
)  # RF-DETR
BY_LEVEL = ValueLayout(lambda value, _: _joined(value).permute(0, 3, 1, 2), _level_by_level)  # D-FINE, DEIM: so for each level
IMAGES = ValueLayout(  # LibreYOLO's GTR: [bs * heads, channels, H, W] for each level
    lambda value, heads: _joined([v.flatten(2).unflatten(0, (-1, heads)) for v in value]).permute(0, 3, 1, 2), _as_images
)
LAYOUTS = (ROWS, KEYS_LAST, BY_LEVEL, IMAGES)
_NEEDED = {"value", "value_spatial_shapes", "sampling_locations", "attention_weights"}
_UNTRIED = {"value_shape"}  # options that the trial leaves at their defaults
_OPTIONS = {"num_points_list", "method", "value_spatial_shapes_hw", "allow_acceleration", "level_start_index", "im2col_step"}
_KNOWN = _NEEDED | _OPTIONS | _UNTRIED
_OTHER_NAMES = {
    **dict.fromkeys(("shapes_list", "spatial_shapes"), "value_spatial_shapes"),
    "value_level_start_index": "level_start_index",
    "spatial_shapes_ints": "value_spatial_shapes_hw",
}
SPLIT, _MERGED = 6, 5  # axes of sampling_locations: levels and points have one each, or share one
_UNEVEN = "num_points_list"


def by_known_names(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a core under the names that most libraries give them."""
    return {_OTHER_NAMES.get(name, name): argument for name, argument in arguments.items()}


@dataclass(frozen=True)
class Core:
    """One way to write a core that is a function: how its arguments are laid out."""

    layout: ValueLayout
    axes: tuple[int, ...]  # the numbers of axes that sampling_locations may have
    methods: tuple[str, ...] = ("default",)  # "discrete" is RT-DETR v2's: the nearest pixel, clamped to the border
    uneven: bool = False  # a level has its own number of points, in num_points_list
    pixels: bool = False  # locations are whole pixels, as MapTR's
    kind = FUNCTION

    def fits(self, name: str, kind: str, parameters: Parameters) -> bool:
        """Return whether something of this kind with these parameters may be written in this form."""
        known = set(by_known_names(dict.fromkeys(parameters.all)))
        if kind != FUNCTION or not known >= _NEEDED or len(known) < len(parameters.all) or self.uneven != (_UNEVEN in known):
            return False
        return set(by_known_names(dict.fromkeys(parameters.read))) <= _KNOWN

    def serves(self, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> bool:
        """Return whether the form was tried on such arguments. The core's own code does the rest."""
        locations = arguments["sampling_locations"]
        tried = all(arguments[name] == defaults.get(name) for name in _UNTRIED & set(arguments))
        starts = arguments.get("level_start_index")
        tried = tried and (starts is None or (isinstance(starts, Tensor) and starts.dtype in INDEX))
        whole = not self.pixels or not locations.is_floating_point()  # MapTR rounds fractions, its compiled kernel cuts them
        return tried and whole and locations.dim() in self.axes and arguments.get("method", "default") in self.methods

    def in_place_of(self, original: types.FunctionType) -> Callable[..., Tensor]:
        """Return a function with the original's parameters."""
        parameters = Parameters(original)
        bind = parameters.binder()

        @functools.wraps(original)
        def core(*args: Any, **kwargs: Any) -> Tensor:
            named = bind(args, kwargs)
            arguments = by_known_names(named) if named is not None else None
            if arguments is None or not self.serves(arguments, parameters.defaults):
                return original(*args, **kwargs)
            return self.sample(arguments)

        return core

    def sample(self, arguments: Mapping[str, Any]) -> Tensor:
        """Return the operator's output for the arguments of a core, by name."""
        sizes = arguments.get("value_spatial_shapes_hw")
        sizes = arguments["value_spatial_shapes"] if sizes is None else sizes
        locations, starts = arguments["sampling_locations"], arguments.get("level_start_index")
        value = self.layout.ours(arguments["value"], locations.shape[2])
        shapes, dense = levels(sizes, value.device)
        starts = dense if starts is None else starts
        if self.uneven:  # a level with more points than another is listed several times: levels may overlap
            value, order = keys_last(value), levels_by_points(arguments[_UNEVEN])
            shapes, starts = shapes[order], starts[order]
        if locations.dim() == _MERGED:
            locations = locations.unflatten(3, (len(shapes), -1))
        weights = arguments["attention_weights"].reshape(locations.shape[:-1])
        if arguments.get("method") == "discrete":
            pixels = locations.detach() * shapes.flip(-1)[:, None] + 0.5
            return geometric_kernel_attention(value, shapes, starts, pixels, weights)
        operator = geometric_kernel_attention if self.pixels else multi_scale_deformable_attn
        return operator(value, shapes, starts, locations, weights)


CORES = (
    *(Core(layout, axes) for axes in ((SPLIT, _MERGED), (SPLIT,), (_MERGED,)) for layout in LAYOUTS),
    Core(ROWS, (SPLIT,), pixels=True),
    *(
        Core(layout, (_MERGED,), methods, uneven=True)
        for methods in (("default", "discrete"), ("default",))
        for layout in LAYOUTS
    ),
)


def _layer_of_transformers(
    self: Any,
    value: Tensor,
    value_spatial_shapes: Any,
    value_spatial_shapes_list: Any,
    level_start_index: Any,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: Any,
) -> Tensor:
    """Sample as the layer of transformers 5, which reads the list. The tensors save the time of making a table."""
    tables: Any = value_spatial_shapes, level_start_index
    if not all(isinstance(t, Tensor) and t.dtype in INDEX for t in tables):
        tables = levels(value_spatial_shapes_list, value.device)
    shapes, starts = tables
    return multi_scale_deformable_attn(value, shapes, starts, sampling_locations, attention_weights)


# What the new code of a function calls, by the function's id. An entry stays when a patch ends: another thread may be about
# to call it.
SERVED: dict[int, Callable[..., Tensor]] = {}


def code_of(form: Any, core: types.FunctionType) -> types.CodeType:
    """Return code for the function, which keeps its own defaults and globals, and so imports what it calls."""
    original = types.FunctionType(core.__code__, core.__globals__, core.__name__, core.__defaults__)
    original.__kwdefaults__ = core.__kwdefaults__
    SERVED[id(core)] = form.in_place_of(original)
    parameters = Parameters(original)
    arguments = [*parameters.names, *(f"{name}={name}" for name in parameters.keyword_only), *parameters.variadic]
    text = f"def core{parameters}:\n    from {__name__} import SERVED\n    return SERVED[{id(core)}]({', '.join(arguments)})"
    made: dict[str, Any] = {}
    exec(compile(text, __file__, "exec"), made)
    return made["core"].__code__.replace(co_name=core.__name__)


_MMCV = ("value", "value_spatial_shapes", "value_level_start_index", "sampling_locations", "attention_weights")
FORMS: tuple[Core | Form, ...] = (
    *CORES,
    Form(
        MODULE,
        (
            "value",
            "value_spatial_shapes",
            "value_spatial_shapes_list",
            "level_start_index",
            "sampling_locations",
            "attention_weights",
            "im2col_step",
        ),
        _layer_of_transformers,
    ),
    Form(AUTOGRAD, (*_MMCV, "im2col_step"), multi_scale_deformable_attn, "(?i)(ms|multi_?scale)_?deform", attention_inputs),
    Form(AUTOGRAD, (*_MMCV, "im2col_step"), geometric_kernel_attention, "(?i)geometric", attention_inputs),
    Form(
        AUTOGRAD,
        ("mc_ms_feat", "spatial_shape", "scale_start_index", "sampling_location", "weights"),
        deformable_aggregation,
        "(?i)deformable_?aggregation",
        aggregation_inputs,
    ),
)
