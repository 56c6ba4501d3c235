"""Stand-ins for compiled extensions, so that code written against them imports and runs without building anything.

After `mx_driving.compat.install()` these imports give the operators of this package. They also work as submodules of a
package that would hold the compiled file (`from . import deformable_aggregation_ext`):

- `MultiScaleDeformableAttention` (Deformable-DETR, DINO, Mask2Former, Mask DINO, ...): ms_deform_attn_forward, _backward;
  also as TrackFormer and TransTrack call them, without level starts. If `torch.ops.load_library` loads a file of this name, as
  NVIDIA TAO does, it defines torch.ops.nvidia.MultiscaleDeformableAttnPlugin_TRT and DMHA_backward
- `deformable_aggregation_ext` (Sparse4D, SparseDrive; also its older interface: GaussianFormer, Far3D):
  deformable_aggregation_forward, _backward
- `GeometricKernelAttention` (MapTR): geometric_kernel_attn_cuda_forward, _backward
- `bev_pool_v2_ext` (BEVDet, FlashOcc, FB-BEV): bev_pool_v2_forward, _backward, _backward_opt
- `bev_pool_ext` (BEVFusion): bev_pool_forward, _backward; FlashOCC's: bev_sum_pool_forward, _backward
- `voxel_pooling_train_ext`, `voxel_pooling_inference_ext` and the older `voxel_pooling_ext` (BEVDepth, BEVStereo): their
  _forward_wrapper
- only if no compiled module exists: `mmcv._ext` (mmcv-lite), `detrex._C`, `adet._C` (DeepSolo), `groundingdino._C`:
  ms_deform_attn_forward, _backward; `deformable_aggregation_with_depth_ext` (SparseDrive): no function yet

Other functions of these modules raise NotImplementedError when they are called.

`mx_driving.compat.install("torch_npu")` stands in for the vendor's device module: devices called "npu" are the CPU, so that the
vendor's tests and models run on a PC.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ._foreign.stand_ins import stand_in
from ._foreign_functions import FUNCTIONS
from ._operator.rules import fail
from ._replacing import Changes, MadeModules
from .ops.multi_scale_deformable_attn import multi_scale_deformable_attn

__all__ = ["NAMES", "install", "uninstall"]

Function = Callable[..., Any]


# Last part of a module's name -> stand-ins of its functions. `import` gives these stand-ins, even if a compiled module exists.
_EXTENSIONS: dict[str, dict[str, Function]] = {}
# Module -> stand-ins of some of its functions. `import` gives a compiled module if one exists, which has all functions.
_PARTS: dict[str, dict[str, Function]] = {"deformable_aggregation_with_depth_ext": {}}
for _entry in FUNCTIONS:
    if _entry.module != "mx_driving":
        modules = _PARTS if "." in _entry.module else _EXTENSIONS
        modules.setdefault(_entry.module, {})[_entry.name] = stand_in(_entry)


NAMES = (*_EXTENSIONS, *_PARTS)


def _find(modules: dict[str, dict[str, Function]], name: str) -> dict[str, Any] | None:
    """Return the attributes of a module; None for other modules. A name that we lack is a function that raises when called:
    mmcv checks at import that the functions of mmcv._ext exist."""
    functions = modules.get(name, modules.get(name.rpartition(".")[2]))
    if functions is None:
        return None
    replaced = ", ".join(functions) or "deformable_aggregation_ext, which has no depth,"

    def absent(attribute: str) -> Function:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def call(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"{name}.{attribute} is not compiled; mx_driving.compat stands in for {replaced} only")

        return call

    return {**functions, "__getattr__": absent}


_LIBRARY = "MultiScaleDeformableAttention"
_INPUTS = "Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor sampling_loc, Tensor attn_weight"
_OPERATORS = {  # operators of NVIDIA TAO's library file
    f"MultiscaleDeformableAttnPlugin_TRT({_INPUTS}) -> Tensor": multi_scale_deformable_attn,
    f"DMHA_backward({_INPUTS}, Tensor grad_output, int im2col_step) -> Tensor[]": _EXTENSIONS[_LIBRARY][
        "ms_deform_attn_backward"
    ],
}


def _is_library(path: Any) -> bool:
    return os.path.basename(path).partition(".")[0] == _LIBRARY


_changes = Changes()
_libraries: list[Any] = []  # the stand-in for the library file, once a program has loaded the file
_first = MadeModules(functools.partial(_find, _EXTENSIONS))
_last = MadeModules(functools.partial(_find, _PARTS))


def install(what: str = "extensions") -> tuple[str, ...]:
    """Make imports of the extensions' names give this package's operators. A second call does nothing.

    Call `install` before the code that imports the extensions.

    Args:
        what: "extensions", or "torch_npu": `import torch_npu` gives a stand-in, whose device is the CPU.

    Returns:
        The names of the modules.

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
    for path in filter(_is_library, torch.ops.loaded_libraries):
        raise RuntimeError(f"mx_driving.compat.install must come before torch.ops.load_library loads {path}")
    if not _first.installed:
        _first.install(first=True)
        _last.install(first=False)
        original = torch.ops.load_library

        def load_library(path: Any) -> None:
            if not _is_library(path):
                original(path)
            elif not _libraries:
                _libraries.append(torch.library.Library("nvidia", "FRAGMENT"))
                for schema, function in _OPERATORS.items():
                    _libraries[0].impl(_libraries[0].define(schema), function, "CompositeImplicitAutograd")

        _changes.set(torch.ops, "load_library", load_library)
    return NAMES


def uninstall() -> None:
    """Undo every `install`, and remove the operators of stand-ins for library files. References that callers hold stay."""
    npu = sys.modules.get(f"{__package__}._vendor.npu")
    if npu is not None:
        npu.uninstall()
    _first.uninstall()
    _last.uninstall()
    _changes.undo()
    while _libraries:
        _libraries.pop()._destroy()
