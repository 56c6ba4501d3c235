"""The vendor's import path for patches of mmcv's scatter."""

from ._patcher import stream

__all__ = ["stream"]
