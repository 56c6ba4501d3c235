"""The vendor's patch of mmcv's scatter."""

from ._needless import leaves

__all__ = ["stream"]

stream = leaves("stream", "is for streams of an Ascend device", __name__)
