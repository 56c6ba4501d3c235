"""Functions that replace compiled extensions and their autograd functions. They convert the argument layouts of the table of
foreign functions to those of our functions. The extensions do not check shapes.

`deformable_aggregation_ext` is the name of two interfaces. In the older interface (Sparse4D v1 and v2, GaussianFormer, Far3D)
feature maps have an axis of cameras. Far3D passes attention weights with levels and points in one axis.

The pooling functions have the interface of compiled extensions: channels last, no autograd, no autocast, separate backwards.
Extensions also take the intervals of the points. Only `bev_pool_v2_forward` reads the intervals. The other functions read the
cell of every point. Their results equal the extensions' if all points of an interval have the same cell. The backward of
bev_pool_v2 instead equals the extension's if all points of an interval have the same row of feat.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.functions import backward_as_compiled
from .._foreign_functions import DIFFERENTIABLE, KEYWORDS, AutogradFunction, Function, insert_starts
from .._operator import checks, geometry
from .._operator.composition import without_autocast
from .._operator.description import AGGREGATION, POOL, SamplingInputs
from .._operator.rules import (
    FLOATING,
    FLOATING_RULE,
    INDEX,
    INDEX_RULE,
    fail,
    need_axes,
    need_dtype,
    need_one_device,
    need_shape,
    need_tensors,
)
from ..ops import _pooling
from ..ops._arguments import explain_arguments, rename_once
from ..ops.bev_pool import bev_pool
from ..ops.bev_pool_v2 import bev_pool_v2
from ..ops.bev_pool_v3 import bev_pool_v3
from ..ops.geometric_kernel_attention import geometric_kernel_attention
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn
from ..ops.npu_deformable_aggregation import deformable_aggregation
from ..ops.voxel_pooling_train import npu_voxel_pooling_train

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
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
_v1, _v2, _v3 = without_autocast(bev_pool), without_autocast(bev_pool_v2), without_autocast(bev_pool_v3)


def sampling_inputs(operator: str, facts: Mapping[str, Any]) -> Inputs:
    """Return the inputs of a sampling operator. `facts`: our name of an argument -> argument. If "starts" is
    missing, the maps lie one after the other without gaps."""
    if facts.get("starts") is None and isinstance(facts["shapes"], Tensor):
        facts = {**facts, "starts": geometry.starts_of(facts["shapes"])}
    value, shapes, starts, locations, weights = (facts[name] for name in SamplingInputs._fields)
    if operator != AGGREGATION:
        if isinstance(shapes, Tensor) and shapes.dim() == 2 and shapes.shape[1] == 3:
            fact = f"{tuple(shapes.shape)}: three sizes, of volumes, and the operator samples maps"
            fail(ValueError, "value_spatial_shapes", "have shape (num_levels, 2), (H, W) of each level", fact)
        # The weights of attention may be [bs, num_queries, num_heads, num_levels * num_points].
        if isinstance(weights, Tensor) and isinstance(locations, Tensor) and (weights.dim(), locations.dim()) == (4, 6):
            sides = locations.shape[:-1]
            if weights.shape == (*sides[:3], sides[3] * sides[4]):
                weights = weights.reshape(sides)
        return value, shapes, starts, locations, weights

    # The older interface of aggregation has feature maps [bs, cam, num_feat, c], tables [scale, 2] and [scale] for all cameras,
    # locations [bs, pts, cam, 2] and weights [bs, pts, cam, scale, group]. Make each of its points an anchor of one point.
    if not isinstance(value, Tensor) or value.dim() != 4:
        if isinstance(shapes, Tensor) and shapes.dim() == 2 and isinstance(value, Tensor):
            fact = f"{tuple(shapes.shape)}, as the older interface has it, beside feature_maps {tuple(value.shape)}"
            fail(ValueError, "spatial_shape", "have shape (cam, scale, 2) where feature_maps are [bs, num_feat, c]", fact)
        return value, shapes, starts, locations, weights
    need_tensors(("spatial_shape", shapes), ("scale_start_index", starts))
    need_tensors(("sample_locations", locations), ("weights", weights))
    need_dtype("scale_start_index", starts, INDEX, INDEX_RULE)
    bs, cameras, rows, _ = value.shape
    if shapes.dim() == 3:
        fact = f"{tuple(value.shape)}, as the older interface has them, beside spatial_shape {tuple(shapes.shape)}"
        fail(ValueError, "feature_maps", "have shape (bs, num_feat, c) where spatial_shape is [cam, scale, 2]", fact)
    need_shape("spatial_shape", shapes, "scale, 2", None, 2)
    scales = shapes.shape[0]
    need_shape("scale_start_index", starts, "scale", scales)
    need_shape("sample_locations", locations, "bs, pts, cam, 2", bs, None, cameras, 2)
    need_shape("weights", weights, "bs, pts, cam, scale, group", bs, locations.shape[1], cameras, scales, None)
    if checks.is_readable(shapes) and checks.is_readable(starts):
        # The operator sees the maps of all cameras as one table, and would not notice a level that runs into the next camera.
        checks.check_levels("spatial_shape", "scale_start_index", shapes, starts, rows)
    first = torch.arange(cameras, dtype=torch.int64, device=starts.device)[:, None] * rows
    return value.flatten(1, 2), shapes.expand(cameras, -1, -1), starts + first, locations.unsqueeze(2), weights.unsqueeze(2)


def check_outputs(results: Sequence[Tensor | None], outputs: dict[str, Any]) -> None:
    """Check that the caller's outputs have the results' shapes and devices. A copy to a meta tensor would lose the result."""
    for (name, out), result in zip(outputs.items(), results, strict=True):
        need_tensors((name, out))
        need_dtype(name, out, FLOATING, FLOATING_RULE)
        if result is not None and out.shape != result.shape:
            fail(ValueError, name, f"have shape {tuple(result.shape)}", tuple(out.shape))
        if result is not None:
            need_one_device(("the input", result), (name, out))


@torch.no_grad()
@explain_arguments
def bev_pool_forward(
    feat: Tensor, geom_feat: Tensor, interval_lengths: Any, interval_starts: Any, b: int, d: int, h: int, w: int
) -> Tensor:
    """Return sums, [b, d, h, w, c]."""
    _check_intervals(interval_lengths, interval_starts)
    return _v1(feat, geom_feat, b, d, h, w).permute(0, 2, 3, 4, 1)


@torch.no_grad()
@explain_arguments
def bev_pool_backward(grad_out: Tensor, geom_feat: Tensor, *intervals_and_sizes: Any) -> Tensor:
    """Return the gradient of feat, [n, c]."""
    need_tensors(("grad_out", grad_out), ("geom_feat", geom_feat))
    need_axes("grad_out", grad_out, "B, D, H, W, C")
    need_dtype("grad_out", grad_out, FLOATING, FLOATING_RULE)
    need_shape("geom_feat", geom_feat, "n, 4", None, 4)
    _check_intervals(*intervals_and_sizes)
    rows = grad_out.new_zeros(()).expand(geom_feat.shape[0], grad_out.shape[-1])
    return _pooling.gradients(grad_out, None, rows, None, None, geom_feat)[1]


@torch.no_grad()
@explain_arguments
def bev_pool_v2_forward(
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_lengths: Tensor,
    interval_starts: Tensor,
    b: int,
    d: int,
    h: int,
    w: int,
) -> Tensor:
    """Return sums, [b, d, h, w, c]."""
    need_tensors(("feat", feat))
    if feat.dim() == 0:
        fail(ValueError, "feat", "have shape (..., C)", ())
    shape = (b, d, h, w, feat.shape[-1])
    output = _v2(depth, feat, ranks_depth, ranks_feat, ranks_bev, shape, interval_starts, interval_lengths)
    return output.permute(0, 2, 3, 4, 1)


@torch.no_grad()
@explain_arguments
def bev_pool_v3_forward(
    depth: Any, feat: Tensor, ranks_depth: Any, ranks_feat: Any, ranks_bev: Tensor, b: int, d: int, h: int, w: int
) -> Tensor:
    """Return sums, [b, d, h, w, c]. If depth is None, c is feat.shape[1], else feat.shape[-1]."""
    need_tensors(("feat", feat))
    if feat.dim() < (2 if depth is None else 1):
        fail(ValueError, "feat", f"have shape {'(n, C)' if depth is None else '(..., C)'}", tuple(feat.shape))
    channels = feat.shape[1 if depth is None else -1]
    return _v3(depth, feat, ranks_depth, ranks_feat, ranks_bev, (b, d, h, w, channels)).permute(0, 2, 3, 4, 1)


@torch.no_grad()
@explain_arguments
def bev_pool_v3_backward(
    grad_out: Tensor, depth: Any, feat: Tensor, ranks_depth: Any, ranks_feat: Any, ranks_bev: Tensor, *intervals_and_sizes: Any
) -> tuple[Any, Tensor]:
    """Return the gradients of depth (None without depth) and feat, for the extensions of bev_pool_v2 and bev_pool_v3."""
    _check_intervals(*intervals_and_sizes)
    return _pooling.gradients(grad_out, depth, feat, ranks_depth, ranks_feat, ranks_bev)


def _check_intervals(*intervals_and_sizes: Any) -> None:
    """Check the dtypes of interval_lengths and interval_starts: the first two arguments, if the caller passes tensors."""
    for name, t in zip(("interval_lengths", "interval_starts"), intervals_and_sizes, strict=False):
        if isinstance(t, Tensor):
            need_dtype(name, t, INDEX, INDEX_RULE)


def _view_points(geom_xyz: Tensor, *sizes: int) -> Tensor:
    """Return the points as [*sizes, 3]. Callers may pass any shape, because the compiled functions ignore shapes."""
    need_tensors(("geom_xyz", geom_xyz))
    if geom_xyz.numel() != 3 * math.prod(sizes):
        fail(ValueError, "geom_xyz", f"hold {math.prod(sizes)} points (x, y, z)", f"shape {tuple(geom_xyz.shape)}")
    return geom_xyz.reshape(*sizes, 3)


def _lift_frustum(coords: Tensor, depth: Tensor, feat: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return the output [B, C, Y, X]. coords is [B, cams, D, H, W, 3], depth [B * cams, D, H, W] and feat [B * cams, C, H, W].
    Compute the ranks of the points inside the grid as BEVDepth does in inference."""
    bins, pixels = coords.shape[2], coords.shape[3] * coords.shape[4]
    points, cells = _pooling.points_inside(coords, sizes)
    rows = points // (bins * pixels) * pixels + points % pixels
    shape = (coords.shape[0], 1, sizes[1], sizes[0], feat.shape[1])
    return bev_pool_v3(depth, feat.permute(0, 2, 3, 1), points, rows, cells, shape).squeeze(2)


