"""The vendor's patches of mmcv."""

from __future__ import annotations

import importlib
import types
from typing import Any

from .._patch import patch
from ._needless import ABSENT, leaves

__all__ = ["dc", "mdc", "msda", "patch_mmcv_version"]

dc = leaves("dc", ABSENT, __name__)
mdc = leaves("mdc", ABSENT, __name__)


def msda(module: types.ModuleType, options: dict[str, Any]) -> None:
    """`mx_driving.patch` of the module: what samples in it calls the operators."""
    patch(module.__name__)


def patch_mmcv_version(expected_version: str) -> None:
    """Import mmdet and mmdet3d while mmcv says that it is of the version they expect. Nothing where one is not installed."""
    try:
        mmcv: Any = importlib.import_module("mmcv")
    except ImportError:
        return
    own, mmcv.__version__ = mmcv.__version__, expected_version
    try:
        for name in ("mmdet", "mmdet3d"):
            importlib.import_module(name)
    except ImportError:
        pass
    finally:
        mmcv.__version__ = own
