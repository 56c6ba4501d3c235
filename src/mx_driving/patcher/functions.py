"""The vendor's import path of patches of mmcv's scatter."""

from ._patcher import stream

__all__ = ["stream"]
