"""Forms of pools: functions that sum points into cells, as in BEVDet, BEVFusion and BEVDepth. bev_pool_v3 answers their calls.

`patch` first replaces the autograd function that a pool calls, and then tries the pool. Some points of the examples lie outside
the grid.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .._foreign.stand_ins import sum_inside, sum_runs
from ..ops.bev_pool_v2 import bev_pool_v2
from ..ops.voxel_pooling_train import npu_voxel_pooling_train
from ._forms import FUNCTION, Arguments, ExactForm, is_table
from ._parameters import Parameters

_FEATURES = {"depth", "feat", "feats", "x", "input_features"}


@dataclass(frozen=True)
class Pool(ExactForm):
    """A function of another library that sums points into cells, and our function, `run`, that takes the same arguments."""

    parameters: tuple[str, ...]
    run: Callable[..., Any]
    pattern: str  # regular expression that the other function's name must match
    example: Callable[[], tuple[Any, ...]]  # makes the arguments of a trial
    single: bool = False  # whether the other function sums in float32, whatever the dtypes of its inputs
    kind = FUNCTION

    def fits(self, name: str, kind: str, parameters: Parameters) -> bool:
        return re.search(self.pattern, name) is not None and super().fits(name, kind, parameters)

    def answer(self, module: Any, arguments: dict[str, Any]) -> Tensor | None:
        # The operators need coordinates for each row of features.
        if not have_pool_dtypes(arguments) or ("coords" in arguments and len(arguments["coords"]) != len(arguments["feats"])):
            return None
        output = self.run(*arguments.values())
        if self.single:
            return output
        features = [t.dtype for name, t in arguments.items() if name in _FEATURES]
        return output.to(functools.reduce(torch.promote_types, features))  # Under autocast, plain torch's sum has this dtype.


def have_pool_dtypes(arguments: Arguments) -> bool:
    """Return whether features have a floating dtype, and all other tensors int32 or int64."""
    tensors = {name: t for name, t in arguments.items() if isinstance(t, Tensor)}
    return all(t.is_floating_point() if name in _FEATURES else is_table(t) for name, t in tensors.items())


def _pool_bevdet(depth: Tensor, feat: Tensor, *ranks_shape_and_intervals: Any) -> Tensor:
    """Sum in float32, whatever the dtypes of depth and feat."""
    return bev_pool_v2(depth, feat.float(), *ranks_shape_and_intervals)


def _pool_alike(depth: Tensor, feat: Tensor, *ranks_shape_and_intervals: Any) -> Tensor:
    """Sum as BEVDet's forks in plain torch do: the result has the dtype of depth * feat."""
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
    return torch.rand(30, 3, generator=generator).double() - 0.5, coords, 2, 2, 3, 4


def make_frustum() -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(0)
    geometry = torch.randint(-1, 5, (2, 40, 3), generator=generator).int()
    return geometry, torch.rand(2, 40, 3, generator=generator).double() - 0.5, torch.tensor([4, 3, 2])


def make_image() -> tuple[Any, ...]:
    """Return a batch of one frustum: 2 cameras, 3 depths and 2 x 2 pixels."""
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
_FUNCTIONS = {
    "bevdet": Pool(_BEVDET, _pool_bevdet, "bev_pool", make_lifted, single=True),
    "bevdet_plain": Pool(_BEVDET, _pool_alike, "bev_pool", make_lifted),
    "bev_pool": Pool(("feats", "coords", *_SIZES), sum_inside, "bev_pool", make_rows),
    "cumsum": Pool(("feats", "coords", "ranks", *_SIZES), _pool_sorted, "(?i)cumsum", make_sorted_rows),
    "lift_splat": Pool(("x", "geom_feats", "ranks"), sum_runs, "(?i)cumsum", make_runs, single=True),
    "voxel_pooling": Pool(("geom_xyz", "input_features", "voxel_num"), npu_voxel_pooling_train, "voxel_pooling", make_frustum),
}
POOLS = {
    **_FUNCTIONS,
    # The same functions without a gradient, as in MapTR.
    **{f"{name}_no_grad": replace(form, run=torch.no_grad()(form.run)) for name, form in _FUNCTIONS.items()},
}


def looks_like_a_pool(name: str) -> bool:
    """Return whether the name looks like a pool's: bev_pool, voxel_pooling, QuickCumsum, VoxelsSumming."""
    return re.search("(?i)bev_?pool|voxel_?pool|cumsum|voxels_?sum", name) is not None
