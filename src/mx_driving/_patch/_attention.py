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
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._operator import checks, limits
from .._operator.rules import INDEX
from ..nn._pyramid import split_heads
from ..ops._other_shapes import can_be_read
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from ._callers import weights_may_be_watched
from ._forms import BY_LEVEL, IMAGES, ROWS, ValueLayout, keys_last, levels, levels_by_points
from ._parameters import Parameters, attributes_used, overrides

ATTENTION = "attention module"
LEVELS = 0  # in a shape: as many as there are levels
LINEAR_LAYERS = {"sampling_offsets", "attention_weights"}  # the linear layers that the code of every such forward names
Arguments = Mapping[str, Any]  # of forward, by role where they have one, else by name

# the names that libraries have for an argument of forward, by its role
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
    "trajectories": ("reference_trajs",),  # UniAD's, in metres from the boxes
    "boxes": ("bbox_results",),
}
LISTED = {"value_spatial_shapes", "value_shapes"}  # names of shapes that are a list
# attributes that forms read themselves, or that change nothing but the way
_READ_BY_FORMS = {"batch_first", "method", "decoder_method", "offset_scale", "output_proj", "value_proj", "training"}
_READ_BY_FORMS |= {"_fused_offset_weight", "_export", "fp16_enabled", "disable_custom_kernels"}
_UNREADABLE = object()
_ROLE = {name: role for role, names in ROLES.items() for name in names}


def by_role(named: Mapping[str, Any]) -> Arguments:
    """Return arguments under their roles."""
    return {_ROLE.get(name, name): argument for name, argument in named.items()}


def refusal(parameters: Parameters) -> str:
    """Return why no form can have the parameters of a forward, or nothing."""
    more = [name for name in parameters.read if name not in _ROLE]
    if more:
        return f"no known form of an attention module has the parameters {', '.join(more)}, which its forward reads"
    if len(by_role(dict.fromkeys(parameters.read))) < len(parameters.read):
        return f"its forward reads two parameters of one meaning: {', '.join(parameters.read)}"
    return ""


def _always(module: Any, arguments: Arguments) -> bool:
    return True


@dataclass
class Inputs:
    """The arguments of forward, batches first. `hidden` is the key_padding_mask: True means ignore this key."""

    query: Tensor
    memory: Any
    hidden: Tensor | None
    reference: Tensor
    arguments: Arguments


@dataclass
class Sampled:
    """The operator's output [bs, num_queries, channels]; the logits of the weights, and the weights' last sides."""

    out: Tensor
    logits: Tensor
    sides: tuple[int, ...]


