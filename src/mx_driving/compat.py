"""Stand-ins for compiled extensions, so that code written against them imports and runs without building anything.

After `mx_driving.compat.install()` these imports give the operators of this package. They also work as submodules of a
package that would hold the compiled file (`from . import deformable_aggregation_ext`):

- `MultiScaleDeformableAttention` (Deformable-DETR, DINO, Mask2Former, Mask DINO, ...): ms_deform_attn_forward, _backward
- `deformable_aggregation_ext` (Sparse4D, SparseDrive; its older interface, too: GaussianFormer, Far3D):
  deformable_aggregation_forward, _backward
- `GeometricKernelAttention` (MapTR): geometric_kernel_attn_cuda_forward, _backward
- `bev_pool_v2_ext` (BEVDet, FlashOcc, FB-BEV): bev_pool_v2_forward, _backward, _backward_opt
- `bev_pool_ext` (BEVFusion): bev_pool_forward, _backward
- `voxel_pooling_train_ext`, `voxel_pooling_inference_ext` and the older `voxel_pooling_ext` (BEVDepth, BEVStereo): their
  _forward_wrapper
- only where nobody compiled them: `mmcv._ext` (mmcv-lite), `detrex._C`, `adet._C` (DeepSolo), `groundingdino._C`:
  ms_deform_attn_forward, _backward; `deformable_aggregation_with_depth_ext` (SparseDrive): nothing yet. Their other functions
  raise NotImplementedError when they are called

`mx_driving.compat.install("torch_npu")` stands in for the vendor's device module: devices called "npu" are the CPU, so that the
vendor's tests and models run on a PC.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mx_driving_portable.record import FUNCTIONS

from ._dispatch.functions import as_compiled, backward_as_compiled
from ._operator.description import OPERATORS
from ._operator.rules import fail, need_axes, need_shape, need_some_sizes, tensors
from ._replacing import MadeModules
from .ops import _extension, _pooling
from .ops._arguments import explain_arguments
from .ops._other_shapes import aggregation_inputs, attention_inputs
from .ops.bev_pool_v3 import bev_pool_v3
from .ops.geometric_kernel_attention import geometric_kernel_attention
from .ops.multi_scale_deformable_attn import multi_scale_deformable_attn
from .ops.npu_deformable_aggregation import deformable_aggregation
from .ops.voxel_pooling_train import npu_voxel_pooling_train

__all__ = ["NAMES", "install", "uninstall"]

Function = Callable[..., Any]


def _make_forward(name: str, public: Function) -> Function:
    """Return the operator under mmcv's names of the arguments. The im2col_step is not used."""
    compiled = as_compiled(public)

    def forward(
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int = 64,
    ) -> Tensor:
        tables = value_spatial_shapes, value_level_start_index
        return compiled(*attention_inputs(value, *tables, sampling_locations, attention_weights))

    forward.__name__ = name
    return explain_arguments(forward)


def _make_backward(name: str, operator: str, to_inputs: Function = attention_inputs) -> Function:
    """Return a function of an operator's five inputs and grad_output: a list of the gradients, in the inputs' own shapes.

    Callers give more, mmcv an im2col_step, which is not used.
    """
    run, differentiable = backward_as_compiled(operator, list), OPERATORS[operator].differentiable

    def backward(
        value: Tensor,
        shapes: Tensor,
        starts: Tensor,
        locations: Tensor,
        weights: Tensor,
        grad_output: Tensor,
        *unused: Any,
        im2col_step: int = 64,
    ) -> list[Tensor]:
        inputs = value, shapes, starts, locations, weights
        gradients = run(*to_inputs(*inputs), grad_output)
        return [g.view(inputs[i].shape) for i, g in zip(differentiable, gradients, strict=True)]

    backward.__name__ = name
    return explain_arguments(backward)


_multi_scale_backward = _make_backward("ms_deform_attn_backward", "multi_scale_deformable_attn")
_gradients_of_aggregation = _make_backward("deformable_aggregation_backward", "deformable_aggregation", aggregation_inputs)


@explain_arguments
def _deformable_aggregation_forward(
    feature_maps: Tensor, spatial_shape: Tensor, scale_start_index: Tensor, sample_locations: Tensor, weights: Tensor
) -> Tensor:
    return deformable_aggregation(
        *aggregation_inputs(feature_maps, spatial_shape, scale_start_index, sample_locations, weights)
    )