def _pool_as_extension(entry: Function, arguments: Arguments) -> Any:
    """Return the results of a compiled pooling function. The function's parameters say which layout its arguments have."""
    names = entry.names
    if "geom_feat" in names or "geom_xyzb" in names:
        if "geom_xyzb" in names:
            # FlashOCC's cells are (x, y, z, b), those of bev_pool (h, w, d, b). So exchange x and y.
            places = arguments["geom_xyzb"]
            need_tensors(("geom_xyzb", places))
            need_shape("geom_xyzb", places, "n, 4", None, 4)
            arguments = {**arguments, "geom_xyzb": places[:, [1, 0, 2, 3]]}
        return (bev_pool_backward if entry.backward else bev_pool_forward)(*arguments.values())

    if "ranks_bev" in names:
        inputs = [argument for name, argument in arguments.items() if name not in entry.outputs]
        if entry.backward:
            return bev_pool_v3_backward(*inputs)
        need_tensors(("output", arguments["output"]))  # the sizes are those of the caller's output [b, d, h, w, c]
        need_axes("output", arguments["output"], "B, D, H, W, C")
        return bev_pool_v2_forward(*inputs, *arguments["output"].shape[:4])

    if "memo" in names:
        # Return sums, [B, Y, X, C]. Write (batch, y, x) of the points inside the grid to the memo [B, n, 3].
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
        check_outputs([pooled], {"output": arguments["output"]})
        inside, cells = _pooling.points_inside(coords, (X, Y, Z))
        memo.view(-1, 3)[inside] = torch.stack(torch.unravel_index(cells, (B, Y, X)), 1).to(memo.dtype)
        return pooled

    # Return sums, [B, Y, X, C]. Depth is [B * cams, D, H, W], feat [B * cams, C, H, W].
    axes = "B, cams, D, H, W, C, X, Y, Z"
    B, *pixels, C, X, Y, Z = _pooling.sizes_of("sizes", list(arguments.values())[:9], "nine", axes)
    coords, depth, feat = _view_points(arguments["geom_xyz"], B, *pixels), arguments["depth"], arguments["feat"]
    need_tensors(("depth", depth), ("context", feat))
    need_shape("context", feat, "B * cams, C, H, W", None, C, None, None)
    return _lift_frustum(coords, depth, feat, (X, Y, Z)).permute(0, 2, 3, 1)


