"""Replace cores and attention modules in place, and give the originals back.

Replacing the name that a core is defined under would not be enough: D-FINE's layers hold their core in an attribute, and other
files import theirs by name.
"""

from __future__ import annotations

import contextlib
import threading
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from .._operator import rules
from ._attention import find_passed_limits
from ._forms import MODULE, Form
from ._layers import find_layers
from ._proof import Proof
from ._replace import add_form, find_holder, replace
from ._search import find, find_elsewhere
from ._trial import choose


@dataclass
class _Change:
    """A changed object, its undo, and the things that patches hold it for: classes may share a forward."""

    holder: Any
    undo: Callable[[], None]
    things: list[Any] = field(default_factory=list)
    proofs: dict[int, Proof | None] = field(default_factory=dict)  # by the thing's id

    def serves(self, thing: Any) -> bool:
        return any(thing is other for other in self.things)


_lock = threading.RLock()
_changes: dict[int, _Change] = {}  # by the holder's id


class Patch:
    """What `patch` did.

    Attributes:
        replaced: names of the cores and attention modules that now call the operators.
        skipped: names of what looks like a core or an attention module and was left alone -> the reason.
        limits: of a model, names of its attention modules that the vendor's Atlas A2 would refuse -> the limit.
        layers: of a model, names of its layers that call the operators from now on.
        proven: names of the layers and cores whose operator gave the numbers of their own code in a call.
        kept: names of those that keep their own code in a situation -> the situation and the reason.
        uncalled: names of those that were not called yet.
    """

    def __init__(self, things: dict[str, Any], skipped: dict[str, str], model: torch.nn.Module | None = None) -> None:
        self._holders = list(map(find_holder, things.values()))
        self._proofs = [proof for thing in things.values() if (proof := _changes[id(find_holder(thing))].proofs.get(id(thing)))]
        self._model = type(model).__name__
        self.replaced = tuple(things)
        self.skipped = dict(skipped)
        self.limits = find_passed_limits(model) if model is not None else {}
        self.layers: tuple[str, ...] = ()
        self._attention_left = 0
        if model is not None:
            self._count_layers(model, list(things.values()))
            for proof in self._proofs:
                if proof.form.kind == MODULE:
                    proof.name_layers(model)

    def _count_layers(self, model: torch.nn.Module, things: list[Any]) -> None:
        calling, others = find_layers(model, things)
        self.layers, self._attention_left = tuple(calling), len(others)
        for name in others:
            kind = type(model.get_submodule(name))
            if f"{kind.__module__}.{kind.__qualname__}" not in self.skipped:
                self.skipped[name] = f"the code of its class {kind.__qualname__} names nothing that was replaced"

    @property
    def proven(self) -> tuple[str, ...]:
        return tuple(name for proof in self._proofs for name, verdicts in proof.list_verdicts() if not all(verdicts.values()))

    @property
    def kept(self) -> dict[str, str]:
        lists = [(name, verdicts) for proof in self._proofs for name, verdicts in proof.list_verdicts()]
        return {name: "; ".join(filter(None, verdicts.values())) for name, verdicts in lists if any(verdicts.values())}

    @property
    def uncalled(self) -> tuple[str, ...]:
        called = {name for proof in self._proofs for name, _ in proof.list_verdicts()}
        layers = [name for proof in self._proofs for name in proof.names.values()]
        inner = {name for name in layers if any(name.startswith(f"{layer}.") for layer in layers)}
        names = [name for name in layers if name not in inner] or [proof.name for proof in self._proofs]
        return tuple(name for name in names if name not in called)

    def restore(self) -> None:
        """Give the originals back. A second call does nothing. What another patch holds stays replaced. A wrapper that others
        have put over a replaced forward stays, and calls the original from now on."""
        with _lock:
            while self._holders:
                _release(self._holders.pop())

    def __repr__(self) -> str:
        lines = [f"replaced {name}" for name in self.replaced]
        lines += [f"left alone {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"the vendor's device would refuse {name}: {limit}" for name, limit in self.limits.items()]
        lines += [f"{name} keeps its own code {reason}" for name, reason in self.kept.items()]
        lines += [
            f"{word}: {', '.join(names)}"
            for word, names in (("proven", self.proven), ("not called yet", self.uncalled))
            if names
        ]
        if self.layers or self._attention_left:
            count, total = len(set(self.layers) - set(self.kept)), len(self.layers) + self._attention_left
            lines.append(f"{count} of {total} layers of {self._model} that sample call an operator")
        return "\n".join(lines)


def patch(target: str | types.ModuleType | torch.nn.Module, *, modules: bool = True, prove: bool = True) -> Patch:
    """Make a library, a module or a model call the operators where it samples: one line, no change of its code.

    A core (the function or class that does the sampling) is replaced by an operator, and the attention module around it by
    its linear layers and an operator with logits. Each is replaced only after it gave our outputs and gradients on a small
    random example, so a version that computes something else is left alone: it is listed in `skipped`, and a UserWarning
    says so. A module that is left alone calls its core, which is another thing, and tried by itself. Parameters, and the
    linear layers themselves, stay as they are. Autograd functions over a compiled extension are taken by name, untried;
    output and gradients keep the dtypes that their own code gives them, also under autocast. Functions that sum points into
    cells (bev_pool_v2, bev_pool, voxel_pooling) are cores, too.

    A core or a module class is shared by all models of its file, and so is the change; models built before and after are
    served alike.

    Args:
        target: the name of a library ("transformers", "mmcv") or of any module ("models.ops.functions"), a module, or a
            model, whose classes' files are searched.
        modules: whether attention modules are replaced, too, or cores alone. A replaced module that returns its weights makes
            them beside the output: take cores alone where the gradient of the output for these weights is needed.

    Returns:
        A `Patch`: `replaced`, `skipped`, `limits`, `layers`, `restore()`.

    Raises:
        ValueError: nothing was replaced.
        ModuleNotFoundError: there is no such library.

    >>> import torch, mx_driving
    >>> mx_driving.patch(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: target must have a deformable sampling core of a known form; got none in Linear
    """
    candidates = find(target, modules)
    replaced, skipped = {}, dict(candidates.unknown)
    with _lock:
        try:
            for things in candidates.turns:  # modules last, over replaced cores, so that no compiled extension is needed
                _take(things, replaced, skipped, prove)
            if not replaced:
                rules.nothing_to_patch(_get_name(target), skipped, find_elsewhere(candidates))
            done = Patch(replaced, skipped, target if isinstance(target, torch.nn.Module) else None)
        except BaseException:
            Patch(replaced, {}).restore()
            raise
    for name, reason in done.skipped.items():
        warnings.warn(f"mx_driving.patch left {name} alone: {reason}", stacklevel=2)
    return done


@contextlib.contextmanager
def patched(target: str | types.ModuleType | torch.nn.Module, *, modules: bool = True, prove: bool = True) -> Iterator[Patch]:
    """`patch` for the length of a `with` block; the originals are back after it, even after an exception."""
    done = patch(target, modules=modules, prove=prove)
    try:
        yield done
    finally:
        done.restore()


def _take(candidates: dict[str, Any], replaced: dict[str, Any], skipped: dict[str, str], prove: bool) -> None:
    """Try all that is not replaced already, then replace what agrees."""
    agreed = {}
    for name, (forms, thing) in candidates.items():
        change = _changes.get(id(find_holder(thing)))
        agreed[name] = (None, "") if change and change.serves(thing) else choose(forms, thing)
    for name, (form, reason) in agreed.items():
        if reason:
            skipped[name] = reason
        else:
            replaced[name] = candidates[name][1]
            _hold(form, replaced[name], prove)


def _get_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return target.__name__ if isinstance(target, types.ModuleType) else type(target).__name__


def _hold(form: Form | None, thing: Any, prove: bool) -> None:
    holder = find_holder(thing)
    change = _changes.get(id(holder))
    if form is not None and change is None:
        proof, undo = replace(form, holder, prove)
        _changes[id(holder)] = change = _Change(holder, undo, proofs={id(thing): proof})
    elif form is not None and change is not None:
        change.proofs[id(thing)] = add_form(form, holder, prove)
    assert change is not None
    change.things.append(thing)


def _release(holder: Any) -> None:
    change = _changes[id(holder)]
    change.things.pop()
    if not change.things:
        del _changes[id(holder)]
        change.undo()
        for proof in filter(None, change.proofs.values()):
            proof.forget()
