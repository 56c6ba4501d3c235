"""Reversible monkey-patching: attributes, and modules without files."""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Callable
from typing import Any

_ABSENT = object()


class Changes:
    """Sets attributes and remembers their former values. `undo` restores these."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Restore all attributes, in reverse order. Delete an attribute that the owner did not have itself before `set`."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)


@dataclasses.dataclass(eq=False)
class MadeModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder of modules without a file. `contents(name)` returns a module's attributes, or None for other names."""

    contents: Callable[[str], dict[str, Any] | None]
    packages: bool = False

    def find_spec(self, fullname: str, path: Any = None, target: types.ModuleType | None = None):
        if self.contents(fullname) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, origin="mx_driving.compat", is_package=self.packages)

    def exec_module(self, module: types.ModuleType) -> None:
        vars(module).update(self.contents(module.__name__) or {})

    @property
    def installed(self) -> bool:
        return self in sys.meta_path

    def install(self, *, first: bool) -> None:
        """Put the finder before all other finders, or after them."""
        sys.meta_path.insert(0 if first else len(sys.meta_path), self)

    def uninstall(self) -> None:
        """Remove our finder, and its modules from sys.modules. References that callers hold stay."""
        if self.installed:
            sys.meta_path.remove(self)
        for name, module in list(sys.modules.items()):
            if getattr(getattr(module, "__spec__", None), "loader", None) is self:
                del sys.modules[name]
