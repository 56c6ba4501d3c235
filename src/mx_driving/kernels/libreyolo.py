"""The operator in LibreYOLO's registry of kernels, in the slot `ms_deform_attn`. LibreYOLO's own kernels serve CUDA alone.

    mx_driving.kernels.libreyolo.register()

Eager models of ten families then call the operator, on CPUs and CUDA GPUs, in every dtype, and with gradients. LibreYOLO
ignores the slot while a model is compiled or exported, and if levels have different numbers of points: use
`mx_driving.patch` there. `LIBREYOLO_KERNELS=off` switches back, and
`libreyolo.kernels.unregister("ms_deform_attn", "mx_driving")` undoes `register`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from .._operator import geometry
from ..ops.multi_scale_deformable_attn import multi_scale_deformable_attn

__all__ = ["ms_deform_attn", "register"]

_SLOT, _NAME = "ms_deform_attn", "mx_driving"
_DEVICES = ("cpu", "cuda")
_NEEDED = 'mx_driving.kernels.libreyolo.register needs a libreyolo with a registry of kernels: pip install "libreyolo>=1.5"'


def ms_deform_attn(value: Tensor, spatial_shapes: Any, sampling_locations: Tensor, attention_weights: Tensor) -> Tensor | None:
    """Return `mx_driving.multi_scale_deformable_attn` of the slot's arguments. Compute the starts of levels from the shapes.

    Return None on other devices and for other axes: LibreYOLO then runs its own code.
    """
    tensors = value, sampling_locations, attention_weights
    if [t.dim() for t in tensors] != [4, 6, 5] or {t.device.type for t in tensors} - set(_DEVICES):
        return None
    shapes = torch.as_tensor(spatial_shapes, device=value.device)
    starts = geometry.starts_of(shapes)
    return multi_scale_deformable_attn(value, shapes, starts, sampling_locations, attention_weights)


def register() -> None:
    """Let LibreYOLO use the operator from now on, before its own kernels.

    Raises:
        RuntimeError: `libreyolo` is not installed, or has no registry.
    """
    try:
        kernels = importlib.import_module("libreyolo.kernels")
    except ModuleNotFoundError as missing:
        if missing.name not in ("libreyolo", "libreyolo.kernels"):
            raise
        raise RuntimeError(_NEEDED) from None
    kernels.resolve(_SLOT)  # makes LibreYOLO register its own kernels before ours: the newest kernel goes first
    kernels.unregister(_SLOT, _NAME)
    kernels.register(_SLOT, ms_deform_attn, name=_NAME)
    kernels.clear_cache()  # LibreYOLO 1.6 remembers the first lookup of a slot, even a lookup that found no kernel
