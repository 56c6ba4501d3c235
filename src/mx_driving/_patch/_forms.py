"""The forms in which libraries write a deformable sampling core, and how the operator answers a call in each form.

`ROLES` has the meaning of each argument's name. A core has a value, shapes, locations and weights, and perhaps other arguments.
The names do not show how value lies in memory, nor whether levels and points share an axis. `CORES` has a form for each
combination. `patch` tries these forms in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._operator import geometry
from .._operator.checks import is_readable
from .._operator.rules import INDEX
from ..ops.geometric_kernel_attention import geometric_kernel_attention
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn
from ._parameters import PLAIN

FUNCTION, MODULE, AUTOGRAD = "function", "module", "autograd function"
Arguments = Mapping[str, Any]  # role -> argument; if an argument's name has no role, name -> argument

# The role of an argument of a core or of a module's forward -> its names in libraries.
ROLES = {
    "query": ("query", "hidden_states"),
    "position": ("query_pos", "position_embeddings"),  # added to query
    "value": ("value", "encoder_hidden_states", "input_flatten"),
    "mask": ("key_padding_mask", "attention_mask", "input_padding_mask", "value_mask"),
    "reference": ("reference_points", "refer_bbox"),
    "shapes": ("spatial_shapes", "input_spatial_shapes", "value_spatial_shapes", "value_shapes", "shapes_list"),
    "sizes": (  # the shapes as a list, in addition to a tensor
        *("spatial_shapes_list", "input_spatial_shapes_hw"),
        *("value_spatial_shapes_list", "value_spatial_shapes_hw", "spatial_shapes_ints", "src_shapes"),
    ),
    "starts": ("level_start_index", "input_level_start_index", "value_level_start_index"),
    "identity": ("identity",),  # added to the output
    "trajectories": ("reference_trajs",),  # UniAD's, in metres from the boxes
    "boxes": ("bbox_results",),
    "locations": ("sampling_locations",),
    "weights": ("attention_weights",),
    "counts": ("num_points_list", "num_points_per_level"),  # points of each level
    "keys": ("src_split_sizes",),  # keys of each level
    "ratios": ("input_valid_ratios",),  # birder keeps samples of method "discrete" in these parts of the maps
    "method": ("method",),
    "value_shape": ("value_shape",),
    "step": ("im2col_step",),
}
_ROLE = {name: role for role, names in ROLES.items() for name in names}
_NEEDED = frozenset(("value", "shapes", "locations", "weights"))
_OPTIONAL = frozenset(("sizes", "starts", "method", "value_shape"))


def find_role(name: str) -> str:
    """Return the role of an argument's name, or the name itself if it has no role."""
    return _ROLE.get(name, name)


class Form:
    """One way in which libraries write a core or a module, and how our operators answer calls of it."""

    kind: str
    reads_all = False  # whether the form gets arguments that the original's code does not read
    needs: frozenset[str] = frozenset()  # roles that parameters must fill
    roles: frozenset[str] = frozenset()  # what else parameters may be for (find_role), if the original reads them

    def fits(self, candidate: Any) -> bool:
        """Return whether a candidate (_search.py) may be written in this form.

        Its parameters must have all roles that the form needs. Each parameter that the code reads must have a role of the form,
        or a default of a type in PLAIN. No two of these parameters may have the same role.
        """
        if candidate.kind != self.kind:
            return False
        parameters, roles = candidate.parameters, [*map(find_role, candidate.parameters.read)]
        has_default = [isinstance(parameters.defaults.get(name, ...), PLAIN) for name in parameters.read]
        is_known = all(role in self.roles or plain for role, plain in zip(roles, has_default, strict=True))
        return is_known and self.needs.issubset(map(find_role, parameters.all)) and len(set(roles)) == len(roles)

    def answer(self, module: Any, arguments: dict[str, Any]) -> Any:
        """Return what the original returns for these arguments; None if the original code must run."""
        raise NotImplementedError


def is_table(t: Any) -> bool:
    """Return whether t is a tensor of int32 or int64."""
    return isinstance(t, Tensor) and t.dtype in INDEX


