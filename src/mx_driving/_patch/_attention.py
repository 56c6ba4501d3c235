"""The forms in which libraries write an attention module around a sampling core, each over the operator with logits.

A module's linear layers are called as its own code calls them, so their hooks, adapters and quantised kinds go on working.
Softmax and the arithmetic of locations are left to the operator. What the module's own code returns is returned.

Several forms may fit the parameters of one module: masks, for instance, say which keys count, or which do not. The form whose
trial agrees is taken.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._operator import checks, limits
from .._operator.description import MULTI_SCALE
from ..nn._pyramid import split_heads
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from ._forms import (
    BY_LEVEL,
    IMAGES,
    MODULE,
    ROWS,
    Arguments,
    Form,
    ValueLayout,
    is_table,
    promote,
    put_keys_last,
    read_tables,
    repeat_levels,
)
from ._parameters import find_source

LEVELS = 0  # in a shape: as many as there are levels
LINEAR_LAYERS = {"sampling_offsets", "attention_weights"}  # the linear layers that the code of every such forward names
Sampled = tuple[Tensor, Tensor, tuple[int, ...]]  # output [bs, num_queries, channels], logits, last sides of the weights


def has_layers(kind: type) -> bool:
    """Return whether the forward of a class calls the linear layers of deformable attention."""
    return set(find_source(vars(kind)["forward"]).__code__.co_names) >= LINEAR_LAYERS


@dataclass(frozen=True)
class Attention(Form):
    """One way to write an attention module: how it differs from the others, and what its trial needs."""

    sample: Callable[[Any, Arguments], Sampled]
    keeps: bool = False  # the mask is True where a key counts, instead of where it is hidden
    weights: bool = False  # forward returns its weights, too
    residual: bool = False  # forward applies dropout to its output, and adds the residual: `identity`, or else the query
    usual: Callable[[Any, Arguments], bool] = lambda module, arguments: _has_a_reference_for_each_level(module, arguments)
    references: tuple[tuple[int, int], ...] = ((LEVELS, 2), (LEVELS, 4), (1, 4))  # last sides of the reference
    uneven: frozenset[str] = frozenset()  # arguments of the constructor that are the numbers of points of each level
    queue: int = 1  # batches of memory for each batch of queries
    reads: frozenset[str] = frozenset()  # attributes of the layer that the form reads beside heads, levels, points and layers
    mark: str = ""  # a name in the code of such a forward, to tell which form to suggest
    layout: ValueLayout = ROWS  # of memory, which has its heads already where this is another one
    needs: frozenset[str] = frozenset(("query", "reference"))  # roles of forward's parameters
    kind: str = MODULE
    reads_all = False
    roles = frozenset(
        [
            *("query", "position", "value", "mask", "reference", "shapes", "sizes", "starts", "identity"),
            *("trajectories", "boxes", "keys", "ratios"),
        ]
    )

    def serves(self, module: Any, arguments: Arguments) -> bool:
        mask = arguments.get("mask")
        # some libraries multiply values by their mask, which may have other numbers, or use the fractions of their tables
        masks = mask is None or (isinstance(mask, Tensor) and mask.dtype == torch.bool)
        shapes_and_starts = arguments.get("shapes"), arguments.get("starts")
        if not masks or not all(is_table(t) for t in shapes_and_starts if isinstance(t, Tensor)):
            return False
        reference = arguments.get("reference", arguments.get("trajectories"))
        return isinstance(reference, Tensor) and reference.is_floating_point() and self.usual(module, arguments)

    def answer(self, module: Any, arguments: Arguments) -> Any:
        query, identity = arguments["query"], arguments.get("identity")
        out, logits, sides = self.sample(module, self._batches_first(module, arguments))
        out = promote(out, logits)
        project = getattr(module, "output_proj", None)
        out = out if project is None else project(out)
        out = out.transpose(0, 1) if self._swaps(module) else out
        if self.residual:
            out = module.dropout(out.reshape(query.shape)) + (query if identity is None else identity)
        return (out, logits.softmax(-1).unflatten(-1, sides)) if self.weights else out

    def _batches_first(self, module: Any, arguments: Arguments) -> dict[str, Any]:
        """Return the arguments with batches first, positions added, and a mask that is True where a key is hidden."""
        query: Any = arguments["query"]
        memory, position, mask = (arguments.get(role) for role in ("value", "position", "mask"))
        memory = query.repeat_interleave(self.queue, 0) if memory is None else memory
        query = query if position is None else query + position
        if self._swaps(module):
            query, memory = query.transpose(0, 1), memory.transpose(0, 1)
        if self.layout is not ROWS:
            memory = self.layout.ours(memory, get_heads(module))
        mask = ~mask if mask is not None and self.keeps else mask
        return {**arguments, "query": query, "value": memory, "mask": mask}

    def _swaps(self, module: Any) -> bool:
        """Return whether the module has batches second. UniAD's does not ask its `batch_first`."""
        return not getattr(module, "batch_first", True) and self.sample is not _sample_trajectories

    def reads_points_of(self, module: Any) -> bool:
        """Return whether the module keeps its number of points as the form reads it: for each level, or one for all."""
        return bool(_get_counts(module)) == (self.sample is _sample_unevenly)


