"""Functions that replace compiled extensions and their autograd functions. The table of foreign functions has several layouts
of arguments. For each layout, a function here (an adaptor) converts the arguments and calls ours."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.functions import backward_as_compiled
from .._foreign_functions import DIFFERENTIABLE, KEYWORDS, AutogradFunction, Function, insert_starts
from .._operator.composition import without_autocast
from .._operator.description import POOL
from .._operator.rules import INDEX, INDEX_RULE, fail, need_axes, need_dtype, need_one_device, need_shape, need_tensors
from ..ops import _pooling
from ..ops._arguments import explain_arguments, rename_once
from ..ops.bev_pool_v2 import bev_pool_v2
from ..ops.bev_pool_v3 import bev_pool_v3
from ..ops.geometric_kernel_attention import geometric_kernel_attention
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn
from ..ops.npu_deformable_aggregation import deformable_aggregation
from ..ops.voxel_pooling_train import npu_voxel_pooling_train
from . import pools
from .shapes import sampling_inputs

Arguments = dict[str, Any]  # our name of a parameter -> argument
FORWARDS = {
    operator: without_autocast(public)
    for operator, public in (
        ("multi_scale_deformable_attn", multi_scale_deformable_attn),
        ("geometric_kernel_attention", geometric_kernel_attention),
        ("deformable_aggregation", deformable_aggregation),
    )
}
_BACKWARDS = {operator: backward_as_compiled(operator, list) for operator in FORWARDS}


def _sample(entry: Function, arguments: Arguments) -> Any:
    """Return the output of a sampling operator, or the list of its gradients in the shapes of the caller's inputs."""
    inputs = sampling_inputs(entry.operator, arguments)
    if not entry.backward:
        return FORWARDS[entry.operator](*inputs)
    gradients = _BACKWARDS[entry.operator](*inputs, arguments["grad_output"])
    return [g.view(arguments[name].shape) for name, g in zip(DIFFERENTIABLE[entry.operator], gradients, strict=True)]


def _pool_places(entry: Function, arguments: Arguments) -> Any:
    function = pools.bev_pool_backward if entry.backward else pools.bev_pool_forward
    return function(*arguments.values())


def _pool_xyzb(entry: Function, arguments: Arguments) -> Any:
    """Pool points whose cells are (x, y, z, b), as in FlashOCC. Exchange x and y for bev_pool, whose cells begin with H."""
    places = arguments["geom_xyzb"]
    need_tensors(("geom_xyzb", places))
    need_shape("geom_xyzb", places, "n, 4", None, 4)
    return _pool_places(entry, {**arguments, "geom_xyzb": places[:, [1, 0, 2, 3]]})


def _pool_ranks(entry: Function, arguments: Arguments) -> Any:
    """Pool points that have ranks. Take the sizes from the caller's output [b, d, h, w, c]."""
    inputs = [argument for name, argument in arguments.items() if name not in entry.outputs]
    if entry.backward:
        return pools.bev_pool_v3_backward(*inputs)
    need_tensors(("output", arguments["output"]))
    need_axes("output", arguments["output"], "B, D, H, W, C")
    return pools.bev_pool_v2_forward(*inputs, *arguments["output"].shape[:4])


def _view_points(geom_xyz: Tensor, *sizes: int) -> Tensor:
    """Return the points as [*sizes, 3]. Callers may pass any shape, because the compiled functions ignore shapes."""
    need_tensors(("geom_xyz", geom_xyz))
    if geom_xyz.numel() != 3 * math.prod(sizes):
        fail(ValueError, "geom_xyz", f"hold {math.prod(sizes)} points (x, y, z)", f"shape {tuple(geom_xyz.shape)}")
    return geom_xyz.reshape(*sizes, 3)


def _pool_points(entry: Function, arguments: Arguments) -> Tensor:
    """Return [B, Y, X, C]. Write (batch, y, x) of the points inside the grid to the memo [B, n, 3]."""
    B, n, C, X, Y, Z = _pooling.sizes_of("sizes", list(arguments.values())[:6], "six", "B, n, C, X, Y, Z")
    coords, memo = _view_points(arguments["geom_xyz"], B, n), arguments["memo"]
    need_tensors(("input_features", arguments["feat"]))
    if arguments["feat"].shape[-1:] != (C,):
        fail(ValueError, "input_features", f"have shape (B, n, C={C})", tuple(arguments["feat"].shape))
    pooled = npu_voxel_pooling_train(coords, arguments["feat"], (X, Y, Z)).permute(0, 2, 3, 1)
    need_tensors(("memo", memo))
    need_shape("memo", memo, "B, n, 3", B, n, 3)
    need_dtype("memo", memo, INDEX, INDEX_RULE)
    need_one_device(("geom_xyz", coords), ("memo", memo))
    pools.check_outputs([pooled], {"output": arguments["output"]})
    inside, cells = _pooling.points_inside(coords, (X, Y, Z))
    memo.view(-1, 3)[inside] = torch.stack(torch.unravel_index(cells, (B, Y, X)), 1).to(memo.dtype)
    return pooled


