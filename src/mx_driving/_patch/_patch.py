"""Replace cores and attention modules in place, and give the originals back.

To replace a core's global name would not be enough: D-FINE's layers hold their core in an attribute, and other files import a
core by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from .._operator import rules
from ._attention import Attention, find_passed_limits
from ._code import Reader
from ._fit import Fit, reads_starts
from ._forms import MODULE
from ._layers import find_layers, list_cores
from ._parameters import unwrap
from ._recognize import FORMS, GROUPS, find_nearest, recognize
from ._replace import add_fit, find_holder, replace
from ._search import Candidate, find, find_elsewhere, find_network, is_core


@dataclass
class _Change:
    """A function or class that was changed in place, and the function that changes it back.

    `originals` has an entry for each patch that holds the change: the function or class that the patch replaced. Several module
    classes may share one forward. The change keeps the holder alive, so that no other object gets its id.
    """

    holder: Any
    undo: Callable[[], None]
    originals: list[Any] = field(default_factory=list)

    def serves(self, original: Any) -> bool:
        return any(original is other for other in self.originals)


_lock = threading.RLock()
_changes: dict[int, _Change] = {}  # id of a holder -> its change


class Patch:
    """What `patch` did.

    Attributes:
        replaced: names of the cores and attention modules that now call the operators.
        skipped: names of candidates (cores and attention modules) that keep their own code -> the reason.
        limits: names of a model's attention modules that the vendor's Atlas A2 would refuse -> the limit.
        layers: names of a model's layers that call the operators from now on, in the model's order.
    """

    def __init__(self, originals: dict[str, Any], skipped: dict[str, str], model: torch.nn.Module | None = None) -> None:
        self._holders = list(map(find_holder, originals.values()))
        self._model = type(model).__name__
        self.replaced = tuple(originals)
        self.skipped = dict(skipped)
        self.limits = find_passed_limits(model) if model is not None else {}
        self.layers: tuple[str, ...] = ()
        self._others: tuple[str, ...] = ()
        if model is not None:
            self.layers, self._others = find_layers(model, _is_replaced)

    def restore(self) -> None:
        """Give the originals back. A second call does nothing.

        An original that another patch holds stays replaced. A wrapper that other code has put over a replaced forward stays,
        and calls the original from now on.
        """
        with _lock:
            while self._holders:
                _release(self._holders.pop())

    def __repr__(self) -> str:
        lines = [f"replaced {name}" for name in self.replaced]
        lines += [f"left alone {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"the vendor's device would refuse {name}: {limit}" for name, limit in self.limits.items()]
        if total := len(self.layers) + len(self._others):
            lines.append(f"{len(self.layers)} of {total} layers of {self._model} that sample call an operator")
        lines += [f"{name or self._model} calls an operator" for name in self.layers]
        lines += [f"{name or self._model} keeps its own code" for name in self._others]
        return "\n".join(lines)


def patch(
    target: str | types.ModuleType | torch.nn.Module,
    *,
    modules: bool = True,
    forms: Mapping[Any, str] | None = None,
) -> Patch:
    """Make a library, a module or a model sample by the operators, without a change of its source.

    `patch` replaces each core (the function or class that samples) by an operator, and the attention module around it by its
    linear layers and an operator with logits. It recognizes the code of popular projects by its syntax tree, and replaces known
    code at once. It replaces an unknown core that is a pure function in plain torch and gives our outputs and gradients on
    small random examples. All other code stays: `skipped` has the reasons, and says how to name a form. An unknown attention
    module keeps its own code, which calls the replaced core. Parameters and linear layers stay. Results have the dtypes of the
    original code. If a form does not serve a call, the original code runs.

    All models of a file share its cores and module classes, so the change applies to all of them, also to models built later.

    Args:
        target: the name of a library ("transformers", "mmcv") or of any module ("models.ops.functions"), a module, or a
            model, whose classes' files are searched. If the target keeps its model in `.model`, that model is searched.
        modules: whether attention modules are replaced, too, or cores alone. A replaced module that returns its weights
            computes them separately, so the output has no gradient for these weights. With False the gradient exists.
        forms: classes and functions of unknown code -> the name of their form: `{MyAttention: "deformable_detr"}`. The form is
            tried in training and evaluation, and refused if its results differ.

    Returns:
        A `Patch`: `replaced`, `skipped`, `limits`, `layers`, `restore()`.

    Raises:
        ValueError: nothing was replaced, or `forms` names an unknown form, or code in `forms` does not have its form.
        ModuleNotFoundError: there is no such library.

    >>> import torch, mx_driving
    >>> mx_driving.patch(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: target must have a deformable sampling core of a known form; got none in Linear
    """
    named = dict(forms or {})
    for original, form in named.items():
        rules.name_of_a_form(getattr(original, "__qualname__", original), form, [*FORMS, *GROUPS])
    target = find_network(target)
    candidates = find(target, modules)
    for original, form in named.items():
        if not candidates.consider(original):
            rules.not_of_its_form(original.__qualname__, form, "it looks like no core and no attention module")
    replacements = Replacements(named, dict(candidates.unknown))
    with _lock:
        try:
            # Modules come last: in their trial they call the replaced cores, which need no compiled extension.
            for group in (candidates.cores, candidates.pools, candidates.modules):
                replacements.add(group)
            if not replacements.originals:
                rules.nothing_to_patch(_get_name(target), replacements.skipped, find_elsewhere(candidates))
            model = target if isinstance(target, torch.nn.Module) else None
            done = Patch(replacements.originals, replacements.skipped, model)
        except BaseException:
            replacements.undo()
            raise
    for name, reason in replacements.skipped.items():
        if name not in replacements.over_a_core:
            warnings.warn(f"mx_driving.patch left {name} alone: {reason}", stacklevel=2)
    return done


@contextlib.contextmanager
def patched(
    target: str | types.ModuleType | torch.nn.Module, *, modules: bool = True, forms: Mapping[Any, str] | None = None
) -> Iterator[Patch]:
    """`patch` for the length of a `with` block; the originals are back after it, even after an exception."""
    done = patch(target, modules=modules, forms=forms)
    try:
        yield done
    finally:
        done.restore()


class Replacements:
    """The replacements of one call of `patch`.

    Attributes:
        originals: name -> function or class that is replaced.
        skipped: name -> why a candidate keeps its own code.
        over_a_core: names of the skipped modules whose core is replaced.
    """

    def __init__(self, named: Mapping[Any, str], skipped: dict[str, str]) -> None:
        self._named, self._reader = named, Reader(is_core)
        self.originals: dict[str, Any] = {}
        self.skipped = skipped
        self.over_a_core: set[str] = set()

    def add(self, group: dict[str, Candidate]) -> None:
        """Recognize all candidates of a group that are not replaced already, then replace them."""
        fits: dict[str, Fit | None] = {}
        for name, candidate in group.items():
            change = _changes.get(id(find_holder(candidate.original)))
            if change and change.serves(candidate.original):
                fits[name] = None
            else:
                fit, reason = self._recognize(candidate)
                if fit is None:
                    self._skip(name, candidate, reason)
                else:
                    fits[name] = fit
        for name, fit in fits.items():
            self.originals[name] = group[name].original
            _hold(fit, group[name].original)

    def undo(self) -> None:
        Patch(self.originals, {}).restore()

    def _recognize(self, candidate: Candidate) -> tuple[Fit | None, str]:
        """Return the fit of a candidate, or the reason why it has none."""
        named = self._named.get(candidate.original, "")
        finding = recognize(candidate, self._reader, _is_replaced, named)
        if finding.fit is None and named:
            rules.not_of_its_form(candidate.original.__qualname__, named, finding.reason)
        if finding.fit is None or not isinstance(finding.fit.form, Attention):
            return finding.fit, finding.reason
        return _put_over_cores(finding.fit, named)

    def _skip(self, name: str, candidate: Candidate, reason: str) -> None:
        original = candidate.original
        if candidate.kind == MODULE and not is_core(original):
            if any(map(_is_replaced, list_cores(original))):
                self.over_a_core.add(name)
                reason += "; its core is replaced"
            if nearest := find_nearest(candidate):
                reason += f'. To replace it, try: mx_driving.patch(..., forms={{{original.__name__}: "{nearest}"}})'
        self.skipped[name] = reason


def _put_over_cores(fit: Fit, named: str) -> tuple[Fit | None, str]:
    """Return the fit of an attention module with the replaced cores that the module may call.

    Return None and a reason if the module calls a core that is not replaced.
    """
    assert fit.owner is not None
    left = [core.__qualname__ for core in fit.cores if not _is_replaced(core)]
    if left and not named:
        return None, f"it calls {left[0]}, which is not replaced"
    cores = [*fit.cores, *list_cores(fit.owner)]
    replaced = tuple(filter(_is_replaced, cores))
    return dataclasses.replace(fit, cores=replaced, starts=fit.starts and any(map(reads_starts, replaced or cores))), ""


def _is_replaced(member: Any) -> bool:
    member = unwrap(member) if isinstance(member, types.FunctionType) else member
    if not isinstance(member, types.FunctionType) and not (isinstance(member, type) and "forward" in vars(member)):
        return False
    change = _changes.get(id(find_holder(member)))
    return change is not None and change.serves(member)


def _get_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return target.__name__ if isinstance(target, types.ModuleType) else type(target).__name__


def _hold(fit: Fit | None, original: Any) -> None:
    """Replace an original. If fit is None, the original is already replaced: count one more patch that holds it."""
    holder = find_holder(original)
    change = _changes.get(id(holder))
    if change is None:
        assert fit is not None
        _changes[id(holder)] = change = _Change(holder, replace(fit, holder))
    elif fit is not None:
        add_fit(fit, holder)
    change.originals.append(original)


def _release(holder: Any) -> None:
    change = _changes[id(holder)]
    change.originals.pop()
    if not change.originals:
        del _changes[id(holder)]
        change.undo()