@explain_arguments
def _deformable_aggregation_backward(
    feature_maps: Tensor,
    spatial_shape: Tensor,
    scale_start_index: Tensor,
    sample_locations: Tensor,
    weights: Tensor,
    grad_output: Tensor,
    grad_feature_maps: Tensor,
    grad_sample_locations: Tensor,
    grad_weights: Tensor,
) -> None:
    """Add the gradients to three outputs, as the compiled function does."""
    inputs = feature_maps, spatial_shape, scale_start_index, sample_locations, weights
    outputs = {
        "grad_feature_maps": grad_feature_maps,
        "grad_sample_locations": grad_sample_locations,
        "grad_weights": grad_weights,
    }
    _extension.write_outputs(_gradients_of_aggregation(*inputs, grad_output), outputs, add=True)


@explain_arguments
def _ms_deform_attn_backward(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int = 64,
) -> None:
    """Write the gradients to three outputs, as mmcv's compiled function does."""
    inputs = value, spatial_shapes, level_start_index, sampling_locations, attention_weights
    outputs = {"grad_value": grad_value, "grad_sampling_loc": grad_sampling_loc, "grad_attn_weight": grad_attn_weight}
    _extension.write_outputs(_multi_scale_backward(*inputs, grad_output), outputs)


@torch.no_grad()
@explain_arguments
def _bev_pool_v2_forward(
    depth: Tensor,
    feat: Tensor,
    out: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    interval_lengths: Tensor,
    interval_starts: Tensor,
) -> None:
    """Write to out [b, d, h, w, c]."""
    tensors(("out", out))
    need_axes("out", out, "B, D, H, W, C")
    ranks_and_intervals = ranks_depth, ranks_feat, ranks_bev, interval_lengths, interval_starts
    _extension.write_outputs([_extension.bev_pool_v2_forward(depth, feat, *ranks_and_intervals, *out.shape[:4])], {"out": out})


@torch.no_grad()
@explain_arguments
def _bev_pool_v2_backward(
    grad_out: Tensor,
    grad_depth: Tensor,
    grad_feat: Tensor,
    depth: Tensor,
    feat: Tensor,
    ranks_depth: Tensor,
    ranks_feat: Tensor,
    ranks_bev: Tensor,
    *intervals: Tensor,
) -> None:
    """Add to grad_depth and grad_feat."""
    gradients = _extension.bev_pool_v3_backward(grad_out, depth, feat, ranks_depth, ranks_feat, ranks_bev, *intervals)
    _extension.write_outputs(gradients, {"grad_depth": grad_depth, "grad_feat": grad_feat}, add=True)


def _view_points(geom_xyz: Tensor, *sizes: int) -> Tensor:
    """Return the points as [*sizes, 3]: the compiled functions read memory, not shapes."""
    tensors(("geom_xyz", geom_xyz))
    if geom_xyz.numel() != 3 * math.prod(sizes):
        fail(ValueError, "geom_xyz", f"hold {math.prod(sizes)} points (x, y, z)", f"shape {tuple(geom_xyz.shape)}")
    return geom_xyz.reshape(*sizes, 3)


@torch.no_grad()
@explain_arguments
def _voxel_pooling_train(
    B: int, n: int, C: int, X: int, Y: int, Z: int, geom_xyz: Tensor, features: Tensor, output: Tensor, memo: Tensor
) -> int:
    """Add to the output [B, Y, X, C], and write (batch, y, x) of each point inside the grid to the memo [B, n, 3]."""
    sizes, coords = (int(X), int(Y), int(Z)), _view_points(geom_xyz, B, n)
    tensors(("memo", memo))
    need_shape("memo", memo, "B, n, 3", B, n, 3)
    pooled = npu_voxel_pooling_train(coords, features, sizes).permute(0, 2, 3, 1)
    _extension.write_outputs([pooled], {"output": output}, add=True)
    inside, cells = _pooling.points_inside(coords, sizes)
    columns = torch.unravel_index(cells, (B, sizes[1], sizes[0]))
    memo.view(-1, 3)[inside] = torch.stack(columns, 1).to(memo.dtype)
    return 1


@torch.no_grad()
@explain_arguments
def _voxel_pooling_inference(
    B: int,
    cams: int,
    D: int,
    H: int,
    W: int,
    C: int,
    X: int,
    Y: int,
    Z: int,
    geom_xyz: Tensor,
    depth: Tensor,
    context: Tensor,
    output: Tensor,
) -> int:
    """Add to the output [B, Y, X, C]. Depth is [B * cams, D, H, W], context [B * cams, C, H, W]."""
    coords = _view_points(geom_xyz, B, cams, D, H, W)
    tensors(("depth", depth), ("context", context))
    need_some_sizes("context", context, "B * cams, C, H, W", None, C, None, None)
    ranks_depth, ranks_feat, ranks_bev = _pooling.lifted_points(coords, (int(X), int(Y), int(Z)))
    shape = (B, 1, int(Y), int(X), C)
    pooled = bev_pool_v3(depth, context.permute(0, 2, 3, 1), ranks_depth, ranks_feat, ranks_bev, shape)
    _extension.write_outputs([pooled[:, :, 0].permute(0, 2, 3, 1)], {"output": output}, add=True)
    return 1


