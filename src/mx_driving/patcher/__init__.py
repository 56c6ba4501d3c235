"""The vendor's names for patching a model's libraries, except for names that have no meaning without the vendor's device.

`msda` is `mx_driving.patch`; `numpy_type` and `patch_mmcv_version` mend old libraries. Patches that only speed a library
up on the device, and patches that this package lacks, warn and leave the library unchanged. Other names raise an error.

    from mx_driving.patcher import Patch, PatcherBuilder, index, msda

    with PatcherBuilder().add_module_patch("mmcv", Patch(msda)).add_module_patch("torch", Patch(index)).build():
        ...  # train
"""

from __future__ import annotations

from typing import Any

from .. import _import_guard as _import_guard
from . import _patcher, distribute, functions, mmcv, mmdet, mmdet3d, numpy, nuscenes, optimizer, patcher, tensor  # noqa: F401
from ._patcher import *  # noqa: F403

__all__: list[str] = []
__all__ += _patcher.__all__


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    raise AttributeError(
        f"mx_driving.patcher.{name} is the vendor's, for its device; this package has {', '.join(__all__[:3])} "
        "and the patches that the page on the vendor's names lists"
    )
