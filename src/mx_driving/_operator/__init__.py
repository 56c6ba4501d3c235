"""The definition of the operators: descriptions, checks, limits, geometry and composition. There are no kernels here."""

from .. import _import_guard as _import_guard  # here, because nearly every module imports `_operator` first