@dataclass(frozen=True)
class Attention:
    """One way to write an attention module: how it differs from the others, and what its trial needs."""

    sample: Callable[[Any, Inputs], Sampled]
    keeps: bool = False  # the mask is True where a key counts, instead of where it is hidden
    weights: bool = False  # forward returns its weights, too
    residual: bool = False  # forward drops out, and adds the identity
    serves: Callable[[Any, Arguments], bool] = _always  # whether the form can; the module's own forward does the rest
    references: tuple[tuple[int, int], ...] = ((LEVELS, 2), (LEVELS, 4), (1, 4))  # last sides of the reference
    constructor: Mapping[str, Any] = field(
        default_factory=dict
    )  # arguments of the module that is tried, or of its configuration
    queue: int = 1  # batches of memory for each batch of queries
    masked: bool = True  # whether the trial gives a mask
    layout: ValueLayout = ROWS  # of memory, which has its heads already where this is another one
    tried: frozenset[tuple[int, bool]] = frozenset()  # numbers of a reference, and whether there is memory: what agreed
    options: tuple[tuple[str, Any], ...] = ()  # switches and factors of the module that was tried, by name
    needs: frozenset[str] = frozenset(("query", "reference"))  # roles of forward's parameters
    kind: str = ATTENTION

    def attend(self, module: Any, arguments: Arguments) -> Any:
        """Return what the module's forward returns."""
        inputs = self._inputs(module, arguments)
        sampled = self.sample(module, inputs)
        project = getattr(module, "output_proj", None)
        out = sampled.out if project is None else project(sampled.out)
        out = out if _batch_first(module) else out.transpose(0, 1)
        if self.residual:
            identity = arguments.get("identity")
            out = module.dropout(out) + (arguments["query"] if identity is None else identity)
        return (out, sampled.logits.softmax(-1).unflatten(-1, sampled.sides)) if self.weights else out

    def _inputs(self, module: Any, arguments: Arguments) -> Inputs:
        query: Any = arguments.get("query")
        memory, position, mask = (arguments.get(role) for role in ("memory", "position", "mask"))
        memory = query.repeat_interleave(self.queue, 0) if memory is None else memory
        query = query if position is None else query + position
        if not _batch_first(module):
            query, memory = query.transpose(0, 1), memory.transpose(0, 1)
        if self.layout is not ROWS:
            memory = self.layout.ours(memory, heads_in(module))
        hidden = ~mask if mask is not None and self.keeps else mask
        return Inputs(query, memory, hidden, arguments["reference"], arguments)

    def in_place_of(self, original: Callable[..., Any], kind: type) -> Callable[..., Any]:
        """Return a forward with the original's parameters. A class may inherit it, and change what it calls."""
        bind, attributes = Parameters(original, bound=1).binder(), attributes_used(kind, original)

        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            named = bind(args, kwargs)
            arguments = by_role(named) if named is not None else None
            changed = type(module) is not kind and overrides(type(module), kind, attributes)
            if arguments is None or changed or not self.can_attend(module, arguments):
                return original(module, *args, **kwargs)  # which calls its core
            return self.attend(module, arguments)

        return forward

    def fits(self, module: Any) -> bool:
        """Return whether the module keeps its number of points as the form reads it: for each level, or one for all."""
        return bool(_counts_of(module)) == (self.sample is _uneven)

    def has_options(self, module: Any) -> bool:
        """Return whether the module's switches and factors are those of the module that was tried."""
        return all(getattr(module, name, None) == value for name, value in self.options)

    def can_attend(self, module: Any, arguments: Arguments) -> bool:
        """Return whether the form was tried on such arguments."""
        mask, reference = arguments.get("mask"), arguments["reference"]
        if not (is_mask(mask) and (self.masked or mask is None) and are_whole(arguments) and isinstance(reference, Tensor)):
            return False
        if (reference.shape[-1], arguments.get("memory") is not None) not in self.tried or not self.has_options(module):
            return False
        return self.serves(module, arguments) and not (self.weights and weights_may_be_watched(module))


def options_of(module: Any, attributes: frozenset[str]) -> tuple[tuple[str, Any], ...]:
    """Return the attributes that a forward's code names and that change its arithmetic in a way that no form knows."""
    values = {name: getattr(module, name, _UNREADABLE) for name in sorted(attributes - _READ_BY_FORMS)}
    return tuple((name, value) for name, value in values.items() if isinstance(value, (bool, float, str, type(None))))


def is_mask(mask: Any) -> bool:
    """Return whether keys count or do not. Some libraries multiply values by their mask, which may have other numbers."""
    return mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool)


def are_whole(arguments: Arguments) -> bool:
    """Return whether the tables are whole numbers. Of others, a module may use the fractions."""
    tables = (arguments.get("shapes"), arguments.get("starts"))
    return all(table.dtype in INDEX for table in tables if isinstance(table, Tensor))


def _batch_first(module: Any) -> bool:
    return getattr(module, "batch_first", True)


