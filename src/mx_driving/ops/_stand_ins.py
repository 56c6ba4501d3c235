"""Functions that replace compiled extensions and their autograd functions. An adaptor converts every layout of arguments of
the table of foreign functions."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.functions import as_compiled, backward_as_compiled
from .._foreign_functions import DIFFERENTIABLE, KEYWORDS, AutogradFunction, Function, insert_starts
from .._operator.description import POOL
from .._operator.rules import INDEX, INDEX_RULE, fail, need_axes, need_dtype, need_one_device, need_shape, tensors
from . import _extension, _pooling
from ._arguments import explain_arguments
from ._other_shapes import sampling_inputs
from .bev_pool_v2 import bev_pool_v2
from .bev_pool_v3 import bev_pool_v3
from .geometric_kernel_attention import geometric_kernel_attention
from .multi_scale_deformable_attn import multi_scale_deformable_attn
from .npu_deformable_aggregation import deformable_aggregation
from .voxel_pooling_train import npu_voxel_pooling_train

Facts = dict[str, Any]  # arguments by our names
FORWARDS = {
    operator: as_compiled(public)
    for operator, public in (
        ("multi_scale_deformable_attn", multi_scale_deformable_attn),
        ("geometric_kernel_attention", geometric_kernel_attention),
        ("deformable_aggregation", deformable_aggregation),
    )
}
_BACKWARDS = {operator: backward_as_compiled(operator, list) for operator in FORWARDS}


def _sample(row: Function, facts: Facts) -> Any:
    """Return the output of a sampling operator, or the list of its gradients in the shapes of the caller's inputs."""
    inputs = sampling_inputs(row.operator, facts)
    if not row.backward:
        return FORWARDS[row.operator](*inputs)
    gradients = _BACKWARDS[row.operator](*inputs, facts["grad_output"])
    return [g.view(facts[name].shape) for name, g in zip(DIFFERENTIABLE[row.operator], gradients, strict=True)]


def _pool_places(row: Function, facts: Facts) -> Any:
    function = _extension.bev_pool_backward if row.backward else _extension.bev_pool_forward
    return function(*facts.values())


def _pool_xyzb(row: Function, facts: Facts) -> Any:
    """Pool points by cells (x, y, z, b). FlashOCC has this order: its innermost axis is W, not H."""
    places = facts["geom_xyzb"]
    tensors(("geom_xyzb", places))
    need_shape("geom_xyzb", places, "n, 4", None, 4)
    return _pool_places(row, {**facts, "geom_xyzb": places[:, [1, 0, 2, 3]]})


def _pool_ranks(row: Function, facts: Facts) -> Any:
    """Pool lifted points. The sizes are those of the caller's output [b, d, h, w, c]."""
    inputs = [fact for name, fact in facts.items() if name not in row.outputs]
    if row.backward:
        return _extension.bev_pool_v3_backward(*inputs)
    tensors(("output", facts["output"]))
    need_axes("output", facts["output"], "B, D, H, W, C")
    return _extension.bev_pool_v2_forward(*inputs, *facts["output"].shape[:4])


def _view_points(geom_xyz: Tensor, *sizes: int) -> Tensor:
    """Return the points as [*sizes, 3]. Callers may pass any shape, because the compiled functions ignore shapes."""
    tensors(("geom_xyz", geom_xyz))
    if geom_xyz.numel() != 3 * math.prod(sizes):
        fail(ValueError, "geom_xyz", f"hold {math.prod(sizes)} points (x, y, z)", f"shape {tuple(geom_xyz.shape)}")
    return geom_xyz.reshape(*sizes, 3)


def _pool_points(row: Function, facts: Facts) -> Tensor:
    """Return [B, Y, X, C]. Write (batch, y, x) of the points inside the grid to the memo [B, n, 3]."""
    B, n, C, X, Y, Z = _pooling.sizes_of("sizes", list(facts.values())[:6], "six", "B, n, C, X, Y, Z")
    coords, memo = _view_points(facts["geom_xyz"], B, n), facts["memo"]
    tensors(("input_features", facts["feat"]))
    if facts["feat"].shape[-1:] != (C,):
        fail(ValueError, "input_features", f"have shape (B, n, C={C})", tuple(facts["feat"].shape))
    pooled = npu_voxel_pooling_train(coords, facts["feat"], (X, Y, Z)).permute(0, 2, 3, 1)
    tensors(("memo", memo))
    need_shape("memo", memo, "B, n, 3", B, n, 3)
    need_dtype("memo", memo, INDEX, INDEX_RULE)
    need_one_device(("geom_xyz", coords), ("memo", memo))
    _extension.check_outputs([pooled], {"output": facts["output"]})
    inside, cells = _pooling.points_inside(coords, (X, Y, Z))
    memo.view(-1, 3)[inside] = torch.stack(torch.unravel_index(cells, (B, Y, X)), 1).to(memo.dtype)
    return pooled


def _pool_frustum(row: Function, facts: Facts) -> Tensor:
    """Return [B, Y, X, C]. Depth is [B * cams, D, H, W], feat [B * cams, C, H, W]."""
    axes = "B, cams, D, H, W, C, X, Y, Z"
    B, *pixels, C, X, Y, Z = _pooling.sizes_of("sizes", list(facts.values())[:9], "nine", axes)
    coords, depth, feat = _view_points(facts["geom_xyz"], B, *pixels), facts["depth"], facts["feat"]
    tensors(("depth", depth), ("context", feat))
    need_shape("context", feat, "B * cams, C, H, W", None, C, None, None)
    return _lift_frustum(coords, depth, feat, (X, Y, Z)).permute(0, 2, 3, 1)


