"""Calls of the functions that sum points into cells, as calls of bev_pool_v3: each has parameters of its own."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._cli_support.problems import Problem
from ..ops._pooling import inputs_of, points_inside
from ..ops.bev_pool_v2 import _points_of_intervals
from . import _schema

Given = dict[str, Any]  # tensors and sizes by name
_LAST = ("BEVPoolV3.apply", "_forward", "_backward", "_backward_opt", "_wrapper")  # ends of functions with channels last


def _lifted(given: Given, shape: Sequence[int] | None = None) -> list[Any]:
    sizes = given["bev_feat_shape"] if shape is None else tuple(shape)
    ranks_depth, ranks_feat, ranks_bev = (given.get(f"ranks_{name}") for name in ("depth", "feat", "bev"))
    return inputs_of(given.get("depth"), given.get("feat"), ranks_depth, ranks_feat, ranks_bev, sizes)


def _by_interval(given: Given, shape: Sequence[int] | None = None) -> list[Any]:
    lengths = given["interval_lengths"]
    if int(lengths.clamp_min(0).double().sum()) > _schema.NUMBERS // 16:
        raise Problem(f"interval_lengths must have a sum of at most {_schema.NUMBERS // 16}; got {int(lengths.sum())}")
    points, cells = _points_of_intervals(given["ranks_bev"], given["interval_starts"].long(), lengths.long())
    ranks = {name: given[name][points] for name in ("ranks_depth", "ranks_feat")}
    return _lifted({**given, **ranks, "ranks_bev": cells}, shape)


def _rows(given: Given) -> list[Any]:
    places, sizes = given["geom_feat"], [int(given[name]) for name in "BDHW"]
    channels = given["grad_output" if "feat" not in given else "feat"].shape[-1]
    feat = given.get("feat", torch.zeros(()).expand(len(places), channels))  # the gradient of feat does not need it
    return inputs_of(None, feat, None, None, places, (*sizes, channels))


def _frustum(given: Given) -> list[Any]:
    feat, sizes = given["feat"], given["voxel_num"] if "voxel_num" in given else [given[name] for name in "XYZ"]
    x, y, z = (int(size) for size in sizes)
    geometry = given["geom_xyz"].reshape(len(feat), -1, 3)
    points, cells = points_inside(geometry, (x, y, z))
    one, shape = torch.ones(1, dtype=feat.dtype), (len(geometry), 1, y, x, feat.shape[-1])
    return inputs_of(one, feat, torch.zeros_like(points), points, cells, shape)


def _rays(given: Given) -> list[Any]:
    x, y, z, bins, height, width = (int(given[name]) for name in ("X", "Y", "Z", "bins", "height", "width"))
    geometry, feat = given["geom_xyz"], given["feat"].movedim(1, -1)
    points, cells = points_inside(geometry, (x, y, z))
    rows = points // (bins * height * width) * (height * width) + points % (height * width)
    return inputs_of(given["depth"], feat, points, rows, cells, (len(geometry), 1, y, x, feat.shape[-1]))


_FORMS: dict[str, Callable[[Given], list[Any]]] = {
    "bev_pool_v3": _lifted,
    "BEVPoolV3.apply": _lifted,
    "bev_pool_v2": _by_interval,
    "bev_pool": _rows,
    "npu_voxel_pooling_train": _frustum,
    "bev_pool_v2_forward": lambda given: _by_interval(given, given["output"].shape),
    **dict.fromkeys(("bev_pool_v2_backward", "bev_pool_v2_backward_opt"), lambda g: _lifted(g, g["grad_output"].shape)),
    "bev_pool_forward": _rows,
    "bev_pool_backward": _rows,
    **dict.fromkeys(("voxel_pooling_train_forward_wrapper", "voxel_pooling_forward_wrapper"), _frustum),
    "voxel_pooling_inference_forward_wrapper": _rays,
}


def inputs(name: str, about: Given, tensors: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """What the operator is given, and its sizes as a tensor."""
    form = about.get("form", "bev_pool_v3")
    if form not in _FORMS:
        raise Problem(f"the form of {name} must be one of {', '.join(_FORMS)}; got {form}")
    given = {**about.get("sizes", {}), **tensors}
    try:
        *found, bs, d, h, w = _FORMS[form](given)
    except KeyError as error:
        raise Problem(f"{name} must hold {error.args[0]}; got {_schema.shown(', '.join(sorted(given)) or 'nothing')}") from None
    output = (bs, d, h, w, found[0].shape[1])
    if (elements := math.prod(max(1, size) for size in output)) > _schema.NUMBERS:
        raise Problem(f"{name} must have at most {_schema.NUMBERS} numbers in its output; got {elements}")
    return (*found, torch.tensor((bs, d, h, w)))


def shaped(about: Given, result: str, t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A result, or its cotangent, in the operator's shape, if it has as many entries."""
    form = about.get("form", "bev_pool_v3")
    if t.dim() and result in ("output", "grad_output") and form.endswith(_LAST):
        t = t.movedim(-1, 1)
    if t.dim() > 1 and result == "grad_feat":
        t = t.movedim(1, -1) if _FORMS[form] is _rays else t
        t = t.flatten()[: math.prod(shape)]  # without depth there may be rows that are no point's
    return t.reshape(shape) if t.numel() == math.prod(shape) else t


def terms(feat: Tensor, depth: Tensor, *ranks_and_sizes: Tensor) -> dict[str, int]:
    """How many terms the longest sum of each result has."""
    of_feat, of_depth, of_cell = (int(t.bincount().max()) if t.numel() else 0 for t in ranks_and_sizes[:3])
    return {"output": of_cell, "grad_feat": of_feat, "grad_depth": of_depth * feat.shape[1]}


def described(feat: Tensor, depth: Tensor, *ranks_and_sizes: Tensor) -> list[str]:
    """Points and cells, in a few words."""
    cell, sizes = ranks_and_sizes[2:]
    order = "sorted" if bool((cell.diff() >= 0).all()) else "not sorted"
    return [f"{len(cell)} points, {order} by cell", f"cells {' x '.join(map(str, sizes.tolist()))}"]
