"""The vendor's patch of numpy."""

from __future__ import annotations

import types
from typing import Any

__all__ = ["numpy_type"]


def numpy_type(np: types.ModuleType, options: dict[str, Any]) -> None:
    """Give numpy the names of Python's types back that it had before 1.24: np.bool, np.int, np.float and the like."""
    for kind in (bool, int, float, complex, object, str):
        if kind.__name__ not in vars(np):
            setattr(np, kind.__name__, kind)
