"""The vendor's import path of patches of numpy."""

from ._patcher import numpy_type

__all__ = ["numpy_type"]
