"""The vendor's path of its classes."""

from ._patcher import Patch, Patcher, PatcherBuilder

__all__ = ["Patch", "Patcher", "PatcherBuilder"]