def stand_in(entry: Function) -> Callable[..., Any]:
    """Return our function for an entry of the table of foreign functions."""
    operator, is_pool = entry.operator, entry.operator == POOL
    parameters = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in entry.names]
    parameters = [parameter.replace(default=64) if parameter.name == "step" else parameter for parameter in parameters]

    def call(*args: Any, **named: Any) -> Any:
        arguments = dict(zip(entry.names, args if is_pool else insert_starts(args), strict=False)) | named
        arguments = {name: arguments[name] for name in entry.names if name in arguments}
        if is_pool:
            results = _pool_as_extension(entry, arguments)
        elif not entry.backward:
            results = FORWARDS[operator](*sampling_inputs(operator, arguments))
        else:  # the gradients have the shapes of the caller's inputs
            gradients = _BACKWARDS[operator](*sampling_inputs(operator, arguments), arguments["grad_output"])
            results = [g.view(arguments[n].shape) for n, g in zip(DIFFERENTIABLE[operator], gradients, strict=True)]
        if not entry.outputs:
            return results
        outputs = {name: arguments[name] for name in entry.outputs}
        results = [results] if isinstance(results, Tensor) else results
        check_outputs(results, outputs)  # write nothing if an output has a wrong shape
        for out, result in zip(outputs.values(), results, strict=True):
            if result is not None:
                out.add_(result) if f"{entry.outputs[0]}+" in entry.parameters else out.copy_(result)
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
    # Read the entry's attributes here, because torch 2.6 cannot compile reading them in `run`.
    names, operator, is_last = entry.words.split(), entry.operator, entry.layout == "BDHWC"

    def run(*args: Any) -> Tensor:
        # Not strict, because im2col_step may be omitted; no operator reads it. torch 2.6 compiles strict=False as strict=True.
        arguments = dict(zip(names, args))  # noqa: B905
        if operator != POOL:
            return FORWARDS[operator](*sampling_inputs(operator, arguments))
        output = _pool(**arguments)
        return output.permute(0, 2, 3, 4, 1) if is_last else output

    return run