_STAND_INS: dict[str, Function] = {
    "ms_deform_attn_forward": _make_forward("ms_deform_attn_forward", multi_scale_deformable_attn),
    "ms_deform_attn_backward": _multi_scale_backward,
    "deformable_aggregation_forward": as_compiled(_deformable_aggregation_forward),
    "deformable_aggregation_backward": _deformable_aggregation_backward,
    "geometric_kernel_attn_cuda_forward": _make_forward("geometric_kernel_attn_cuda_forward", geometric_kernel_attention),
    "geometric_kernel_attn_cuda_backward": _make_backward("geometric_kernel_attn_cuda_backward", "geometric_kernel_attention"),
    "bev_pool_v2_forward": _bev_pool_v2_forward,
    **dict.fromkeys(("bev_pool_v2_backward", "bev_pool_v2_backward_opt"), _bev_pool_v2_backward),
    "bev_pool_forward": _extension.bev_pool_forward,
    "bev_pool_backward": _extension.bev_pool_backward,
    **dict.fromkeys(("voxel_pooling_train_forward_wrapper", "voxel_pooling_forward_wrapper"), _voxel_pooling_train),
    "voxel_pooling_inference_forward_wrapper": _voxel_pooling_inference,
}
# Modules by the last part of their names, and by whole names with a dot. The latter have more functions than ours, so compiled
# ones come first.
_EXTENSIONS: dict[str, dict[str, Function]] = {}
_PARTS: dict[str, dict[str, Function]] = {"deformable_aggregation_with_depth_ext": {}}
for _row in FUNCTIONS:
    if _row.module != "mx_driving":
        modules = _PARTS if "." in _row.module else _EXTENSIONS
        modules.setdefault(_row.module, {})[_row.name] = _STAND_INS[_row.name]
_PARTS["mmcv._ext"]["ms_deform_attn_backward"] = _ms_deform_attn_backward


def _make_getattr(module: str, functions: dict[str, Function]) -> Callable[[str], Function]:
    """Return the `__getattr__` of a module. Its functions raise when they are called: mmcv checks at import that they exist."""
    has = ", ".join(functions) or "deformable_aggregation_ext, which has no depth,"

    def absent(name: str) -> Function:
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{module}.{name} is not compiled; mx_driving.compat stands in for {has} only")

        return call

    return absent


NAMES = (*_EXTENSIONS, *_PARTS)


def _find_part(name: str) -> dict[str, Any] | None:
    functions = _PARTS.get(name, _PARTS.get(name.rpartition(".")[2]))
    return None if functions is None else {**functions, "__getattr__": _make_getattr(name, functions)}


_first = MadeModules(lambda name: _EXTENSIONS.get(name.rpartition(".")[2]))
_last = MadeModules(_find_part)


def install(what: str = "extensions") -> tuple[str, ...]:
    """Let the extensions' names import this package's operators from now on. A second call does nothing.

    Call it before the code that imports them.

    Args:
        what: "extensions", or "torch_npu": `import torch_npu` gives a stand-in, whose device is the CPU.

    Returns:
        The names.

    Raises:
        RuntimeError: a compiled extension of one of the names has been imported already, or torch_npu is installed.
        ValueError: there is no such stand-in.
    """
    if what == "torch_npu":
        from ._vendor import npu

        npu.install()
        return ("torch_npu",)
    if what != "extensions":
        fail(ValueError, "what", 'be "extensions" or "torch_npu"', repr(what))
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name.rpartition(".")[2] in _EXTENSIONS and getattr(spec, "loader", None) is not _first:
            raise RuntimeError(f"mx_driving.compat.install must come before the first import of {name}")
    if not _first.installed:
        _first.install(first=True)
        _last.install(first=False)
    return NAMES


def uninstall() -> None:
    """Undo every `install`. Code that has imported a stand-in keeps it."""
    npu = sys.modules.get(f"{__package__}._vendor.npu")
    if npu is not None:
        npu.uninstall()
    for modules in (_first, _last):
        modules.uninstall()
