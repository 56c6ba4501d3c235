"""Replaces the sampling cores of other libraries' models by the operators, and gives the originals back."""

from ._patch import Patch, patch, patched

__all__ = ["Patch", "patch", "patched"]