def _attribute(module: Any, *names: str) -> int:
    """Return a number that libraries keep under several names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def heads_in(module: Any) -> int:
    return _attribute(module, "n_heads", "num_heads")


def levels_in(module: Any) -> int:
    return _attribute(module, "n_levels", "num_levels")


def levels_and_points(module: Any) -> tuple[int, int]:
    return levels_in(module), _attribute(module, "n_points", "num_points")


def _sizes(module: Any) -> tuple[int, int, int]:
    """Return the heads, the channels of a head, and the points on all levels."""
    heads, (levels, points) = heads_in(module), levels_and_points(module)
    project = getattr(module, "value_proj", None)
    channels = project.out_features if project else _attribute(module, "d_model", "embed_dims", "embed_dim", "hidden_size")
    return heads, channels // heads, sum(points) if isinstance(points, (list, tuple)) else levels * points


def passed_limits(model: torch.nn.Module) -> dict[str, str]:
    """Return the attention modules whose sizes break a documented limit of Atlas A2 -> the limit. Skip unknown sizes."""
    passed = {}
    for name, module in model.named_modules():
        if all(hasattr(module, layer) for layer in LINEAR_LAYERS):
            with contextlib.suppress(StopIteration, AttributeError, TypeError):
                sizes = limits.attention_sizes(*_sizes(module))
                passed[name] = limits.first_broken("multi_scale_deformable_attn", sizes)
    return {name: limit for name, limit in passed.items() if limit}


def project_rows(module: Any, inputs: Inputs) -> Tensor:
    """Return the operator's value: memory, projected where the module does so, by heads, with zeros where it is hidden.

    To see that a mask hides nothing takes a hundredth of the time of a copy of rows.
    """
    hidden = inputs.hidden
    if inputs.memory.dim() == 4:
        return inputs.memory
    if hidden is not None and can_be_read(hidden) and not hidden.any():
        hidden = None
    project = getattr(module, "value_proj", None)
    return split_heads(inputs.memory if project is None else project(inputs.memory), hidden, heads_in(module))


def read_tables(arguments: Arguments, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return spatial_shapes and level_start_index. Libraries give the shapes as a list, as a tensor, or as both."""
    shapes, sizes, starts = arguments.get("shapes"), arguments.get("sizes"), arguments.get("starts")
    if not isinstance(shapes, Tensor):
        shapes, sizes = None, shapes or sizes
    if sizes is not None:
        checks.rows_of_levels(sum(h * w for h, w in sizes), keys)
    elif shapes is not None and can_be_read(shapes):
        checks.rows_of_levels(int(shapes.prod(-1).sum()), keys)
    if shapes is not None and starts is not None:
        return shapes, starts
    table: Any = sizes if shapes is None else shapes
    return levels(table, device)


def sample_with_logits(
    value: Tensor, tables: tuple[Tensor, Tensor], reference: Tensor, offsets: Tensor, logits: Tensor, axis: str = "level"
) -> Tensor:
    """Call the operator. Libraries broadcast a reference to all batches or queries."""
    reference = reference.expand(*offsets.shape[:2], -1, -1)
    return multi_scale_deformable_attn_with_logits(value, *tables, reference, offsets, logits, axis)


def _even(module: Any, inputs: Inputs, axis: str = "level") -> Sampled:
    """Sample as many points on one level as on another: nearly all libraries."""
    sides = levels_and_points(module)
    offsets = module.sampling_offsets(inputs.query).unflatten(-1, (heads_in(module), *sides, 2))
    logits = module.attention_weights(inputs.query).unflatten(-1, (heads_in(module), -1))
    value = project_rows(module, inputs)
    tables = read_tables(inputs.arguments, value.shape[1], value.device)
    return Sampled(sample_with_logits(value, tables, inputs.reference, offsets, logits, axis), logits, sides)


def _counts_of(module: Any) -> list[int]:
    """Return the number of points of each level, where a module keeps them apart."""
    return list(getattr(module, "n_points_list", None) or getattr(module, "num_points_list", None) or ())


def _pillars(module: Any, inputs: Inputs) -> Sampled:
    """Sample as BEVFormer's MSDeformableAttention3D: a reference for each height of a pillar."""
    return _even(module, inputs, "point")


