"""The forms of functions that sum points into cells, as BEVDet, BEVFusion and BEVDepth write them, over bev_pool_v3.

The autograd functions over their extensions are taken by their parameters, untried: a compiled file of CUDA's that is given
memory of a CPU may end the process. The functions around them are tried after them, on points of which some lie outside.
"""

from __future__ import annotations

import importlib.machinery
import re
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._operator.rules import INDEX, INDEX_RULE, need_dtype, need_some_sizes
from ..ops._pooling import cells, lifted_points
from ..ops.bev_pool_v2 import bev_pool_v2
from ..ops.bev_pool_v3 import bev_pool_v3
from ..ops.voxel_pooling_train import npu_voxel_pooling_train
from ._forms import AUTOGRAD, FUNCTION, Arguments, Exact, is_table

_FEATURES = {"depth", "feat", "feats", "x", "input_features", "depth_features", "context_features"}


@dataclass(frozen=True)
class Pool(Exact):
    """A function that sums points into cells. `example` makes arguments for its trial."""

    example: Callable[[], tuple[Any, ...]] = tuple

    def serves(self, module: Any, arguments: Arguments) -> bool:
        """Return whether operators take the call. They refuse places that are not whole numbers, and features that are."""
        tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
        if "coords" in tensors and len(tensors["coords"]) != len(tensors["feats"]):
            return False
        return all(t.is_floating_point() if name in _FEATURES else is_table(t) for name, t in tensors.items())


def _bevdet(depth: Tensor, feat: Tensor, *ranks_shape_and_intervals: Any) -> Tensor:
    """Sum in float32, whatever the dtypes."""
    return bev_pool_v2(depth, feat.float(), *ranks_shape_and_intervals)


def _bevfusion(feats: Tensor, coords: Tensor, B: Any, D: Any, H: Any, W: Any) -> Tensor:
    """Leave out points outside: the extension writes them anywhere, and models drop them before."""
    need_dtype("coords", coords, INDEX, INDEX_RULE)
    need_some_sizes("feats", feats, "n, C", coords.shape[0], None)
    sizes = [int(size) for size in (B, D, H, W)]
    cell = cells(coords, *sizes)
    (points,) = (cell + 1).nonzero(as_tuple=True)
    one = feats.new_ones(1)
    return bev_pool_v3(one, feats, torch.zeros_like(points), points, cell[points], (*sizes, feats.shape[-1]))


def _sorted(x: Tensor, geom_feats: Tensor, ranks: Tensor, *sizes: Any) -> Tensor:
    return _bevfusion(x, geom_feats, *sizes)


def _bevdepth_in_inference(geom_xyz: Tensor, depth: Tensor, context: Tensor, voxel_num: Tensor) -> Tensor:
    """Lift context [B * cams, C, H, W] by depth [B * cams, D, H, W], to [B, C, Y, X]."""
    sizes = [int(size) for size in voxel_num]
    shape = (geom_xyz.shape[0], 1, sizes[1], sizes[0], context.shape[1])
    return bev_pool_v3(depth, context.permute(0, 2, 3, 1), *lifted_points(geom_xyz, sizes), shape).squeeze(2)


def _channels_last(pool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args: pool(*args).permute(0, 2, 3, 4, 1)


def _lifted() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    depth, feat = torch.rand(1, 2, 3, 2, 2, generator=generator), torch.rand(1, 2, 2, 2, 3, generator=generator) - 0.5
    of_depth = torch.randperm(24, generator=generator)[:20]
    of_cell = torch.randint(12, (20,), generator=generator).sort().values
    lengths = torch.unique_consecutive(of_cell, return_counts=True)[1]
    ranks = (of_depth, of_depth // 12 * 4 + of_depth % 4, of_cell, (1, 1, 3, 4, 3), lengths.cumsum(0) - lengths, lengths)
    return depth, feat, *(r.int() if isinstance(r, Tensor) else r for r in ranks)


def _rows() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randint(most, (30,), generator=generator) for most in (3, 4, 2, 2)], 1)
    return torch.rand(30, 3, generator=generator) - 0.5, places, 2, 2, 3, 4


def _frustum() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    geometry = torch.randint(-1, 5, (2, 40, 3), generator=generator).int()
    return geometry, torch.rand(2, 40, 3, generator=generator) - 0.5, torch.tensor([4, 3, 2])


def _sorted_rows() -> tuple[Any, ...]:
    feats, places, *sizes = _rows()
    ranks = places @ torch.tensor([16, 4, 2, 1])
    order = ranks.argsort()
    return feats[order], places[order], ranks[order], *sizes


_BEVDET = (
    *("depth", "feat", "ranks_depth", "ranks_feat", "ranks_bev"),
    *("bev_feat_shape", "interval_starts", "interval_lengths"),
)
_SIZES = ("B", "D", "H", "W")
_VOXEL = ("geom_xyz", "input_features", "voxel_num")
_LIFTED = ("geom_xyz", "depth_features", "context_features", "voxel_num")
_CLASSES = "(?i)cumsum|pool"
_FUNCTIONS = (
    Pool(FUNCTION, _BEVDET, _bevdet, "bev_pool", example=_lifted),
    Pool(FUNCTION, ("feats", "coords", *_SIZES), _bevfusion, "bev_pool", example=_rows),
    Pool(FUNCTION, ("feats", "coords", "ranks", *_SIZES), _channels_last(_sorted), "(?i)cumsum", example=_sorted_rows),
    Pool(FUNCTION, _VOXEL, npu_voxel_pooling_train, "voxel_pooling", example=_frustum),
)
POOLS = (
    *_FUNCTIONS,
    *(replace(form, run=torch.no_grad()(form.run)) for form in _FUNCTIONS),  # MapTR's have no gradient
    Pool(AUTOGRAD, _BEVDET, _channels_last(_bevdet), _CLASSES),
    Pool(AUTOGRAD, ("x", "geom_feats", "ranks", *_SIZES), _channels_last(_sorted), _CLASSES),
    Pool(AUTOGRAD, _VOXEL, npu_voxel_pooling_train, _CLASSES),
    Pool(AUTOGRAD, _LIFTED, _bevdepth_in_inference, _CLASSES),
)


def looks_like_one(name: str) -> bool:
    """Return whether something is called like a function that sums points into cells."""
    return re.search("(?i)bev_?pool|voxel_?pool|quick_?cumsum", name) is not None


def calls_compiled(function: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Return whether a function, or one of its module that it calls, calls a compiled file."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    used = [function.__globals__.get(name) for name in function.__code__.co_names]
    loaders = [getattr(getattr(one, "__spec__", None), "loader", None) for one in used if isinstance(one, types.ModuleType)]
    if any(isinstance(one, importlib.machinery.ExtensionFileLoader) for one in loaders):
        return True
    if any(isinstance(one, types.BuiltinFunctionType) for one in used):
        return True
    classes = [one.forward for one in used if isinstance(one, type) and issubclass(one, torch.autograd.Function)]
    own = [one for one in (*used, *classes) if getattr(one, "__globals__", None) is function.__globals__]
    return any(calls_compiled(one, (*seen, function)) for one in own)