def read_levels(arguments: Arguments, device: torch.device, reads_list: bool = False) -> tuple[Tensor, Tensor, Any] | None:
    """Return spatial_shapes, level_start_index and the number of rows of all levels (None if sizes cannot be read).

    Return None if the list and the table of shapes differ: libraries pass both, and their code reads the list in one place and
    the table in another.
    """
    shapes: Any = arguments.get("shapes")
    sizes: Any = arguments.get("sizes")
    starts: Any = arguments.get("starts")
    if isinstance(starts, Tensor) and starts.dtype not in INDEX:
        return None
    is_eager = not (torch.compiler.is_compiling() or _torch_private.is_tracing())
    readable = is_eager and not (_torch_private.count_dispatch_modes() or _torch_private.are_transforms_active())
    given = shapes if sizes is None else sizes
    has_table = isinstance(shapes, Tensor) and shapes.dtype in INDEX
    listed = None if isinstance(given, Tensor) else given
    if readable and has_table and shapes.is_cpu and type(shapes) is Tensor and shapes.dim() == 2 and shapes.shape[1] == 2:
        listed = shapes.tolist()
        if sizes is not None and [*map(tuple, listed)] != [*map(tuple, sizes)]:
            return None
    # Copy the tables that the operator saves for its backward: a caller may write to them before the backward, and autograd
    # cannot save inference tensors.
    copies = is_eager and torch.is_grad_enabled()
    if not has_table or (reads_list and sizes is not None):
        shapes = make_shapes(given, device)
    elif copies:
        shapes = shapes.clone()
    rows: Any = None
    dense: list[Any] = []
    if listed is not None:
        rows = 0
        for height, width in listed:
            dense.append(rows)
            rows += height * width
    if not isinstance(starts, Tensor):
        if not (is_eager and dense and device.type == "cpu"):
            return shapes, geometry.starts_of(shapes), rows
        # A table that the original does not read is mostly right. To compare it takes a tenth of the time of a new table.
        starts = arguments.get("unread starts")
        if not (readable and type(starts) is Tensor and starts.is_cpu and starts.dtype in INDEX and starts.tolist() == dense):
            return shapes, torch.tensor(dense, dtype=torch.int64), rows
    return shapes, starts.clone() if copies else starts, rows


