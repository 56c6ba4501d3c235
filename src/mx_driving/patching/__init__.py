"""Puts the operators in the place of the sampling cores of other people's models, and gives the originals back."""

from ._patch import Patch, patch, patched

__all__ = ["Patch", "patch", "patched"]