def _lift_frustum(coords: Tensor, depth: Tensor, feat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return [B, C, Y, X]."""
    ranks, shape = _pooling.lifted_points(coords, sizes), (coords.shape[0], 1, sizes[1], sizes[0], feat.shape[1])
    return bev_pool_v3(depth, feat.permute(0, 2, 3, 1), *ranks, shape).squeeze(2)


# The adaptors of layouts, by a parameter that no other layout has.
_POOLS = {"geom_feat": _pool_places, "geom_xyzb": _pool_xyzb, "ranks_bev": _pool_ranks, "memo": _pool_points}


def stand_in(row: Function) -> Callable[..., Any]:
    """Return our function for a row of the table of foreign functions."""
    is_pool = row.operator == POOL
    adapt = next((adapt for name, adapt in _POOLS.items() if name in row.names), _pool_frustum) if is_pool else _sample
    kinds = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in row.names]
    kinds = [kind.replace(default=64) if kind.name == "step" else kind for kind in kinds]

    def call(*args: Any, **named: Any) -> Any:
        facts = dict(zip(row.names, args if is_pool else insert_starts(args), strict=False)) | named
        facts = {name: facts[name] for name in row.names if name in facts}
        results = adapt(row, facts)
        if not row.outputs:
            return results
        outputs = {name: facts[name] for name in row.outputs}
        results = [results] if isinstance(results, Tensor) else results
        _extension.write_outputs(results, outputs, add=f"{row.outputs[0]}+" in row.parameters)
        return 1 if row.layout == "BYXC" else None

    call.__name__, call.__signature__ = row.name, inspect.Signature(kinds)  # pyright: ignore[reportFunctionMemberAccess]
    explained = explain_arguments(torch.no_grad()(call) if is_pool else call)

    @functools.wraps(explained)
    def function(*args: Any, **named: Any) -> Any:
        return explained(*args, **{KEYWORDS.get(name, name): argument for name, argument in named.items()})

    return function


def sum_inside(feat: Tensor, places: Tensor, *sizes: Any) -> Tensor:
    """Return the sums of the points inside the grid. Models drop other points; the extension would write them out of bounds."""
    need_dtype("coords", places, INDEX, INDEX_RULE)
    need_shape("feats", feat, "n, C", places.shape[0], None)
    sizes = tuple(int(size) for size in sizes)
    cell = _pooling.cells(places, *sizes)
    (points,) = (cell + 1).nonzero(as_tuple=True)
    return bev_pool_v3(feat.new_ones(1), feat, torch.zeros_like(points), points, cell[points], (*sizes, feat.shape[-1]))


def sum_runs(x: Tensor, places: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of x [n, C] over runs of equal ranks [n], and the last row of `places` in every run.

    Lift-Splat's cumsum_trick and QuickCumsum subtract running sums, which loses digits. At Lift-Splat's 43,296 points in
    float32 their error is 2e-3, and the error of this function 5e-7.
    """
    is_last = torch.ones_like(ranks, dtype=torch.bool)
    is_last[:-1] = ranks[1:] != ranks[:-1]
    last_places, points = places[is_last], torch.arange(len(x), device=x.device)
    runs = is_last.cumsum(0) - is_last.long()
    shape = (len(last_places), 1, 1, 1, x.shape[1])
    sums = bev_pool_v3(x.new_ones(1), x, torch.zeros_like(points), points, runs, shape)
    return sums.view(len(last_places), x.shape[1]).to(x.dtype), last_places


def _pool(depth: Any = None, feat: Any = None, voxel_num: Any = (), **places: Any) -> Any:
    """Return the output of a pooling operator. The keywords are the arguments of its autograd function, by our names."""
    if places.pop("method", "sum") != "sum":
        raise NotImplementedError("the maximum of points is not compiled; mx_driving has their sum only")
    if "places" in places:
        return sum_runs(feat, places["places"], places["ranks"])
    if "ranks_bev" in places:
        return bev_pool_v2(depth, feat.float(), **places)  # BEVDet sums in float32, whatever the dtypes
    sizes = [int(size) for size in voxel_num]
    if depth is not None:
        return _lift_frustum(places["geom_xyz"], depth, feat, sizes)
    if sizes:
        return npu_voxel_pooling_train(places["geom_xyz"], feat, sizes)
    order = places["geom_feat"] if "geom_feat" in places else places["geom_xyzb"][:, [1, 0, 2, 3]]
    return sum_inside(feat, order, *(places[name] for name in ("B", "D", "H", "W")))


@functools.cache
def differentiable(row: AutogradFunction) -> Callable[..., Tensor]:
    """Return a differentiable function that takes the arguments of this row's autograd function."""
    words, operator, is_last = row.words.split(), row.operator, row.layout == "BDHWC"  # torch 2.6 cannot compile `row.words`

    def run(*args: Any) -> Tensor:
        facts = dict(zip(words, args, strict=False))  # drops im2col_step, which may have a default
        if operator != POOL:
            return FORWARDS[operator](*sampling_inputs(operator, facts))
        output = _pool(**facts)
        return output.permute(0, 2, 3, 4, 1) if is_last else output

    return run
