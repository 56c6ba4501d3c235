"""The vendor's import path for patches of mmcv."""

from ._patcher import dc, mdc, msda, patch_mmcv_version

__all__ = ["dc", "mdc", "msda", "patch_mmcv_version"]
