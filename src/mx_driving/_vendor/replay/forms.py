"""Turns calls of the vendor's and the extensions' functions into calls of the operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._cli_support.problems import Problem
from ..._operator import geometry
from ..._operator.description import AGGREGATION, OPERATORS, POOL, Operator, SamplingInputs
from ...ops import _other_shapes, _pooling
from ...ops.bev_pool_v2 import _points_of_intervals

Facts = dict[str, Any]  # tensors and sizes by name
_CHANNELS_LAST = ("BEVPoolV3.apply", "_forward", "_backward", "_backward_opt", "_wrapper")  # ends of functions' names


def inputs_of(name: str, about: Facts, tensors: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the operator's input tensors and its sizes."""
    facts, form = {**about.get("sizes", {}), **tensors}, about.get("form", POOL)
    is_sampling = OPERATORS[about["operator"]].kind != "pooling"
    if not is_sampling and form not in _FORMS:
        raise Problem(f"the form of {name} must be one of {', '.join(_FORMS)}; got {form}")
    try:
        inputs = _sampling(about, facts) if is_sampling else _FORMS[form](facts)
    except KeyError as error:
        raise Problem(f"{name} must hold {error.args[0]}; got {', '.join(sorted(facts)) or 'nothing'}") from None
    return tuple(inputs[:5]), tuple(inputs[5:])


def output_shape(row: Operator, inputs: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, ...]:
    if row.kind == "pooling":
        return (sizes[0], inputs[0].shape[1], *sizes[1:])
    return (inputs[0].shape[0], inputs[3].shape[1], math.prod(inputs[0].shape[2:]))


def in_operators_shape(about: Facts, result: str, t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a result in the shape that the operator gives it, if it has as many entries."""
    form = about.get("form", "")
    if about["operator"] == POOL:
        if t.dim() and result in ("output", "grad_output") and form.endswith(_CHANNELS_LAST):
            t = t.movedim(-1, 1)
        if t.dim() > 1 and result == "grad_feat":
            t = t.movedim(1, -1) if form == _RAYS else t
            t = t.flatten()[: math.prod(shape)]  # without depth there may be more rows than points
    return t.reshape(shape) if t.numel() == math.prod(shape) else t


def _sampling(about: Facts, facts: Facts) -> tuple[Tensor, ...]:
    if about.get("packed"):
        facts["starts"] = geometry.starts_of(facts["shapes"])
    inputs = [facts[name] for name in SamplingInputs._fields]
    inputs[1:3] = (t if t.dtype in (torch.int32, torch.int64) else t.long() for t in inputs[1:3])
    is_aggregation = about["operator"] == AGGREGATION
    return (_other_shapes.aggregation_inputs if is_aggregation else _other_shapes.attention_inputs)(*inputs)


def _lift(facts: Facts, shape: Sequence[int] | None = None) -> list[Any]:
    ranks_depth, ranks_feat, ranks_bev = (facts.get(f"ranks_{name}") for name in ("depth", "feat", "bev"))
    sizes = facts["bev_feat_shape"] if shape is None else tuple(shape)
    return _pooling.inputs_of(facts.get("depth"), facts.get("feat"), ranks_depth, ranks_feat, ranks_bev, sizes)


def _lift_by_interval(facts: Facts, shape: Sequence[int] | None = None) -> list[Any]:
    starts, lengths = facts["interval_starts"].long(), facts["interval_lengths"].long()
    points, cells = _points_of_intervals(facts["ranks_bev"], starts, lengths)
    ranks = {name: facts[name][points] for name in ("ranks_depth", "ranks_feat")}
    return _lift({**facts, **ranks, "ranks_bev": cells}, shape)


def _rows(facts: Facts) -> list[Any]:
    places, sizes = facts["geom_feat"], [int(facts[name]) for name in "BDHW"]
    channels = facts["grad_output" if "feat" not in facts else "feat"].shape[-1]
    feat = facts.get("feat", torch.zeros(()).expand(len(places), channels))  # the gradient of feat does not need feat
    return _pooling.inputs_of(None, feat, None, None, places, (*sizes, channels))


def _frustum(facts: Facts) -> list[Any]:
    feat = facts["feat"]
    x, y, z = (int(size) for size in (facts["voxel_num"] if "voxel_num" in facts else [facts[name] for name in "XYZ"]))
    geometry = facts["geom_xyz"].reshape(len(feat), -1, 3)
    points, cells = _pooling.points_inside(geometry, (x, y, z))
    one, shape = torch.ones(1, dtype=feat.dtype), (len(geometry), 1, y, x, feat.shape[-1])
    return _pooling.inputs_of(one, feat, torch.zeros_like(points), points, cells, shape)


def _rays(facts: Facts) -> list[Any]:
    x, y, z = (int(facts[name]) for name in "XYZ")
    batches, *sizes = (int(facts[name]) for name in ("B", "cams", "bins", "height", "width"))
    ranks = _pooling.lifted_points(facts["geom_xyz"].reshape(batches, *sizes, 3), (x, y, z))
    feat = facts["feat"].movedim(1, -1)
    return _pooling.inputs_of(facts["depth"], feat, *ranks, (batches, 1, y, x, feat.shape[-1]))


_RAYS = "voxel_pooling_inference_forward_wrapper"
_FORMS: dict[str, Callable[[Facts], list[Any]]] = {
    **dict.fromkeys(("bev_pool_v3", "BEVPoolV3.apply"), _lift),
    "bev_pool_v2": _lift_by_interval,
    "bev_pool_v2_forward": lambda facts: _lift_by_interval(facts, facts["output"].shape),
    **dict.fromkeys(("bev_pool_v2_backward", "bev_pool_v2_backward_opt"), lambda f: _lift(f, f["grad_output"].shape)),
    **dict.fromkeys(("bev_pool", "bev_pool_forward", "bev_pool_backward"), _rows),
    "npu_voxel_pooling_train": _frustum,
    **dict.fromkeys(("voxel_pooling_train_forward_wrapper", "voxel_pooling_forward_wrapper"), _frustum),
    _RAYS: _rays,
}
