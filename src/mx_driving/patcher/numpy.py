"""The vendor's path of its patches of numpy."""

from ._patcher import numpy_type

__all__ = ["numpy_type"]
