"""What an operator is: its description, checks, limits, geometry, composition and decomposition. It computes nothing itself."""

from .. import _import_guard as _import_guard  # here, because nearly every module of the package imports this room first
