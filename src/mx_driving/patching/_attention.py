"""The forms in which libraries write an attention module around a sampling core, each over the operator with logits.

A module's linear layers are called as its own code calls them, so their hooks, adapters and quantised kinds go on working.
Softmax and the arithmetic of locations are left to the operator. What the module's own code returns is returned.

Several forms may fit one module's parameters: masks, for instance, say which keys count, or which do not. The form whose
trial agrees is taken.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _check
from ..nn._pyramid import heads_of
from ..ops.multi_scale_deformable_attn_with_logits import multi_scale_deformable_attn_with_logits
from ._callers import weights_may_be_watched
from ._forms import keys_last, levels, levels_by_points

ATTENTION = "attention module"
LAYERS = {"sampling_offsets", "attention_weights"}  # the linear layers that the code of every such forward names
Given = Mapping[str, Any]  # arguments of forward by name


def _always(module: Any, given: Given) -> bool:
    return True


@dataclass(frozen=True)
class Attention:
    """One way to write an attention module: what identifies it, its forward, and what its trial needs."""

    parameters: frozenset[str]  # forward has at least these
    attend: Callable[[Any, Given], Any]  # what forward returns
    serves: Callable[[Any, Given], bool] = _always  # whether `attend` can; the module's own forward does the rest
    references: tuple[tuple[int, int], ...] = ((2, 2), (2, 4), (1, 4))  # last sides of reference_points, for two levels
    config: Mapping[str, Any] = field(default_factory=dict)  # of the module that is tried
    queue: int = 1  # batches of value for each batch of queries
    masked: bool = True  # whether the trial gives a mask
    returns_weights: bool = False  # beside the output
    kind: str = ATTENTION

    def replacement(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """A forward with the original's parameters."""
        names = list(inspect.signature(original).parameters)[1:]

        @functools.wraps(original)
        def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
            if len(args) > len(names):
                return original(module, *args, **kwargs)  # which says so
            given = {**dict(zip(names[: len(args)], args, strict=True)), **kwargs}
            if not self.serves(module, given) or (self.returns_weights and weights_may_be_watched(module)):
                return original(module, *args, **kwargs)  # which calls its core
            return self.attend(module, given)

        return forward


def _can_be_read(t: Tensor) -> bool:
    """Whether the numbers of t are here now: on the CPU, outside all tracing."""
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() or torch._C._are_functorch_transforms_active():
        return False
    return type(t) is Tensor and t.device.type == "cpu"


def _heads(rows: Tensor, hidden: Tensor | None, heads: int) -> Tensor:
    """rows [bs, num_keys, channels] by heads, with zeros where `hidden` [bs, num_keys] is True.

    To see that a mask hides nothing takes a hundredth of the time of a copy of rows.
    """
    if hidden is not None and _can_be_read(hidden) and not hidden.any():
        hidden = None
    return heads_of(rows, hidden, heads)


