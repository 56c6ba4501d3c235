"""The vendor's names for patching a model's libraries, as far as they mean something without its device.

`msda` is `mx_driving.patch`; `numpy_type` and `patch_mmcv_version` mend old libraries. Patches that only make a library faster
on the device, or that this package has not, leave the library as it is and say so in a warning. Other names are refused.

    from mx_driving.patcher import Patch, PatcherBuilder, index, msda

    with PatcherBuilder().add_module_patch("mmcv", Patch(msda)).add_module_patch("torch", Patch(index)).build():
        ...  # train
"""

from __future__ import annotations

from typing import Any

from .. import _import_guard as _import_guard
from .distribute import ddp, ddp_forward
from .functions import stream
from .mmcv import dc, mdc, msda, patch_mmcv_version
from .mmdet import pseudo_sampler, resnet_add_relu, resnet_fp16, resnet_maxpool
from .mmdet3d import nuscenes_dataset, nuscenes_metric
from .numpy import numpy_type
from .nuscenes import nuscenes_mot_metric
from .optimizer import optimizer_hooks, optimizer_wrapper
from .patcher import Patch, Patcher, PatcherBuilder
from .tensor import batch_matmul, index

__all__ = [
    "Patch",
    "Patcher",
    "PatcherBuilder",
    "batch_matmul",
    "dc",
    "ddp",
    "ddp_forward",
    "default_patcher",
    "default_patcher_builder",
    "index",
    "mdc",
    "msda",
    "numpy_type",
    "nuscenes_dataset",
    "nuscenes_metric",
    "nuscenes_mot_metric",
    "optimizer_hooks",
    "optimizer_wrapper",
    "patch_mmcv_version",
    "pseudo_sampler",
    "resnet_add_relu",
    "resnet_fp16",
    "resnet_maxpool",
    "stream",
]

# those of the vendor's that do something here
default_patcher_builder = (
    PatcherBuilder().add_module_patch("mmcv.ops", Patch(msda)).add_module_patch("numpy", Patch(numpy_type))
)
default_patcher = default_patcher_builder.build()


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"mx_driving.patcher.{name} is the vendor's, for its device; this package has {', '.join(__all__[:3])} "
        "and the patches that the page on the vendor's names lists"
    )
