"""The forms in which libraries write an attention module around a sampling core, each over the operator with logits.

All are one description, `Attention`: which parameters forward has, and in what it differs from the others.

A module's linear layers are called as its own code calls them, so their hooks, adapters and quantised kinds go on working.
Softmax and the arithmetic of locations are left to the operator. What the module's own code returns is returned.

Several forms may fit one module's parameters: masks, for instance, say which keys count, or which do not. The form whose
trial agrees is taken.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _checks
from ..nn._pyramid import heads_of
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from ._callers import weights_may_be_watched
from ._forms import BY_LEVEL, IMAGES, ROWS, Layout, can_be_read, keys_last, levels, levels_by_points

ATTENTION = "attention module"
LAYERS = {"sampling_offsets", "attention_weights"}  # the linear layers that the code of every such forward names
Given = Mapping[str, Any]  # arguments of forward, by role where they have one, else by name

# what the libraries call the arguments of forward: a role, and its names
ROLES = {
    "query": ("query", "hidden_states"),
    "position": ("query_pos", "position_embeddings"),  # added to query
    "memory": ("value", "encoder_hidden_states", "input_flatten"),
    "mask": ("key_padding_mask", "attention_mask", "input_padding_mask", "value_mask"),
    "reference": ("reference_points", "refer_bbox"),
    "shapes": ("spatial_shapes", "input_spatial_shapes", "value_spatial_shapes", "value_shapes"),  # a tensor or a list
    "sizes": ("spatial_shapes_list", "input_spatial_shapes_hw"),  # the same as a list, beside the tensor
    "starts": ("level_start_index", "input_level_start_index"),
    "identity": ("identity",),  # added to the output
}
LISTED = {"value_spatial_shapes", "value_shapes"}  # names of shapes that are a list
_ROLE = {name: role for role, names in ROLES.items() for name in names}


def by_role(named: Mapping[str, Any]) -> Given:
    return {_ROLE.get(name, name): argument for name, argument in named.items()}


def _always(module: Any, given: Given) -> bool:
    return True


@dataclass
class Inputs:
    """What forward is given, batches first; keys that count for nothing are True in `hidden`."""

    query: Tensor
    memory: Any
    hidden: Tensor | None
    reference: Tensor
    given: Given


@dataclass
class Sampled:
    """The operator's output [bs, num_queries, channels], and what weights are made of: logits, and their last sides."""

    out: Tensor
    logits: Tensor
    sides: tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """One way to write an attention module: what identifies it, how it differs from the others, and what its trial needs."""

    parameters: frozenset[str]  # forward has at least these
    sample: Callable[[Any, Inputs], Sampled]
    keeps: bool = False  # the mask is True where a key counts, instead of where it is hidden
    weights: bool = False  # forward returns its weights, too
    residual: bool = False  # forward drops out, and adds the identity
    serves: Callable[[Any, Given], bool] = _always  # whether the form can; the module's own forward does the rest
    references: tuple[tuple[int, int], ...] = ((2, 2), (2, 4), (1, 4))  # last sides of the reference, for two levels
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of the module that is tried, or of its configuration
    alone: bool = False  # memory may be left out: the queries look at themselves
    queue: int = 1  # batches of memory for each batch of queries
    masked: bool = True  # whether the trial gives a mask
    layout: Layout = ROWS  # of memory, which has its heads already where this is another one
    kind: str = ATTENTION

    def attend(self, module: Any, given: Given) -> Any:
        """What the module's forward returns."""
        inputs = self._inputs(module, given)
        sampled = self.sample(module, inputs)
        project = getattr(module, "output_proj", None)
        out = sampled.out if project is None else project(sampled.out)
        out = out if _batch_first(module) else out.transpose(0, 1)
        if self.residual:
            identity = given.get("identity")
            out = module.dropout(out) + (given["query"] if identity is None else identity)
        return (out, sampled.logits.softmax(-1).unflatten(-1, sampled.sides)) if self.weights else out

    def _inputs(self, module: Any, given: Given) -> Inputs:
        query, memory, position, mask = given["query"], given.get("memory"), given.get("position"), given.get("mask")
        memory = query.repeat_interleave(self.queue, 0) if memory is None else memory
        query = query if position is None else query + position
        if not _batch_first(module):
            query, memory = query.transpose(0, 1), memory.transpose(0, 1)
        if self.layout is not ROWS:
            memory = self.layout.ours(memory, _heads(module))
        hidden = ~mask if mask is not None and self.keeps else mask
        return Inputs(query, memory, hidden, given["reference"], given)

    def replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A forward with the original's parameters."""
        names = list(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > len(names):
                return original(module, *args, **kwargs)  # which says so
            named = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
            given = by_role(named)
            if not _plain_mask(given) or not self.serves(module, given) or (self.weights and weights_may_be_watched(module)):
                return original(module, *args, **kwargs)  # which calls its core
            return self.attend(module, given)

        return forward


def _plain_mask(given: Given) -> bool:
    """Whether keys count or do not. Some libraries multiply values by their mask, which may then have other numbers."""
    mask = given.get("mask")
    return mask is None or mask.dtype == torch.bool


def _batch_first(module: Any) -> bool:
    return getattr(module, "batch_first", True)


def _side(module: Any, *names: str) -> int:
    """A number that libraries keep under several names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def _heads(module: Any) -> int:
    return _side(module, "n_heads", "num_heads")


def _levels_and_points(module: Any) -> tuple[int, int]:
    return _side(module, "n_levels", "num_levels"), _side(module, "n_points", "num_points")


def _sizes(module: Any) -> tuple[int, int, int]:
    """Heads, channels of a head, and points on all levels."""
    heads, (levels, points) = _heads(module), _levels_and_points(module)
    project = getattr(module, "value_proj", None)
    channels = project.out_features if project else _side(module, "d_model", "embed_dims", "embed_dim", "hidden_size")
    return heads, channels // heads, sum(points) if isinstance(points, (list, tuple)) else levels * points


def passed_limits(model: torch.nn.Module) -> dict[str, str]:
    """Return the attention modules whose sizes break a documented limit of Atlas A2 -> the limit. Skip unknown sizes."""
    limits = {}
    for name, module in model.named_modules():
        if all(hasattr(module, layer) for layer in LAYERS):
            with contextlib.suppress(StopIteration, AttributeError, TypeError):
                sizes = _checks.limits.attention_sizes(*_sizes(module))
                limits[name] = _checks.limits.first_broken("multi_scale_deformable_attn", sizes)
    return {name: limit for name, limit in limits.items() if limit}


def _rows(module: Any, inputs: Inputs) -> Tensor:
    """The operator's value: memory, projected where the module does so, by heads, with zeros where it is hidden.

    To see that a mask hides nothing takes a hundredth of the time of a copy of rows.
    """
    hidden = inputs.hidden
    if inputs.memory.dim() == 4:
        return inputs.memory
    if hidden is not None and can_be_read(hidden) and not hidden.any():
        hidden = None
    project = getattr(module, "value_proj", None)
    return heads_of(inputs.memory if project is None else project(inputs.memory), hidden, _heads(module))


def _tables(given: Given, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """spatial_shapes and level_start_index. Some libraries give the shapes as a list, some as a tensor, some as both."""
    shapes, sizes, starts = given.get("shapes"), given.get("sizes"), given.get("starts")
    if not isinstance(shapes, Tensor):
        shapes, sizes = None, shapes or sizes
    if sizes is not None:
        _checks.inputs.rows_of_levels(sum(h * w for h, w in sizes), keys)
    elif shapes is not None and can_be_read(shapes):
        _checks.inputs.rows_of_levels(int(shapes.prod(-1).sum()), keys)
    if shapes is not None and starts is not None:
        return shapes, starts
    table: Any = sizes if shapes is None else shapes
    return levels(table, device)


def _attend(
    value: Tensor, tables: tuple[Tensor, Tensor], reference: Tensor, offsets: Tensor, logits: Tensor, axis: str = "level"
) -> Tensor:
    """The operator. Libraries broadcast a reference to all batches or queries."""
    reference = reference.expand(*offsets.shape[:2], -1, -1)
    return multi_scale_deformable_attn_with_logits(value, *tables, reference, offsets, logits, axis)


def _even(module: Any, inputs: Inputs, axis: str = "level") -> Sampled:
    """As many points on one level as on another: nearly all libraries."""
    sides = _levels_and_points(module)
    offsets = module.sampling_offsets(inputs.query).unflatten(-1, (_heads(module), *sides, 2))
    logits = module.attention_weights(inputs.query).unflatten(-1, (_heads(module), -1))
    value = _rows(module, inputs)
    tables = _tables(inputs.given, value.shape[1], value.device)
    return Sampled(_attend(value, tables, inputs.reference, offsets, logits, axis), logits, sides)


def _pillars(module: Any, inputs: Inputs) -> Sampled:
    """BEVFormer's MSDeformableAttention3D: a reference for each height of a pillar."""
    return _even(module, inputs, "point")


def _uneven(module: Any, inputs: Inputs) -> Sampled:
    """RT-DETR v2, D-FINE, DEIM: a level has its own number of points, in boxes.

    A level with more points than another is listed several times. The operator divides a box by twice the points of one such
    entry; these modules divide it by the level's own number of points, and multiply by offset_scale.
    """
    counts = list(getattr(module, "n_points_list", None) or module.num_points_list)
    points, order = math.gcd(*counts), levels_by_points(counts)
    value = _rows(module, inputs)
    if not hasattr(module, "value_proj"):
        value = keys_last(value)
    shapes, starts = _tables(inputs.given, value.shape[1], value.device)
    offsets = module.sampling_offsets(inputs.query).unflatten(-1, (_heads(module), len(order), points, 2))
    scale = getattr(module, "offset_scale", 0.5)  # OTX writes the number
    scales = [2 * points / counts[level] * scale for level in order]
    if any(scale != 1 for scale in scales):
        offsets = offsets * torch.tensor(scales, dtype=offsets.dtype, device=offsets.device)[:, None, None]
    logits = module.attention_weights(inputs.query).unflatten(-1, (_heads(module), -1))
    out = _attend(value, (shapes[order], starts[order]), inputs.reference, offsets, logits)
    return Sampled(out, logits, (sum(counts),))


def _temporal(module: Any, inputs: Inputs) -> Sampled:
    """BEVFormer's TemporalSelfAttention: queries look at two maps, an earlier one and their own. The output is the mean."""
    batches, sides = inputs.query.shape[0], (_heads(module), module.num_bev_queue)
    both = torch.cat([inputs.memory[:batches], inputs.query], -1)
    value = _rows(module, inputs)
    offsets = module.sampling_offsets(both).unflatten(-1, (*sides, *_levels_and_points(module), 2))
    logits = module.attention_weights(both).unflatten(-1, (*sides, -1))
    tables = _tables(inputs.given, value.shape[1], value.device)
    by_map = [t.movedim(3, 1).flatten(0, 1) for t in (offsets, logits)]
    out = _attend(value, tables, inputs.reference, *by_map).unflatten(0, (batches, module.num_bev_queue)).mean(1)
    return Sampled(out, by_map[1], _levels_and_points(module))


def _one_box(module: Any, given: Given) -> bool:
    """Method "discrete" reads whole pixels. With points (x, y) these modules work for few shapes, and by broadcasting."""
    method = getattr(module, "method", getattr(module, "decoder_method", "default"))
    return method == "default" and tuple(given["reference"].shape[2:]) == (1, 4)


def _one_box_unmasked(module: Any, given: Given) -> bool:
    """D-FINE's mask does not fit its own value, which has an axis more."""
    return _one_box(module, given) and given.get("mask") is None


def _apart(module: Any, given: Given) -> bool:
    """Values of each level by heads. LibreYOLO's GTR merges its linear layers, and its levels, for deployment."""
    by_level = isinstance(given["memory"], (list, tuple)) and all(level.dim() == 4 for level in given["memory"])
    return by_level and not getattr(module, "_fused_offset_weight", False) and _one_box(module, given)


def _point_or_box(module: Any, given: Given) -> bool:
    return given["reference"].shape[-1] in (2, 4)  # OTX has another shape, of a centre and distances to four sides


def _known_names(module: Any, given: Given) -> bool:
    return "residual" not in given  # mmcv's former name of identity, which a decorator of its forward translates


_HUGGING_FACE = frozenset({"hidden_states", "attention_mask", "encoder_hidden_states", "reference_points"})
_MMCV = frozenset({"query", "value", "identity", "query_pos", "key_padding_mask", "reference_points", "spatial_shapes"})
_GROUNDING_DINO = _MMCV - {"identity"}
_PAPER = frozenset({"query", "reference_points", "input_flatten", "input_spatial_shapes", "input_level_start_index"})
_BARE = frozenset({"query", "reference_points", "input_flatten", "input_spatial_shapes"})
_RT_DETR = frozenset({"query", "reference_points", "value", "value_spatial_shapes"})
_POINTS = {"num_points": [2, 4], "num_points_list": [2, 4], "offset_scale": 0.7}
_ULTRALYTICS = frozenset({"query", "refer_bbox", "value", "value_shapes", "value_mask"})
ATTENTION_FORMS = (
    Attention(_HUGGING_FACE, _even, keeps=True, weights=True),
    Attention(_HUGGING_FACE, _even, weights=True),
    Attention(_HUGGING_FACE, _uneven, keeps=True, weights=True, serves=_one_box, references=((1, 4),)),
    Attention(
        _HUGGING_FACE,
        _uneven,
        weights=True,
        serves=_one_box_unmasked,
        references=((1, 4),),
        arguments={"decoder_n_points": [2, 4]},
        masked=False,
    ),
    Attention(_HUGGING_FACE, _even, keeps=True),  # LibreYOLO's Grounding DINO
    Attention(_MMCV, _even, residual=True, serves=_known_names, alone=True),
    Attention(_MMCV, _pillars, serves=_known_names, references=((2, 2),), alone=True),
    Attention(_MMCV, _temporal, residual=True, serves=_known_names, references=((2, 2), (2, 4)), alone=True, queue=2),
    Attention(_GROUNDING_DINO, _even, alone=True),
    Attention(_PAPER, _even),
    Attention(_BARE, _even),  # LibreYOLO's LW-DETR
    Attention(_RT_DETR, _even, serves=_point_or_box),
    Attention(_RT_DETR, _even, keeps=True, serves=_point_or_box),
    Attention(_RT_DETR, _uneven, keeps=True, serves=_one_box, references=((1, 4),), arguments=_POINTS),
    Attention(_RT_DETR, _uneven, serves=_apart, references=((1, 4),), arguments=_POINTS, masked=False, layout=BY_LEVEL),
    Attention(_RT_DETR, _uneven, serves=_apart, references=((1, 4),), arguments=_POINTS, masked=False, layout=IMAGES),
    Attention(_ULTRALYTICS, _even, references=((1, 2), (1, 4))),
)