def _uneven(module: Any, inputs: Inputs) -> Sampled:
    """Sample as RT-DETR v2, D-FINE and DEIM: a level has its own number of points, in boxes.

    A level with more points than another is listed several times. The operator divides a box by twice the points of one such
    entry; these modules divide it by the level's own number of points, and multiply by offset_scale.
    """
    counts = _counts_of(module)
    points, order = math.gcd(*counts), levels_by_points(counts)
    value = project_rows(module, inputs)
    if not hasattr(module, "value_proj"):
        value = keys_last(value)
    shapes, starts = read_tables(inputs.arguments, value.shape[1], value.device)
    offsets = module.sampling_offsets(inputs.query).unflatten(-1, (heads_in(module), len(order), points, 2))
    scale = getattr(module, "offset_scale", 0.5)  # OTX writes the number
    scales = [2 * points / counts[level] * scale for level in order]
    if any(scale != 1 for scale in scales):
        offsets = offsets * torch.tensor(scales, dtype=offsets.dtype, device=offsets.device)[:, None, None]
    logits = module.attention_weights(inputs.query).unflatten(-1, (heads_in(module), -1))
    out = sample_with_logits(value, (shapes[order], starts[order]), inputs.reference, offsets, logits)
    return Sampled(out, logits, (sum(counts),))


def _temporal(module: Any, inputs: Inputs) -> Sampled:
    """Sample as BEVFormer's TemporalSelfAttention: the mean of an earlier map and the queries' own."""
    batches, sides = inputs.query.shape[0], (heads_in(module), module.num_bev_queue)
    both = torch.cat([inputs.memory[:batches], inputs.query], -1)
    value = project_rows(module, inputs)
    offsets = module.sampling_offsets(both).unflatten(-1, (*sides, *levels_and_points(module), 2))
    logits = module.attention_weights(both).unflatten(-1, (*sides, -1))
    tables = read_tables(inputs.arguments, value.shape[1], value.device)
    by_map = [t.movedim(3, 1).flatten(0, 1) for t in (offsets, logits)]
    out = sample_with_logits(value, tables, inputs.reference, *by_map).unflatten(0, (batches, module.num_bev_queue)).mean(1)
    return Sampled(out, by_map[1], levels_and_points(module))


def _one_box(module: Any, arguments: Arguments) -> bool:
    """Return whether there is one box, and bilinear samples. With points these modules work for few shapes, by broadcasting."""
    method = getattr(module, "method", getattr(module, "decoder_method", "default"))
    return method == "default" and tuple(arguments["reference"].shape[2:]) == (1, 4)


def _apart(module: Any, arguments: Arguments) -> bool:
    """Return whether values come level by level. LibreYOLO's GTR merges linear layers and levels for deployment."""
    by_level = isinstance(arguments["memory"], (list, tuple)) and all(level.dim() == 4 for level in arguments["memory"])
    return by_level and not getattr(module, "_fused_offset_weight", False) and _one_box(module, arguments)


_POINTS = {"num_points": [2, 4], "num_points_list": [2, 4], "offset_scale": 0.7}
_BOX = ((1, 4),)
ATTENTION_FORMS = (
    # modules with a number of points for each level: RT-DETR v2, D-FINE, DEIM
    Attention(_uneven, keeps=True, weights=True, serves=_one_box, references=_BOX),
    Attention(_uneven, weights=True, serves=_one_box, references=_BOX, constructor={"decoder_n_points": [2, 4]}, masked=False),
    Attention(_uneven, keeps=True, serves=_one_box, references=_BOX, constructor=_POINTS),
    Attention(_uneven, serves=_apart, references=_BOX, constructor=_POINTS, masked=False, layout=BY_LEVEL),
    Attention(_uneven, serves=_apart, references=_BOX, constructor=_POINTS, masked=False, layout=IMAGES),
    # transformers
    Attention(_even, keeps=True, weights=True),
    Attention(_even, weights=True),
    # mmcv, BEVFormer
    Attention(_even, residual=True),
    Attention(_pillars, references=((2, 2),)),
    Attention(_temporal, residual=True, references=((LEVELS, 2), (LEVELS, 4)), queue=2),
    # Deformable-DETR, GroundingDINO, ultralytics, RT-DETR
    Attention(_even),
    Attention(_even, keeps=True),
)
