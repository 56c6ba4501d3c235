"""The forms of functions that sum points into cells, as BEVDet, BEVFusion and BEVDepth write them, over bev_pool_v3.

They are tried after the autograd functions that they call, on points of which some lie outside.
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

from ..ops._stand_ins import sum_inside, sum_runs
from ..ops.bev_pool_v2 import bev_pool_v2
from ..ops.voxel_pooling_train import npu_voxel_pooling_train
from ._forms import FUNCTION, Arguments, ExactForm, is_table
from ._parameters import Parameters

_FEATURES = {"depth", "feat", "feats", "x", "input_features"}


@dataclass(frozen=True)
class Pool(ExactForm):
    """A function of these parameters that sums points into cells, and ours of the same arguments."""

    parameters: tuple[str, ...]
    run: Callable[..., Any]
    called: str  # a pattern of its name
    example: Callable[[], tuple[Any, ...]]  # makes the arguments of a trial
    tried: Any = None
    kind = FUNCTION

    def fits(self, name: str, kind: str, parameters: Parameters) -> bool:
        return re.search(self.called, name) is not None and super().fits(name, kind, parameters)

    def serves(self, module: Any, arguments: Arguments) -> bool:
        """Return whether operators take the call. They refuse coordinates that are not whole numbers, and features that are."""
        tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
        if "coords" in tensors and len(tensors["coords"]) != len(tensors["feats"]):
            return False
        return all(t.is_floating_point() if name in _FEATURES else is_table(t) for name, t in tensors.items())

    def answer(self, module: Any, arguments: Arguments) -> Any:
        return self.run(*arguments.values())


def _pool_bevdet(depth: Tensor, feat: Tensor, *ranks_shape_and_intervals: Any) -> Tensor:
    """Sum in float32, whatever the dtypes."""
    return bev_pool_v2(depth, feat.float(), *ranks_shape_and_intervals)


def _pool_alike(depth: Tensor, feat: Tensor, *ranks_shape_and_intervals: Any) -> Tensor:
    """Sum as forks in plain torch: the dtype of the products is that of the result."""
    return bev_pool_v2(depth, feat.to(torch.promote_types(depth.dtype, feat.dtype)), *ranks_shape_and_intervals)


def _pool_sorted(x: Tensor, geom_feats: Tensor, ranks: Tensor, *sizes: Any) -> Tensor:
    return sum_inside(x, geom_feats, *sizes).permute(0, 2, 3, 4, 1)


def make_lifted() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    depth, feat = (torch.rand(*sides, generator=generator).double() - 0.5 for sides in ((1, 2, 3, 2, 2), (1, 2, 2, 2, 3)))
    depth_ranks = torch.randperm(24, generator=generator)[:20]
    cells = torch.randint(12, (20,), generator=generator).sort().values
    lengths = torch.unique_consecutive(cells, return_counts=True)[1]
    ranks = (depth_ranks, depth_ranks // 12 * 4 + depth_ranks % 4, cells, (1, 1, 3, 4, 3), lengths.cumsum(0) - lengths, lengths)
    return depth, feat, *(r.int() if isinstance(r, Tensor) else r for r in ranks)


def make_rows() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    coords = torch.stack([torch.randint(size, (30,), generator=generator) for size in (3, 4, 2, 2)], 1)
    return torch.rand(30, 3, generator=generator) - 0.5, coords, 2, 2, 3, 4


def make_frustum() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    geometry = torch.randint(-1, 5, (2, 40, 3), generator=generator).int()
    return geometry, torch.rand(2, 40, 3, generator=generator) - 0.5, torch.tensor([4, 3, 2])


def make_image() -> tuple[Any, ...]:
    """Return a frustum of 2 cameras, 3 depths and 2 x 2 pixels of a batch."""
    geometry, features, sizes = make_frustum()
    depth, context = (features.flatten()[first : first + 24].view(2, 3, 2, 2) for first in (0, 24))
    return geometry[:1, :24].view(1, 2, 3, 2, 2, 3), depth, context, sizes


def make_sorted_rows() -> tuple[Any, ...]:
    feats, coords, *sizes = make_rows()
    ranks = coords @ torch.tensor([16, 4, 2, 1])
    order = ranks.argsort()
    return feats[order], coords[order], ranks[order], *sizes


def make_runs() -> tuple[Any, ...]:
    return make_sorted_rows()[:3]


def make_sorted_xyzb() -> tuple[Any, ...]:
    """Return sorted rows whose innermost axis is x, as FlashOCC has them."""
    feats, coords, *others = make_sorted_rows()
    return feats, coords[:, [1, 0, 2, 3]], *others, "sum"


_BEVDET = (
    *("depth", "feat", "ranks_depth", "ranks_feat", "ranks_bev"),
    *("bev_feat_shape", "interval_starts", "interval_lengths"),
)
_SIZES = ("B", "D", "H", "W")
_FUNCTIONS = (
    Pool(_BEVDET, _pool_bevdet, "bev_pool", make_lifted),
    Pool(_BEVDET, _pool_alike, "bev_pool", make_lifted),
    Pool(("feats", "coords", *_SIZES), sum_inside, "bev_pool", make_rows),
    Pool(("feats", "coords", "ranks", *_SIZES), _pool_sorted, "(?i)cumsum", make_sorted_rows),
    Pool(("x", "geom_feats", "ranks"), sum_runs, "(?i)cumsum", make_runs),
    Pool(("geom_xyz", "input_features", "voxel_num"), npu_voxel_pooling_train, "voxel_pooling", make_frustum),
)
POOLS = (
    *_FUNCTIONS,
    *(replace(form, run=torch.no_grad()(form.run)) for form in _FUNCTIONS),  # MapTR's have no gradient
)


def looks_like_one(name: str) -> bool:
    """Return whether something is called like a function that sums points into cells."""
    return re.search("(?i)bev_?pool|voxel_?pool|quick_?cumsum", name) is not None


def calls_compiled(function: Any, seen: tuple[Any, ...] = ()) -> bool:
    """Return whether a function, or a function of its module that it calls, calls a compiled file or our stand-in for it."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return False
    things = [function.__globals__.get(name) for name in function.__code__.co_names]
    loaders = [getattr(getattr(m, "__spec__", None), "loader", None) for m in things if isinstance(m, types.ModuleType)]
    if any(isinstance(loader, importlib.machinery.ExtensionFileLoader) or _is_ours(type(loader)) for loader in loaders):
        return True
    if any(isinstance(thing, types.BuiltinFunctionType) or _is_ours(thing) for thing in things):
        return True
    things += [k.forward for k in things if isinstance(k, type) and issubclass(k, torch.autograd.Function)]
    own = [thing for thing in things if getattr(thing, "__globals__", None) is function.__globals__]
    return any(calls_compiled(thing, (*seen, function)) for thing in own)


def _is_ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
