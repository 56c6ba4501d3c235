"""Replace the sampling cores of other libraries' models by our operators, and put the originals back."""

from ._patch import Patch, patch, patched

__all__ = ["Patch", "patch", "patched"]