def make_shapes(sizes: Tensor | Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """Return the table of the shapes of levels. Some libraries pass sizes as floats. Truncate them, as these libraries do."""
    shapes = sizes if isinstance(sizes, Tensor) else torch.tensor([list(s) for s in sizes], device=device)
    return shapes if shapes.dtype in INDEX else shapes.long()


def repeat_levels(counts: Sequence[int]) -> list[int]:
    """Return the indices of the levels. The index of a level with `count` points is repeated count / gcd(counts) times."""
    return [level for level, count in enumerate(counts) for _ in range(count // math.gcd(*counts))]


def put_keys_last(value: Tensor) -> Tensor:
    """Return value [bs, num_keys, num_heads, channels] unchanged. In a batch of one on a CPU, its gradient has keys last."""
    needs_layout = value.shape[0] == 1 and value.requires_grad and value.device.type == "cpu"
    return _KeysLast.apply(value) if needs_layout and not _torch_private.is_forward_mode_active() else value


class _KeysLast(torch.autograd.Function):
    """The identity function. The gradient has keys last in memory, like that of the libraries' own core.

    D-FINE's values are outputs of a BatchNorm2d. For a batch of one, PyTorch 2.13's batch_norm_backward on a CPU misreads a
    [1, c, H, W] gradient with strides (c, 1, W * c, c).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(value):
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


@dataclass(frozen=True)
class ValueLayout:
    """How a core's value lies in memory. Our value is [bs, num_keys, num_heads, channels].

    `ours` converts a value from this layout to ours; it takes the value and the number of heads. `theirs` converts our value to
    this layout, for a trial; it takes the value and the (H, W) of each level.
    """

    ours: Callable[[Any, int], Tensor]
    theirs: Callable[[Tensor, Sequence[Sequence[int]]], Any]
    heads: int = 1  # the axis of the heads


def _split_levels(value: Tensor, sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    return [level.contiguous() for level in value.permute(0, 2, 3, 1).split([h * w for h, w in sizes], -1)]


def _join(levels: Sequence[Tensor]) -> Tensor:
    """Return levels [bs, heads, channels, keys] in one tensor.

    If each level begins in memory where the level before it ends, and no gradient is needed, return a view: a copy takes longer
    than sampling 300 queries.
    """
    first, total = levels[0], 0
    lie_together = not torch.is_grad_enabled() and all(map(is_readable, levels))
    for level in levels if lie_together else ():
        same = level.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and level.dtype == first.dtype
        offset = first.storage_offset() + total * first.stride(-1)
        lie_together &= same and level.stride() == first.stride() and level.storage_offset() == offset
        total += level.shape[-1]
    if lie_together:
        return first.as_strided((*first.shape[:-1], total), first.stride(), first.storage_offset())
    return torch.cat(list(levels), -1)


ROWS = ValueLayout(lambda value, _: value, lambda value, _: value, 2)  # mmcv, Deformable-DETR, ultralytics
KEYS_LAST = ValueLayout(
    lambda value, _: value.permute(0, 3, 1, 2), lambda value, _: value.permute(0, 2, 3, 1).contiguous()
)  # RF-DETR: [bs, heads, channels, keys]
BY_LEVEL = ValueLayout(lambda value, _: _join(value).permute(0, 3, 1, 2), _split_levels)  # D-FINE, DEIM: a list of levels
IMAGES = ValueLayout(  # LibreYOLO's GTR: [bs * heads, channels, H, W] for each level
    lambda value, heads: _join([v.flatten(2).unflatten(0, (-1, heads)) for v in value]).permute(0, 3, 1, 2),
    lambda value, sizes: tuple(map(lambda v, s: v.flatten(0, 1).unflatten(-1, [*s]), _split_levels(value, sizes), sizes)),
)
LAYOUTS = {"rows": ROWS, "keys_last": KEYS_LAST, "by_level": BY_LEVEL, "images": IMAGES}
# The number of axes of sampling_locations. SPLIT: levels and points have an axis each. _MERGED: they share one.
SPLIT, _MERGED = 6, 5


@dataclass(frozen=True)
class Core(Form):
    """One way to write a core, which is a function or a layer without parameters.

    Attributes:
        layout: how value lies in memory.
        axes: the numbers of axes that sampling_locations may have.
        methods: "discrete" is RT-DETR v2's method: the nearest pixel, clamped to the border.
        uneven: whether each level has its own number of points.
        pixels: whether locations are whole pixels, like MapTR's.
    """

    layout: ValueLayout
    axes: tuple[int, ...]
    methods: tuple[str, ...] = ("default",)
    uneven: bool = False
    pixels: bool = False
    kind: str = FUNCTION

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return _NEEDED | {"counts"} if self.uneven else _NEEDED

    @property
    def roles(self) -> frozenset[str]:  # type: ignore[override]
        return self.needs | _OPTIONAL

    def answer(self, module: Any, arguments: dict[str, Any]) -> Tensor | None:
        value, locations, weights = arguments["value"], arguments["locations"], arguments["weights"]
        known = arguments.get("value_shape", "default") == "default" and arguments.get("method", "default") in self.methods
        known = known and (arguments.get("starts") is None or is_table(arguments["starts"]))
        # Refuse fractions of pixels: MapTR's code in plain torch rounds them, but its compiled kernel truncates them.
        whole = not self.pixels or not locations.is_floating_point()
        if not (known and whole and locations.dim() in self.axes):
            return None
        # A core in plain torch may broadcast batches and heads; the operator does not.
        sides = locations.shape[0], locations.shape[2]
        if isinstance(value, Tensor) and (value.dim() != 4 or (value.shape[0], value.shape[self.layout.heads]) != sides):
            return None
        if weights.shape[:3] != locations.shape[:3] or 2 * weights.numel() != locations.numel():
            return None
        if (levels := read_levels(arguments, locations.device, self.kind == FUNCTION)) is None:
            return None
        value, (shapes, starts, _) = self.layout.ours(value, locations.shape[2]), levels
        if self.uneven:  # The operator has equally many points on all levels. So list a level with more points several times.
            value, order = put_keys_last(value), repeat_levels(arguments["counts"])
            shapes, starts = shapes[order], starts[order]
        if locations.dim() == _MERGED:
            locations = locations.unflatten(3, (len(shapes), -1))
        weights = weights.reshape(locations.shape[:-1])
        discrete = arguments.get("method") == "discrete"
        if not (discrete or self.pixels):
            out = multi_scale_deformable_attn(value, shapes, starts, locations, weights)
            return out.to(torch.promote_types(out.dtype, weights.dtype))  # as in plain torch
        pixels = locations.detach() * shapes.flip(-1)[:, None] + 0.5 if discrete else locations
        out = geometric_kernel_attention(value, shapes, starts, pixels, weights)
        # The original gathers rows and multiplies them by weights. Autocast converts neither, so promote the two dtypes.
        return out.to(torch.promote_types(value.dtype, weights.dtype))


_AXES = {"": (SPLIT, _MERGED), "_split": (SPLIT,), "_merged": (_MERGED,)}
# The name that a user writes in patch(forms=...) -> the form.
CORES = {
    **{f"{name}{word}": Core(layout, axes) for word, axes in _AXES.items() for name, layout in LAYOUTS.items()},
    "layer": Core(ROWS, (SPLIT,), kind=MODULE),
    "pixels": Core(ROWS, (SPLIT,), pixels=True),
    **{f"{name}_uneven": Core(layout, (_MERGED,), ("default", "discrete"), uneven=True) for name, layout in LAYOUTS.items()},
    **{f"{name}_uneven_bilinear": Core(layout, (_MERGED,), uneven=True) for name, layout in LAYOUTS.items()},
}
