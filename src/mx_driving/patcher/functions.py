"""The vendor's path of its patches of mmcv's scatter."""

from ._patcher import stream

__all__ = ["stream"]