def _tables(given: Given, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """spatial_shapes and level_start_index. Some libraries give the shapes as a list, some as a tensor, some as both."""
    shapes: Any = given.get("spatial_shapes")
    sizes, starts = given.get("spatial_shapes_list"), given.get("level_start_index")
    if sizes is not None:
        _check.rows_of_levels(sum(h * w for h, w in sizes), keys)
    elif _can_be_read(shapes):
        _check.rows_of_levels(int(shapes.prod(-1).sum()), keys)
    if shapes is None or starts is None:
        shapes, starts = levels(given["spatial_shapes_list"] if shapes is None else shapes, device)
    return shapes, starts


def _attend(
    value: Tensor, tables: tuple[Tensor, Tensor], reference: Tensor, offsets: Tensor, logits: Tensor, axis: str = "level"
) -> Tensor:
    """The operator. Libraries broadcast a reference to all batches or queries."""
    reference = reference.expand(*offsets.shape[:2], -1, -1)
    return multi_scale_deformable_attn_with_logits(value, *tables, reference, offsets, logits, axis)


def _placed(given: Given) -> Tensor:
    """transformers' queries with their embeddings of position."""
    query, position = given["hidden_states"], given.get("position_embeddings")
    return query if position is None else query + position


def _hugging_face(module: Any, given: Given, mask_keeps: bool) -> tuple[Tensor, Tensor]:
    """transformers' Deformable DETR and its descendants. The weights are always there: some callers pass them on unasked."""
    query, memory, mask = _placed(given), given["encoder_hidden_states"], given.get("attention_mask")
    hidden = ~mask if mask is not None and mask_keeps else mask
    value = _heads(module.value_proj(memory), hidden, module.n_heads)
    offsets = module.sampling_offsets(query).unflatten(-1, (module.n_heads, module.n_levels, module.n_points, 2))
    logits = module.attention_weights(query).unflatten(-1, (module.n_heads, -1))
    tables = _tables(given, memory.shape[1], memory.device)
    out = module.output_proj(_attend(value, tables, given["reference_points"], offsets, logits))
    return out, logits.softmax(-1).unflatten(-1, offsets.shape[3:5])


def _by_points(module: Any, given: Given, value: Tensor, counts: list[int]) -> tuple[Tensor, Tensor]:
    """The samples and weights of a module whose levels have `counts` points each, in boxes.

    A level with more points than another is listed several times. The operator divides a box by twice the points of one such
    entry; these modules divide it by the level's own number of points, and multiply by offset_scale.
    """
    query = _placed(given)
    points, order = math.gcd(*counts), levels_by_points(counts)
    shapes, starts = _tables(given, value.shape[1], value.device)
    offsets = module.sampling_offsets(query).unflatten(-1, (module.n_heads, len(order), points, 2))
    scales = [2 * points / counts[level] * module.offset_scale for level in order]
    if any(scale != 1 for scale in scales):
        offsets = offsets * torch.tensor(scales, dtype=offsets.dtype, device=offsets.device)[:, None, None]
    logits = module.attention_weights(query).unflatten(-1, (module.n_heads, -1))
    out = _attend(value, (shapes[order], starts[order]), given["reference_points"], offsets, logits)
    return out, logits.softmax(-1)


def _rt_detr_v2(module: Any, given: Given) -> tuple[Tensor, Tensor]:
    mask = given.get("attention_mask")
    value = _heads(module.value_proj(given["encoder_hidden_states"]), None if mask is None else ~mask, module.n_heads)
    out, weights = _by_points(module, given, value, list(module.n_points_list))
    return module.output_proj(out), weights


def _d_fine(module: Any, given: Given) -> tuple[Tensor, Tensor]:
    """D-FINE, DEIMv2: no projection before the samples, and none behind."""
    value = keys_last(_heads(given["encoder_hidden_states"], None, module.n_heads))
    return _by_points(module, given, value, list(module.num_points_list))


def _one_box(module: Any, given: Given) -> bool:
    """Method "discrete" reads whole pixels. With points (x, y) these modules work for few shapes, and by broadcasting."""
    method = module.method if hasattr(module, "method") else module.decoder_method
    return method == "default" and tuple(given["reference_points"].shape[2:]) == (1, 4)


def _one_box_unmasked(module: Any, given: Given) -> bool:
    """D-FINE's mask does not fit its own value, which has an axis more."""
    return _one_box(module, given) and given.get("attention_mask") is None


def _mmcv_inputs(module: Any, given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Queries with their embedding and values, batches first, and what is added to the output."""
    query = given["query"]
    value = query if given.get("value") is None else given["value"]
    identity = query if given.get("identity") is None else given["identity"]
    if given.get("query_pos") is not None:
        query = query + given["query_pos"]
    if not module.batch_first:
        query, value = query.transpose(0, 1), value.transpose(0, 1)
    return query, value, identity


def _mmcv_samples(module: Any, given: Given, query: Tensor, value: Tensor, axis: str = "level") -> Tensor:
    rows = _heads(module.value_proj(value), given.get("key_padding_mask"), module.num_heads)
    offsets = module.sampling_offsets(query).unflatten(-1, (module.num_heads, module.num_levels, module.num_points, 2))
    logits = module.attention_weights(query).unflatten(-1, (module.num_heads, -1))
    return _attend(rows, _tables(given, value.shape[1], value.device), given["reference_points"], offsets, logits, axis)


def _mmcv(module: Any, given: Given) -> Tensor:
    query, value, identity = _mmcv_inputs(module, given)
    out = module.output_proj(_mmcv_samples(module, given, query, value))
    return module.dropout(out if module.batch_first else out.transpose(0, 1)) + identity


def _pillars(module: Any, given: Given) -> Tensor:
    """BEVFormer's MSDeformableAttention3D: a reference for each height of a pillar, and no projection behind."""
    query, value, _ = _mmcv_inputs(module, given)
    out = _mmcv_samples(module, given, query, value, "point")
    return out if module.batch_first else out.transpose(0, 1)


def _temporal(module: Any, given: Given) -> Tensor:
    """BEVFormer's TemporalSelfAttention: queries look at two maps, an earlier one and their own. The output is the mean."""
    queue = module.num_bev_queue
    if given.get("value") is None:
        given = {**given, "value": given["query"].repeat_interleave(queue, 0)}
    query, value, identity = _mmcv_inputs(module, given)
    batches, sides = query.shape[0], (module.num_heads, queue)
    both = torch.cat([value[:batches], query], -1)
    rows = _heads(module.value_proj(value), given.get("key_padding_mask"), module.num_heads)
    offsets = module.sampling_offsets(both).unflatten(-1, (*sides, module.num_levels, module.num_points, 2))
    logits = module.attention_weights(both).unflatten(-1, (*sides, -1))
    tables = _tables(given, value.shape[1], value.device)
    by_map = (t.movedim(3, 1).flatten(0, 1) for t in (offsets, logits))
    out = _attend(rows, tables, given["reference_points"], *by_map).unflatten(0, (batches, queue)).mean(1)
    out = module.output_proj(out)
    return module.dropout(out if module.batch_first else out.transpose(0, 1)) + identity


def _known_names(module: Any, given: Given) -> bool:
    return "residual" not in given  # mmcv's former name of identity, which a decorator of its forward translates


def _deformable_detr(module: Any, given: Given) -> Tensor:
    """MSDeformAttn of the paper's repository."""
    query, memory = given["query"], given["input_flatten"]
    value = _heads(module.value_proj(memory), given.get("input_padding_mask"), module.n_heads)
    offsets = module.sampling_offsets(query).unflatten(-1, (module.n_heads, module.n_levels, module.n_points, 2))
    logits = module.attention_weights(query).unflatten(-1, (module.n_heads, -1))
    named = {"spatial_shapes": given["input_spatial_shapes"], "level_start_index": given["input_level_start_index"]}
    tables = _tables(named, memory.shape[1], memory.device)
    return module.output_proj(_attend(value, tables, given["reference_points"], offsets, logits))


_HUGGING_FACE = frozenset({"hidden_states", "attention_mask", "encoder_hidden_states", "reference_points"})
_MMCV = frozenset({"query", "value", "identity", "query_pos", "key_padding_mask", "reference_points", "spatial_shapes"})
_PAPER = frozenset({"query", "reference_points", "input_flatten", "input_spatial_shapes", "input_level_start_index"})
ATTENTION_FORMS = (
    Attention(_HUGGING_FACE, functools.partial(_hugging_face, mask_keeps=True), returns_weights=True),
    Attention(_HUGGING_FACE, functools.partial(_hugging_face, mask_keeps=False), returns_weights=True),
    Attention(_HUGGING_FACE, _rt_detr_v2, _one_box, ((1, 4),), returns_weights=True),
    Attention(
        _HUGGING_FACE,
        _d_fine,
        _one_box_unmasked,
        ((1, 4),),
        {"decoder_n_points": [2, 4]},
        masked=False,
        returns_weights=True,
    ),
    Attention(_MMCV, _mmcv, _known_names),
    Attention(_MMCV, _pillars, _known_names, ((2, 2),)),
    Attention(_MMCV, _temporal, _known_names, ((2, 2), (2, 4)), queue=2),
    Attention(_PAPER, _deformable_detr),
)