def _get_attribute(module: Any, *names: str) -> int:
    """Return a number that libraries keep under several names."""
    return next(getattr(module, name) for name in names if hasattr(module, name))


def get_heads(module: Any) -> int:
    return _get_attribute(module, "n_heads", "num_heads")


def get_levels(module: Any) -> int:
    return _get_attribute(module, "n_levels", "num_levels")


def _get_levels_and_points(module: Any) -> tuple[int, int]:
    return get_levels(module), _get_attribute(module, "n_points", "num_points")


def _get_counts(module: Any) -> list[int]:
    """Return the number of points of each level, where a module keeps them apart."""
    counts = (
        getattr(module, "n_points_list", None) or getattr(module, "num_points_list", None) or getattr(module, "num_points", 0)
    )
    return list(counts) if isinstance(counts, (list, tuple)) else []


def _get_sizes(module: Any) -> tuple[int, int, int]:
    """Return the heads, the channels of a head, and the points on all levels."""
    heads, (levels, points) = get_heads(module), _get_levels_and_points(module)
    project = getattr(module, "value_proj", None)
    channels = project.out_features if project else _get_attribute(module, "d_model", "embed_dims", "embed_dim", "hidden_size")
    return heads, channels // heads, sum(points) if isinstance(points, (list, tuple)) else levels * points


def find_passed_limits(model: torch.nn.Module) -> dict[str, str]:
    """Return the attention modules whose sizes break a documented limit of Atlas A2 -> the limit. Skip unknown sizes."""
    passed = {}
    for name, module in model.named_modules():
        if all(hasattr(module, layer) for layer in LINEAR_LAYERS):
            with contextlib.suppress(StopIteration, AttributeError, TypeError):
                sizes = limits.attention_sizes(*_get_sizes(module))
                passed[name or type(module).__qualname__] = limits.first_broken(MULTI_SCALE, sizes)
    return {name: limit for name, limit in passed.items() if limit}


