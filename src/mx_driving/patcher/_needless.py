"""Patches of the vendor's that have nothing to do without its device."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from typing import Any

ABSENT = "is not in this package; the library's own code serves"
FASTER = "only makes it faster on an Ascend device"


def leaves(name: str, reason: str, path: str) -> Callable[[types.ModuleType, dict[str, Any]], None]:
    """A patch called `name`, of the module `path`, that leaves the library as it is and says why."""

    def patch(module: types.ModuleType, options: dict[str, Any]) -> None:
        warnings.warn(f"mx_driving.patcher leaves {module.__name__} as it is: {name} {reason}", stacklevel=3)

    patch.__name__ = patch.__qualname__ = name
    patch.__module__ = path
    return patch
