"""The vendor's import path for patches of numpy."""

from ._patcher import numpy_type

__all__ = ["numpy_type"]
