"""The vendor's path of its patches of mmcv's scatter."""

from .._vendor.patcher import stream

__all__ = ["stream"]
