"""The vendor's import path for Patch, Patcher and PatcherBuilder."""

from ._patcher import Patch, Patcher, PatcherBuilder

__all__ = ["Patch", "Patcher", "PatcherBuilder"]
