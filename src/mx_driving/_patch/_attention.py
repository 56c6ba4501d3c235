"""The forms in which libraries write an attention module around a sampling core. Each form calls the operator with logits.

A form calls a module's linear layers as the module's own code calls them, so hooks, adapters and quantised layers keep working.
The operator computes the softmax and the locations.

Two forms may have the same parameters with different meanings. For instance, True in a mask means "this key counts" in one
form, and "ignore this key" in another. `patch` takes the form whose results on small examples equal the module's.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._operator import checks
from .._operator.description import MULTI_SCALE
from .._operator.rules import INDEX
from .._vendor import limits
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from ._forms import (
    BY_LEVEL,
    IMAGES,
    MODULE,
    ROWS,
    Arguments,
    Form,
    ValueLayout,
    put_keys_last,
    read_levels,
    repeat_levels,
)
from ._parameters import find_source

LEVELS = -1  # in `Attention.references`: stands for the module's number of levels
LINEAR_LAYERS = {"sampling_offsets", "attention_weights"}  # the linear layers that every forward of these modules calls
# `patch` does not check the values of these attributes: every attention form reads them as the modules do, or no result depends
# on them.
READ = LINEAR_LAYERS | {
    *("n_heads", "num_heads", "n_levels", "num_levels", "n_points", "num_points", "batch_first", "im2col_step"),
    *("d_model", "embed_dims", "embed_dim", "hidden_size", "head_dim", "ratio", "value_proj", "output_proj"),
}
# output [bs, num_queries, channels]; logits, whose last axis has all samples of a head; the shape of the samples of a head
Sampled = tuple[Tensor, Tensor, tuple[int, ...]]
Sides = tuple[int, int, Any]  # the number of heads, of levels and of points of a layer


def has_layers(kind: type) -> bool:
    """Return whether the forward of a class calls the linear layers of deformable attention."""
    return set(find_source(vars(kind)["forward"]).__code__.co_names) >= LINEAR_LAYERS


@dataclass(frozen=True)
class Attention(Form):
    """One way to write an attention module.

    Attributes:
        sample: the function that samples. Its output is not projected yet.
        keeps: whether True in a mask means "this key counts", instead of "ignore this key".
        weights: whether forward also returns its attention weights.
        residual: whether forward applies dropout to its output, and adds `identity`, or the query if there is no identity.
        references: the sizes that the last two axes of reference points may have.
        uneven: arguments of the constructor that list the number of points of each level.
        queue: how many batches of value there are for each batch of queries.
        reads: attributes of the layer that the form reads, in addition to `READ`.
        mark: a name in the code of such a forward, to choose which form to suggest.
        layout: how value lies in memory. In all layouts but ROWS, value already has an axis of heads.
    """

    sample: Callable[[Any, Arguments, Sides], Sampled]
    keeps: bool = False
    weights: bool = False
    residual: bool = False
    references: tuple[tuple[int, int], ...] = ((LEVELS, 2), (LEVELS, 4), (1, 2), (1, 4))
    uneven: frozenset[str] = frozenset()
    queue: int = 1
    reads: frozenset[str] = frozenset()
    mark: str = ""
    layout: ValueLayout = ROWS
    needs: frozenset[str] = frozenset(("query", "reference"))
    kind: str = MODULE
    roles = frozenset(
        [
            *("query", "position", "value", "mask", "reference", "shapes", "sizes", "starts", "identity"),
            *("trajectories", "boxes", "keys", "ratios"),
        ]
    )

    def answer(self, module: Any, arguments: dict[str, Any]) -> Any:
        original, mask = arguments["query"], arguments.get("mask")
        memory: Any = arguments.get("value")
        # Refuse a mask that is not boolean: some libraries multiply value by it. Refuse a table of floats: some libraries
        # compute with fractions of sizes.
        if mask is not None and not (isinstance(mask, Tensor) and mask.dtype == torch.bool):
            return None
        shapes = arguments.get("shapes")
        if isinstance(shapes, Tensor) and shapes.dtype not in INDEX:
            return None
        reference = arguments.get("reference", arguments.get("trajectories"))
        if not isinstance(reference, Tensor) or not reference.is_floating_point():
            return None
        sides = heads, levels, points = get_sizes(module)
        if "trajectories" in self.needs:
            if reference.dim() != 6:
                return None
        elif reference.dim() != 4:
            return None
        else:
            count, last = reference.shape[2:]
            if self.sample is _sample_pillars:  # count, the number of heights of a pillar, must divide the number of points.
                if last != 2 or points % max(count, 1):
                    return None
            elif count < 1 or (
                (count, last) not in self.references and (count != levels or (LEVELS, last) not in self.references)
            ):
                return None
        if self.layout is not ROWS:
            # Refuse a GTR of LibreYOLO that has merged its levels or linear layers for deployment.
            is_apart = isinstance(memory, (list, tuple)) and all(level.dim() == 4 for level in memory)
            if not is_apart or getattr(module, "_fused_offset_weight", False):
                return None
        if (tables := read_levels(arguments, original.device)) is None:
            return None
        identity, position = arguments.get("identity"), arguments.get("position")
        # Without batch_first, axis 1 of the inputs is the axis of batches. UniAD's module ignores its `batch_first`.
        swaps = not module.__dict__.get("batch_first", True) and self.sample is not _sample_trajectories
        memory = original.repeat_interleave(self.queue, 0) if memory is None else memory
        query = original if position is None else original + position
        if swaps:
            query, memory = query.transpose(0, 1), memory.transpose(0, 1)
        if self.layout is not ROWS:
            memory = self.layout.ours(memory, heads)
        mask = ~mask if mask is not None and self.keeps else mask
        arguments.update(query=query, value=memory, mask=mask, tables=tables)
        out, logits, shape = self.sample(module, arguments, sides)
        if out.dtype != logits.dtype:
            out = out.to(torch.promote_types(out.dtype, logits.dtype))  # Plain torch multiplies values by weights.
        if (project := getattr(module, "output_proj", None)) is not None:
            out = project(out)
        out = out.transpose(0, 1) if swaps else out
        if self.residual:
            out = module.dropout(out.reshape(original.shape)) + (original if identity is None else identity)
        return (out, logits.softmax(-1).view(*logits.shape[:-1], *shape)) if self.weights else out

    def reads_points_of(self, module: Any) -> bool:
        """Return whether the form serves the module's points: each level has its own number, or all levels have the same."""
        return bool(_get_counts(module)) == (self.sample is _sample_unevenly)


