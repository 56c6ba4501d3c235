"""Replaces cores and gives them back. A core is changed in place, so code that imported it earlier calls the operator, too.

A module class gets another forward, an autograd function other methods, a plain function another `__code__`. It would not be
enough to replace the name that a core is defined under: D-FINE's layers hold theirs in an attribute, and other files import
theirs by name.
"""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import _check
from . import _autograd
from ._forms import FUNCTION, MODULE, Form
from ._search import find
from ._trial import objection


@dataclass
class _Change:
    """A replaced core (kept, so that no other object gets its id), how to undo that, and how many patches hold it."""

    core: Any
    undo: Callable[[], None]
    holders: int = 0


_lock = threading.RLock()
_changes: dict[int, _Change] = {}  # by the core's id


class Patch:
    """What `patch` did.

    Attributes:
        replaced: names of the cores that now call the operators.
        skipped: names of things that look like a core and were left alone -> the reason.
    """

    def __init__(self, cores: dict[str, Any], skipped: dict[str, str]) -> None:
        self._cores = list(cores.values())
        self.replaced = tuple(cores)
        self.skipped = dict(skipped)

    def restore(self) -> None:
        """Give the originals back. A second call does nothing. A core that another patch holds stays replaced."""
        with _lock:
            while self._cores:
                _release(self._cores.pop())

    def __repr__(self) -> str:
        lines = [f"replaced {name}" for name in self.replaced]
        lines += [f"left alone {name}: {reason}" for name, reason in self.skipped.items()]
        return "\n".join(lines)


def patch(target: str | types.ModuleType | torch.nn.Module) -> Patch:
    """Make a library, a module or a model call the operators where it samples: one line, no change of its code.

    A core (the function or class that does the sampling) is replaced only after it gave the operator's outputs and
    gradients on a small random example, so a version that computes something else is left alone: it is listed in
    `skipped`, and a UserWarning says so. Autograd functions over a compiled extension are taken by name, untried; output and
    gradients keep the dtypes that their own code gives them, also under autocast.

    A core is shared by all models of its file, and so is the change; models built before and after are served alike.

    Args:
        target: the name of a library ("transformers", "mmcv") or of any module ("models.ops.functions"), a module, or a
            model, whose classes' files are searched.

    Returns:
        A `Patch`: `replaced`, `skipped`, `restore()`.

    Raises:
        ValueError: nothing was replaced.
        ModuleNotFoundError: there is no such library.

    >>> import torch, mx_driving
    >>> mx_driving.patch(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: target must have a deformable sampling core of a known form; got none in Linear
    """
    found = find(target)
    with _lock:
        reasons = {name: objection(form, core) for name, (form, core) in found.cores.items() if id(core) not in _changes}
        skipped = {**found.unknown, **{name: why for name, why in reasons.items() if why is not None}}
        chosen = {name: entry for name, entry in found.cores.items() if name not in skipped}
        if not chosen:
            _check.nothing_to_patch(_called(target), skipped)
        for form, core in chosen.values():
            _hold(form, core)
    for name, reason in skipped.items():
        warnings.warn(f"mx_driving.patch left {name} alone: {reason}", stacklevel=2)
    return Patch({name: core for name, (_, core) in chosen.items()}, skipped)


@contextlib.contextmanager
def patched(target: str | types.ModuleType | torch.nn.Module) -> Iterator[Patch]:
    """`patch` for the length of a `with` block; the originals are back after it, even after an exception."""
    done = patch(target)
    try:
        yield done
    finally:
        done.restore()


def _called(target: Any) -> str:
    if isinstance(target, str):
        return target
    return target.__name__ if isinstance(target, types.ModuleType) else type(target).__name__


def _hold(form: Form, core: Any) -> None:
    if id(core) not in _changes:
        _changes[id(core)] = _Change(core, _replace(form, core))
    _changes[id(core)].holders += 1


def _release(core: Any) -> None:
    change = _changes[id(core)]
    change.holders -= 1
    if change.holders == 0:
        del _changes[id(core)]
        change.undo()


def _replace(form: Form, core: Any) -> Callable[[], None]:
    """Change the core; the function returned changes it back."""
    if form.kind == FUNCTION:
        original, core.__code__ = core.__code__, form.replacement.__code__
        return lambda: setattr(core, "__code__", original)
    changed = {"forward": form.replacement} if form.kind == MODULE else _autograd.methods(form.replacement, core)
    before = {name: vars(core).get(name) for name in changed}  # None for `apply`, which is inherited
    for name, method in changed.items():
        setattr(core, name, method)
    return lambda: _give_back(core, before)


def _give_back(core: Any, before: dict[str, Any]) -> None:
    for name, own in before.items():
        if own is None:
            delattr(core, name)
        else:
            setattr(core, name, own)