def _pool_frustum(entry: Function, arguments: Arguments) -> Tensor:
    """Return [B, Y, X, C]. Depth is [B * cams, D, H, W], feat [B * cams, C, H, W]."""
    axes = "B, cams, D, H, W, C, X, Y, Z"
    B, *pixels, C, X, Y, Z = _pooling.sizes_of("sizes", list(arguments.values())[:9], "nine", axes)
    coords, depth, feat = _view_points(arguments["geom_xyz"], B, *pixels), arguments["depth"], arguments["feat"]
    need_tensors(("depth", depth), ("context", feat))
    need_shape("context", feat, "B * cams, C, H, W", None, C, None, None)
    return _lift_frustum(coords, depth, feat, (X, Y, Z)).permute(0, 2, 3, 1)


def _lift_frustum(coords: Tensor, depth: Tensor, feat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return [B, C, Y, X]. coords is [B, cams, D, H, W, 3], depth [B * cams, D, H, W] and feat [B * cams, C, H, W]. Compute the
    ranks of the points inside the grid as BEVDepth does in inference."""
    bins, pixels = coords.shape[2], coords.shape[3] * coords.shape[4]
    points, cells = _pooling.points_inside(coords, sizes)
    rows = points // (bins * pixels) * pixels + points % pixels
    shape = (coords.shape[0], 1, sizes[1], sizes[0], feat.shape[1])
    return bev_pool_v3(depth, feat.permute(0, 2, 3, 1), points, rows, cells, shape).squeeze(2)


# parameter -> adaptor for the pooling functions that have this parameter. Each parameter here occurs in a single layout.
_POOLS = {"geom_feat": _pool_places, "geom_xyzb": _pool_xyzb, "ranks_bev": _pool_ranks, "memo": _pool_points}


def stand_in(entry: Function) -> Callable[..., Any]:
    """Return our function for an entry of the table of foreign functions."""
    is_pool = entry.operator == POOL
    adapt = next((adapt for name, adapt in _POOLS.items() if name in entry.names), _pool_frustum) if is_pool else _sample
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in entry.names]
    parameters = [parameter.replace(default=64) if parameter.name == "step" else parameter for parameter in parameters]

    def call(*args: Any, **named: Any) -> Any:
        arguments = dict(zip(entry.names, args if is_pool else insert_starts(args), strict=False)) | named
        arguments = {name: arguments[name] for name in entry.names if name in arguments}
        results = adapt(entry, arguments)
        if not entry.outputs:
            return results
        outputs = {name: arguments[name] for name in entry.outputs}
        results = [results] if isinstance(results, Tensor) else results
        pools.write_outputs(results, outputs, add=f"{entry.outputs[0]}+" in entry.parameters)
        return 1 if entry.layout == "BYXC" else None

    call.__name__, call.__signature__ = entry.name, inspect.Signature(parameters)  # pyright: ignore[reportFunctionMemberAccess]
    explained = explain_arguments(torch.no_grad()(call) if is_pool else call)

    @functools.wraps(explained)
    def function(*args: Any, **named: Any) -> Any:
        return explained(*args, **rename_once(named, KEYWORDS))

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
    """Return the output of a pooling autograd function. The keywords are its arguments, under our names."""
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
def differentiable(entry: AutogradFunction) -> Callable[..., Tensor]:
    """Return a differentiable function that takes the arguments of this entry's autograd function."""
    # Read the entry's attributes here, because torch 2.6 cannot compile that in `run`.
    names, operator, is_last = entry.words.split(), entry.operator, entry.layout == "BDHWC"

    def run(*args: Any) -> Tensor:
        # Not strict, because im2col_step may be omitted; no operator reads it. torch 2.6 compiles strict=False as strict=True.
        arguments = dict(zip(names, args))  # noqa: B905
        if operator != POOL:
            return FORWARDS[operator](*sampling_inputs(operator, arguments))
        output = _pool(**arguments)
        return output.permute(0, 2, 3, 4, 1) if is_last else output

    return run
