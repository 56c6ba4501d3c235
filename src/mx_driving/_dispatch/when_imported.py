"""Runs a registration right after a slow torch module is imported, so that we need not import it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any


def when_imported(name: str, action: Callable[[], None]) -> None:
    """Calls `action` now if the module is imported already, and right after its import otherwise."""
    if name in sys.modules:
        action()
    else:
        sys.meta_path.insert(0, _Waiting(name, action))  # pyright: ignore


class _Waiting:
    """An import finder that waits for one module. Other finders find the module; this one adds the action."""

    def __init__(self, name: str, action: Callable[[], None]):
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != self.name:
            return None
        sys.meta_path.remove(self)  # pyright: ignore
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_tell(module: Any) -> None:
            execute(module)
            self.action()

        spec.loader.exec_module = execute_and_tell  # type: ignore[method-assign]
        return spec