def _make_inputs(module: Any, arguments: Arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's value and tables: memory, projected where the module does so, by heads, zero where it is hidden.

    To see that a mask hides nothing takes a hundredth of the time of a copy of rows.
    """
    value, hidden = arguments["value"], arguments["mask"]
    if value.dim() != 4:
        if hidden is not None and checks.is_readable(hidden) and not hidden.any():
            hidden = None
        project = getattr(module, "value_proj", None)
        value = split_heads(value if project is None else project(value), hidden, get_heads(module))
    table = arguments["shapes"] if arguments.get("sizes") is None else arguments["sizes"]
    if not isinstance(table, Tensor):
        checks.check_rows_of_levels(sum(h * w for h, w in table), value.shape[1])
    elif checks.is_readable(table):
        checks.check_rows_of_levels(int(table.prod(-1).sum()), value.shape[1])
    return value, *read_tables(arguments, value.device)


def _sample(inputs: tuple[Tensor, ...], reference: Tensor, offsets: Tensor, logits: Tensor, axis: str = "level") -> Tensor:
    """Call the operator. Libraries broadcast a reference to all batches or queries."""
    reference = reference.expand(*offsets.shape[:2], -1, -1)
    if torch.is_grad_enabled():  # their own code does not save it, so that a caller may write to it
        reference = reference.clone()
    return multi_scale_deformable_attn_with_logits(*inputs, reference, offsets, logits, axis)  # pyright: ignore


def _sample_evenly(module: Any, arguments: Arguments, axis: str = "level") -> Sampled:
    """Sample as many points on one level as on another: nearly all libraries."""
    sides, inputs = _get_levels_and_points(module), _make_inputs(module, arguments)  # layers draw dropout in this order
    offsets = module.sampling_offsets(arguments["query"]).unflatten(-1, (get_heads(module), *sides, 2))
    logits = module.attention_weights(arguments["query"]).unflatten(-1, (get_heads(module), -1))
    return _sample(inputs, arguments["reference"], offsets, logits, axis), logits, sides


def _sample_pillars(module: Any, arguments: Arguments) -> Sampled:
    """Sample as BEVFormer's MSDeformableAttention3D: a reference for each height of a pillar."""
    return _sample_evenly(module, arguments, "point")


def _sample_unevenly(module: Any, arguments: Arguments) -> Sampled:
    """Sample as RT-DETR v2, D-FINE and DEIM: a level has its own number of points, in boxes.

    A level with more points than another is listed several times. The operator divides a box by twice the points of one such
    entry. These modules multiply it by offset_scale, and divide it by the level's own number of points, whose inverses most of
    them keep in a buffer.
    """
    counts = _get_counts(module)
    points, order = math.gcd(*counts), repeat_levels(counts)
    value, shapes, starts = _make_inputs(module, arguments)
    value = value if hasattr(module, "value_proj") else put_keys_last(value)
    offsets = module.sampling_offsets(arguments["query"]).unflatten(-1, (get_heads(module), len(order), points, 2))
    factor = 2 * points * getattr(module, "offset_scale", 0.5)  # OTX writes the number
    inverses = getattr(module, "num_points_scale", getattr(module, "n_points_scale", None))
    if inverses is not None:
        offsets = offsets * (inverses.to(offsets) * factor).view(-1, points, 1)
    elif any(factor != counts[level] for level in order):
        offsets = offsets * offsets.new_tensor([factor / counts[level] for level in order])[:, None, None]
    logits = module.attention_weights(arguments["query"]).unflatten(-1, (get_heads(module), -1))
    out = _sample((value, shapes[order], starts[order]), arguments["reference"], offsets, logits)
    return out, logits, (sum(counts),)


def _sample_two_maps(module: Any, arguments: Arguments) -> Sampled:
    """Sample as BEVFormer's TemporalSelfAttention: the mean of an earlier map and the queries' own."""
    query, maps = arguments["query"], module.num_bev_queue
    sides, both = (get_heads(module), maps), torch.cat([arguments["value"][: len(query)], query], -1)
    inputs = _make_inputs(module, arguments)
    offsets = module.sampling_offsets(both).unflatten(-1, (*sides, *_get_levels_and_points(module), 2))
    logits = module.attention_weights(both).unflatten(-1, (*sides, -1))
    offsets, logits = (t.movedim(3, 1).flatten(0, 1) for t in (offsets, logits))
    out = _sample(inputs, arguments["reference"], offsets, logits)
    return out.unflatten(0, (-1, maps)).mean(1), logits, _get_levels_and_points(module)


def _sample_trajectories(module: Any, arguments: Arguments) -> Sampled:
    """Sample as UniAD's MotionDeformableAttention: each query follows its trajectory, and samples around every step of it.

    Queries are [bs, agents, modes, channels], values [keys, bs, channels], trajectories [bs, agents, modes, T, levels, 2] in
    metres from their agent. A step of a query is a query of the operator.
    """
    query, steps = arguments["query"].flatten(1, 2), module.num_steps
    chosen = arguments["trajectories"][:, :, :, [module.sample_index]].detach().clone()
    metres = module.agent_coords_to_ego_coords(chosen, arguments["boxes"]).detach()
    low, high = (metres.new_tensor(module.bev_range[k : k + 2]) for k in (0, 3))
    reference = ((metres - low) / (high - low)).flatten(1, 2).expand(-1, -1, steps, -1, -1).flatten(1, 2)
    sides = get_heads(module), steps, *_get_levels_and_points(module)
    inputs = _make_inputs(module, {**arguments, "value": arguments["value"].transpose(0, 1)})
    offsets = module.sampling_offsets(query).unflatten(-1, (*sides, 2)).transpose(2, 3).flatten(1, 2)
    logits = module.attention_weights(query).unflatten(-1, (*sides[:2], -1)).transpose(2, 3).flatten(1, 2)
    return _sample(inputs, reference, offsets, logits).unflatten(1, (-1, steps)).flatten(2), logits, sides[2:]


def _has_a_reference_for_each_level(module: Any, arguments: Arguments) -> bool:
    """Return whether the reference is a point or a box for each level, or one for all levels."""
    reference = arguments["reference"]
    return reference.dim() == 4 and reference.shape[2] in (1, get_levels(module)) and reference.shape[3] in (2, 4)


def _has_a_reference_for_each_height(module: Any, arguments: Arguments) -> bool:
    reference = arguments["reference"]
    points = _get_levels_and_points(module)[1]
    return reference.dim() == 4 and reference.shape[3] == 2 and points % max(reference.shape[2], 1) == 0


def _has_box(module: Any, arguments: Arguments) -> bool:
    """Return whether there is one box. With points these modules work for few shapes, by broadcasting."""
    return tuple(arguments["reference"].shape[2:]) == (1, 4)


def _has_levels_apart(module: Any, arguments: Arguments) -> bool:
    """Return whether values come level by level. LibreYOLO's GTR merges linear layers and levels for deployment."""
    by_level = isinstance(arguments["value"], (list, tuple)) and all(level.dim() == 4 for level in arguments["value"])
    return by_level and not getattr(module, "_fused_offset_weight", False) and _has_box(module, arguments)


def _has_trajectories(module: Any, arguments: Arguments) -> bool:
    return arguments["trajectories"].dim() == 6


_POINTS = frozenset(("num_points", "num_points_list"))
_BOX = ((1, 4),)
_CONFIGURED = frozenset(("decoder_n_points",))
_TRAJECTORIES = frozenset(("query", "value", "trajectories", "boxes"))
_COUNTED = frozenset(("num_points_list", "n_points_list", "num_points_scale", "n_points_scale", "offset_scale", "total_points"))
_DROPOUT = frozenset(("dropout",))
_UNEVEN: dict[str, Any] = {
    "sample": _sample_unevenly,
    "mark": "num_points_list",
    "reads": _COUNTED,
    "usual": _has_box,
    "references": _BOX,
}
_PILLARS: dict[str, Any] = {"usual": _has_a_reference_for_each_height, "references": ((2, 2),)}
ATTENTION_FORMS = {  # the name that a user writes -> the form
    # modules with a number of points for each level
    "rt_detr_v2_transformers": Attention(keeps=True, weights=True, **_UNEVEN),
    "d_fine_transformers": Attention(weights=True, uneven=_CONFIGURED, **_UNEVEN),
    "rt_detr_v2": Attention(keeps=True, uneven=_POINTS, **_UNEVEN),
    "birder": Attention(uneven=frozenset(("n_points",)), **_UNEVEN),
    "d_fine": Attention(uneven=_POINTS, layout=BY_LEVEL, **{**_UNEVEN, "usual": _has_levels_apart}),
    "libreyolo": Attention(uneven=_POINTS, layout=IMAGES, **{**_UNEVEN, "usual": _has_levels_apart}),
    "transformers": Attention(_sample_evenly, keeps=True, weights=True, mark="hidden_states"),
    "mask2former": Attention(_sample_evenly, weights=True, mark="with_pos_embed"),
    "mmcv": Attention(_sample_evenly, residual=True, reads=_DROPOUT, mark="dropout"),
    "bevformer_spatial": Attention(_sample_pillars, mark="num_Z_anchors", **_PILLARS),
    "bevformer_temporal": Attention(
        _sample_two_maps,
        residual=True,
        references=((LEVELS, 2), (LEVELS, 4)),
        queue=2,
        reads=_DROPOUT | {"num_bev_queue"},
        mark="num_bev_queue",
    ),
    "deformable_detr": Attention(_sample_evenly),
    "rt_detr": Attention(_sample_evenly, keeps=True),
    "uniad": Attention(
        _sample_trajectories,
        usual=_has_trajectories,
        residual=True,
        reads=_DROPOUT | {"num_steps", "sample_index", "bev_range"},
        mark="num_steps",
        references=((LEVELS, 2),),
        needs=_TRAJECTORIES,
    ),
}