def get_sizes(module: Any) -> Sides:
    """Return the number of heads, of levels and of points of a layer. Libraries have two names for each attribute.

    Look into the layer's own dictionary first: to ask a layer for an attribute that it does not have takes a microsecond.
    """
    sizes = []
    for first, second in (("n_heads", "num_heads"), ("n_levels", "num_levels"), ("n_points", "num_points")):
        is_second = second in module.__dict__ or (first not in module.__dict__ and not hasattr(module, first))
        sizes.append(getattr(module, second if is_second else first, None))
    return sizes[0], sizes[1], sizes[2]


def _get_counts(module: Any) -> list[int]:
    """Return the number of points of each level, or an empty list if the module has one number for all levels."""
    names = ("n_points_list", "num_points_list", "num_points")
    counts = next((c for name in names if (c := getattr(module, name, None))), 0)
    return list(counts) if isinstance(counts, (list, tuple)) else []


def find_passed_limits(model: torch.nn.Module) -> dict[str, str]:
    """Return {name of an attention module: the documented limit of Atlas A2 that its sizes break}.

    Skip modules whose sizes are not found.
    """
    passed = {}
    for name, module in model.named_modules():
        if all(hasattr(module, layer) for layer in LINEAR_LAYERS):
            with contextlib.suppress(StopIteration, AttributeError, TypeError):
                heads, levels, points = get_sizes(module)
                widths = ("d_model", "embed_dims", "embed_dim", "hidden_size")
                project = getattr(module, "value_proj", None)
                width = project.out_features if project else next(getattr(module, n) for n in widths if hasattr(module, n))
                samples = sum(points) if isinstance(points, (list, tuple)) else levels * points
                sizes = limits.attention_sizes(heads, width // heads, samples)
                passed[name or type(module).__qualname__] = limits.first_broken(MULTI_SCALE, sizes)
    return {name: limit for name, limit in passed.items() if limit}


def _make_inputs(module: Any, arguments: Arguments, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator's value, spatial_shapes and level_start_index.

    Project value if the module has a value_proj, and set it to 0 for hidden keys. Drop a mask that hides no key: the check
    takes a hundredth of the time of masking.
    """
    value, hidden, (shapes, starts, rows) = arguments["value"], arguments["mask"], arguments["tables"]
    if value.dim() != 4:
        if hidden is not None and checks.is_readable(hidden) and not hidden.any():
            hidden = None
        value = value if (project := getattr(module, "value_proj", None)) is None else project(value)
        # masked_fill is slower than where, most of all in the backward.
        value = value if hidden is None else torch.where(hidden[..., None], 0, value)
        value = value.view(*value.shape[:2], heads, -1)
    if rows is not None and rows != value.shape[1]:
        checks.check_rows_of_levels(rows, value.shape[1])
    return value, shapes, starts


def _sample(inputs: tuple[Tensor, ...], reference: Tensor, offsets: Tensor, logits: Tensor, axis: str = "level") -> Tensor:
    """Call the operator. Some libraries pass one reference point for all batches or queries: expand the points first."""
    if reference.shape[:2] != offsets.shape[:2]:
        reference = reference.expand(*offsets.shape[:2], -1, -1)
    if torch.is_grad_enabled() and not _torch_private.is_tracing():
        # The operator saves the reference for its backward. The module's code does not, so a caller may write to the reference.
        reference = reference.clone()
    return multi_scale_deformable_attn_with_logits(*inputs, reference, offsets, logits, axis)  # pyright: ignore


def _sample_evenly(module: Any, arguments: Arguments, sides: Sides, axis: str = "level") -> Sampled:
    """Sample the same number of points on each level, as nearly all libraries do."""
    # Call the layers in the module's own order, so that dropout in a layer draws the same random numbers.
    heads, query = sides[0], arguments["query"]
    inputs, front = _make_inputs(module, arguments, heads), query.shape[:-1]
    offsets = module.sampling_offsets(query).view(*front, *sides, 2)
    logits = module.attention_weights(query).view(*front, heads, -1)
    return _sample(inputs, arguments["reference"], offsets, logits, axis), logits, sides[1:]


# Sample as BEVFormer's MSDeformableAttention3D: a query has a reference point for each height of a pillar.
_sample_pillars = functools.partial(_sample_evenly, axis="point")


def _sample_unevenly(module: Any, arguments: Arguments, sides: Sides) -> Sampled:
    """Sample as RT-DETR v2, D-FINE and DEIM: each level has its own number of points, and the reference is a box.

    The operator takes equally many points on each level, so a level with more points is passed several times. The operator
    divides a box by twice the number of points of a passed level. These modules multiply the box by offset_scale, and divide it
    by all points of the level. Most of them have a buffer with the inverse of each level's number of points.
    """
    counts, heads = _get_counts(module), sides[0]
    points, order = math.gcd(*counts), repeat_levels(counts)
    value, shapes, starts = _make_inputs(module, arguments, heads)
    value = value if hasattr(module, "value_proj") else put_keys_last(value)
    offsets = module.sampling_offsets(arguments["query"]).unflatten(-1, (heads, len(order), points, 2))
    factor = 2 * points * getattr(module, "offset_scale", 0.5)  # OTX's modules have 0.5 in their code.
    inverses = getattr(module, "num_points_scale", getattr(module, "n_points_scale", None))
    if inverses is not None:
        offsets = offsets * (inverses.to(offsets) * factor).view(-1, points, 1)
    elif any(factor != counts[level] for level in order):
        offsets = offsets * offsets.new_tensor([factor / counts[level] for level in order])[:, None, None]
    logits = module.attention_weights(arguments["query"]).unflatten(-1, (heads, -1))
    out = _sample((value, shapes[order], starts[order]), arguments["reference"], offsets, logits)
    return out, logits, (sum(counts),)


def _sample_two_maps(module: Any, arguments: Arguments, sides: Sides) -> Sampled:
    """Sample as BEVFormer's TemporalSelfAttention: sample an earlier map and the current map, and return the mean of both."""
    query, maps = arguments["query"], module.num_bev_queue
    both, heads = torch.cat([arguments["value"][: len(query)], query], -1), sides[0]
    inputs = _make_inputs(module, arguments, heads)
    offsets = module.sampling_offsets(both).unflatten(-1, (heads, maps, *sides[1:], 2))
    logits = module.attention_weights(both).unflatten(-1, (heads, maps, -1))
    offsets, logits = (t.movedim(3, 1).flatten(0, 1) for t in (offsets, logits))
    out = _sample(inputs, arguments["reference"], offsets, logits)
    return out.unflatten(0, (-1, maps)).mean(1), logits, sides[1:]


def _sample_trajectories(module: Any, arguments: Arguments, sides: Sides) -> Sampled:
    """Sample as UniAD's MotionDeformableAttention: each query samples around every step of its trajectory.

    Queries are [bs, agents, modes, channels], values [keys, bs, channels], trajectories [bs, agents, modes, T, levels, 2] in
    metres from their agent. Each step of a query becomes a query of the operator.
    """
    query, steps = arguments["query"].flatten(1, 2), module.num_steps
    chosen = arguments["trajectories"][:, :, :, [module.sample_index]].detach().clone()
    metres = module.agent_coords_to_ego_coords(chosen, arguments["boxes"]).detach()
    low, high = (metres.new_tensor(module.bev_range[k : k + 2]) for k in (0, 3))
    reference = ((metres - low) / (high - low)).flatten(1, 2).expand(-1, -1, steps, -1, -1).flatten(1, 2)
    inputs = _make_inputs(module, {**arguments, "value": arguments["value"].transpose(0, 1)}, sides[0])
    offsets = module.sampling_offsets(query).unflatten(-1, (sides[0], steps, *sides[1:], 2)).transpose(2, 3).flatten(1, 2)
    logits = module.attention_weights(query).unflatten(-1, (sides[0], steps, -1)).transpose(2, 3).flatten(1, 2)
    return _sample(inputs, reference, offsets, logits).unflatten(1, (-1, steps)).flatten(2), logits, sides[1:]


_POINTS = frozenset(("num_points", "num_points_list"))
_CONFIGURED = frozenset(("decoder_n_points",))
_TRAJECTORIES = frozenset(("query", "value", "trajectories", "boxes"))
_COUNTED = frozenset(("num_points_list", "n_points_list", "num_points_scale", "n_points_scale", "offset_scale", "total_points"))
_DROPOUT = frozenset(("dropout",))
# Reference points must be boxes, of width 4. With width 2 these modules run only for shapes whose axes happen to broadcast.
_UNEVEN: dict[str, Any] = {
    "sample": _sample_unevenly,
    "mark": "num_points_list",
    "reads": _COUNTED,
    "references": ((1, 4),),
}
# The name that a user writes in patch(forms=...) -> the form. In the first six, each level has its own number of points.
ATTENTION_FORMS = {
    "rt_detr_v2_transformers": Attention(keeps=True, weights=True, **_UNEVEN),
    "d_fine_transformers": Attention(weights=True, uneven=_CONFIGURED, **_UNEVEN),
    "rt_detr_v2": Attention(keeps=True, uneven=_POINTS, **_UNEVEN),
    "birder": Attention(uneven=frozenset(("n_points",)), **_UNEVEN),
    "d_fine": Attention(uneven=_POINTS, layout=BY_LEVEL, **_UNEVEN),
    "libreyolo": Attention(uneven=_POINTS, layout=IMAGES, **_UNEVEN),
    "transformers": Attention(_sample_evenly, keeps=True, weights=True, mark="hidden_states"),
    "mask2former": Attention(_sample_evenly, weights=True, mark="with_pos_embed"),
    "mmcv": Attention(_sample_evenly, residual=True, reads=_DROPOUT, mark="dropout"),
    "bevformer_spatial": Attention(_sample_pillars, mark="num_Z_anchors", references=((2, 2),)),
    "bevformer_temporal": Attention(
        _sample_two_maps, residual=True, queue=2, reads=_DROPOUT | {"num_bev_queue"}, mark="num_bev_queue"
    ),
    "deformable_detr": Attention(_sample_evenly),
    "rt_detr": Attention(_sample_evenly, keeps=True),
    "uniad": Attention(
        _sample_trajectories,
        residual=True,
        reads=_DROPOUT | {"num_steps", "sample_index", "bev_range"},
        mark="num_steps",
        needs=_TRAJECTORIES,
    ),
}
