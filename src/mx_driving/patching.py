"""`mx_driving.patch` and its relatives under the path of their first version."""

from ._patch import Patch, patch, patched

__all__ = ["Patch", "patch", "patched"]
