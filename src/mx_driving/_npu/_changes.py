"""Attributes of others that were replaced, so that they can be given back."""

from __future__ import annotations

from typing import Any

_ABSENT = object()


class Changes:
    """Sets attributes and remembers what was there."""

    def __init__(self) -> None:
        self._before: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        self._before.append((owner, name, vars(owner).get(name, _ABSENT)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Give all of them back, the last one first. What a class inherited is inherited again."""
        while self._before:
            owner, name, value = self._before.pop()
            if value is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, value)
