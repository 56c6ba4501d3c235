"""Replace cores and attention modules in place, and put the originals back.

To assign another function to a core's global name would not be enough: D-FINE's layers hold their core in an attribute, and
other files import a core by its name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import pathlib
import sys
import threading
import types
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch

from .._operator import rules
from ._attention import Attention, find_passed_limits
from ._code import KERNELS, Reader
from ._compare import compare_runs
from ._forms import MODULE
from ._parameters import find_wrapper, is_autograd, unwrap
from ._replace import Change, Fit, find_holder, reads_starts
from ._search import Candidate, Candidates, find, find_elsewhere, find_layers, find_marked, find_network, is_core, list_cores
from ._trial import FORMS, GROUPS, Finding, find_nearest, recognize

_lock = threading.RLock()
_changes: dict[int, Change] = {}  # id of a holder -> its change


class Patch:
    """What `patch` did.

    Attributes:
        replaced: names of the cores and attention modules that now call the operators.
        skipped: names of candidates (cores and attention modules) that keep their own code, and of Python modules without a
            candidate -> the reason.
        limits: names of a model's attention modules that the vendor's Atlas A2 would refuse -> the limit.
        layers: names of a model's layers that are replaced, in the model's order; after a check, those that called an operator.
        checked: what a check found, in a sentence; "" without a check.
    """

    def __init__(self, originals: dict[str, Any], skipped: dict[str, str], model: torch.nn.Module | None = None) -> None:
        self._held = [(_changes[id(find_holder(original))], original) for original in originals.values()]
        self._model = type(model).__name__
        self.replaced = tuple(originals)
        self.skipped = dict(skipped)
        self.limits = find_passed_limits(model) if model is not None else {}
        self.layers: tuple[str, ...] = ()
        self.checked = ""
        self._others: tuple[str, ...] = ()
        if model is not None:
            self.layers, self._others = find_layers(model, _is_served)

    def restore(self) -> None:
        """Put the originals back. A second call does nothing.

        An original that another patch holds stays replaced. A wrapper that other code has put over a replaced forward stays,
        and calls the original from now on. Code that an editor's reload has put into a replaced function stays, too.
        """
        with _lock:
            while self._held:
                change, original = self._held.pop()
                change.originals.remove(original)
                if not change.originals and _changes.get(id(change.holder)) is change:
                    del _changes[id(change.holder)]
                    change.use(own=True)

    def __repr__(self) -> str:
        said, other = ("called an operator", "did not") if self.checked else ("replaced", "keeps its own code")
        lines = [f"replaced {name}" for name in self.replaced]
        lines += [f"left alone {name}: {reason}" for name, reason in self.skipped.items()]
        lines += [f"the vendor's device would refuse {name}: {limit}" for name, limit in self.limits.items()]
        if total := len(self.layers) + len(self._others):
            verb = said if self.checked else f"are {said}"
            lines.append(f"{len(self.layers)} of {total} layers of {self._model} that sample {verb}")
        lines += [f"{name or self._model} {said if self.checked else f'is {said}'}" for name in self.layers]
        lines += [f"{name or self._model} {other}" for name in self._others]
        return "\n".join([*lines, self.checked] if self.checked else lines)


def patch(
    target: str | types.ModuleType | torch.nn.Module,
    *,
    modules: bool = True,
    forms: Mapping[Any, str] | None = None,
    check: Any = None,
) -> Patch:
    """Make a library, a module or a model sample by the operators, without a change of its source.

    `patch` replaces each core (the function or class that samples) by an operator, and the attention module around it by its
    linear layers and an operator with logits. It replaces code that it knows, or that `forms` names. It knows the code of
    popular projects by its syntax tree and by all objects that the code reaches. All other code stays: `skipped` has the
    reasons, and the call of `patch` to try. An unknown attention module keeps its own code, which calls the replaced core.
    Parameters and linear layers stay. Results have the dtypes of the original code. If a form does not serve a call, or if an
    object that the code reaches has changed since, the original code runs.

    All models of a file share its cores and module classes, so the change applies to all of them, also to models built later.

    Args:
        target: the name of a library ("transformers", "mmcv") or of any module ("models.ops.functions"), a module, or a
            model, whose classes' files are searched. If the target keeps its model in `.model`, that model is searched.
        modules: whether to replace attention modules, too, or cores alone. A replaced module that returns its attention weights
            computes them separately, so the output has no gradient with respect to the returned weights. With False it has one.
        forms: classes and functions of unknown code -> the name of their form: `{MyAttention: "deformable_detr"}`, or
            `{my_core: "core"}`. The form is tried on small examples, outputs and gradients, in training and evaluation, and
            refused if its results differ.
        check: inputs of the model: a tuple of arguments, a dict of keyword arguments, or (arguments, keyword arguments). The
            model runs once with its own code and once patched, in evaluation mode, without gradients, with the same random
            state. The model's buffers and torch's random state are restored. `checked` says how far the outputs agree, and
            `layers` which layers called an operator.

    Returns:
        A `Patch`: `replaced`, `skipped`, `limits`, `layers`, `checked`, `restore()`.

    Raises:
        ValueError: nothing was replaced, or `forms` names an unknown form, or code in `forms` does not have its form, or the
            outputs of the check differ by more than rounding. Nothing is replaced then.
        TypeError: `check` is given, and the target is not a model.
        ModuleNotFoundError: there is no such library.

    >>> import torch, mx_driving
    >>> mx_driving.patch(torch.nn.Linear(2, 2))
    Traceback (most recent call last):
        ...
    ValueError: target must have a deformable sampling core of a known form; got none in Linear
    """
    named = dict(forms or {})
    for original, form in named.items():
        if form not in (names := [*FORMS, *GROUPS]):
            fact = f"{form!r} for {getattr(original, '__qualname__', original)}"
            rules.fail(ValueError, "forms", f"name a form of {', '.join(names)}", fact)
    target = find_network(target)
    model = target if isinstance(target, torch.nn.Module) else None
    if check is not None and model is None:
        rules.fail(TypeError, "target", "be a model if check is given", _get_name(target))
    with _lock:
        for change in list(_changes.values()):  # Forget a change if an editor's reload has put new code into the function.
            if not change.holds:
                change.use(own=True)
                del _changes[id(change.holder)]
        candidates = find(target, modules)
        for original, form in named.items():
            if not candidates.consider(original):
                _refuse(original, form, "it looks like no core and no attention module")
        replacements = Replacements(named, dict(candidates.unknown))
        try:
            # Modules come last: in their trial they call the replaced cores, which need no compiled extension.
            for group in ({**candidates.cores, **candidates.pools}, candidates.modules):
                replacements.add(group)
            if not replacements.originals:
                remark = "".join(f"; {core}: {reason}" for core, reason in replacements.skipped.items())
                if elsewhere := find_elsewhere(candidates):
                    remark += f"; it takes its own from {' and '.join(elsewhere)}: patch that"
                rule = "have a deformable sampling core of a known form"
                rules.fail(ValueError, "target", rule, f"none in {_get_name(target)}{remark}")
            done = Patch(replacements.originals, replacements.skipped, model)
            kinds = [o for o in replacements.originals.values() if isinstance(o, type) and issubclass(o, torch.nn.Module)]
            layers = [model.get_submodule(name) for name in done.layers] if model is not None else []
            _patch_in_workers({*kinds, *map(type, layers)}, modules, named)
            if check is not None:
                names = (*done.layers, *done._others)
                agreement, called, ran = compare_runs(model, check, names, [*_changes.values()])
                done.layers = tuple(name for name in names if name in called)
                done._others = tuple(name for name in names if name not in called)
                total, own = len(names), len(ran - called)
                done.checked = f"{agreement}; {len(called)} of {total} layers called an operator, {own} ran their own code"
        except BaseException:
            Patch(replacements.originals, {}).restore()
            raise
    for name, reason in replacements.skipped.items():
        if name not in replacements.over_a_core:
            warnings.warn(f"mx_driving.patch left {name} alone: {reason}", stacklevel=2)
    return done


@contextlib.contextmanager
def patched(
    target: str | types.ModuleType | torch.nn.Module,
    *,
    modules: bool = True,
    forms: Mapping[Any, str] | None = None,
    check: Any = None,
) -> Iterator[Patch]:
    """Call `patch` for a `with` block, and put the originals back after the block, even after an exception."""
    done = patch(target, modules=modules, forms=forms, check=check)
    try:
        yield done
    finally:
        done.restore()


@dataclass
class Replacements:
    """The replacements of one call of `patch`.

    Attributes:
        named: classes and functions -> the form that the caller names.
        originals: name -> function or class that is replaced.
        skipped: name -> why a candidate keeps its own code.
        over_a_core: names of the skipped modules whose core is replaced.
    """

    named: Mapping[Any, str]
    skipped: dict[str, str]
    originals: dict[str, Any] = field(default_factory=dict)
    over_a_core: set[str] = field(default_factory=set)
    reader: Reader = field(default_factory=lambda: Reader(is_core))

    def add(self, group: dict[str, Candidate]) -> None:
        """Recognize all candidates of a group that are not replaced already, then replace them."""
        fits: dict[str, Fit | None] = {}
        for name, candidate in group.items():
            original, named = candidate.original, self.named.get(candidate.original, "")
            if _is_replaced(original):
                fits[name] = None
                continue
            finding = recognize(candidate, self.reader, named)
            fit, reason = finding.fit, finding.reason
            if fit is None and named:
                _refuse(original, named, reason)
            for core in list_cores(original) if fit is not None and isinstance(fit.form, Attention) else ():
                if wrapper := find_wrapper(core):
                    fit, reason = None, f"its core {core.__qualname__} is wrapped by {wrapper}"
                    break
            if fit is None:
                self._skip(name, candidate, reason)
            else:
                fits[name] = fit
        # A fit notices changes of the cores that its code calls. So replace these cores first.
        while fits:
            waiting = {id(group[name].original) for name in fits}
            called = {n: [c for c in fit.code.cores if c is not group[n].original] if fit else [] for n, fit in fits.items()}
            for name in [name for name in fits if not any(id(core) in waiting for core in called[name])] or [*fits]:
                fit, original = fits.pop(name), group[name].original
                # Skip known code that calls a core that is not replaced. Do not skip named code: its trial has called the core.
                kept = [c for c in called[name] if not (c.__module__.startswith(KERNELS) or _is_replaced(c))]
                if kept and original not in self.named:
                    self._skip(name, group[name], f"it calls {kept[0].__qualname__}, which is not replaced")
                    continue
                self.originals[name] = original
                holder = find_holder(original)
                change = _changes.get(id(holder))
                if fit is not None and isinstance(fit.form, Attention):
                    fit = _put_over_cores(fit, original in self.named)
                if change is None:
                    assert fit is not None
                    _changes[id(holder)] = change = Change(fit, holder)
                elif fit is not None:
                    change.add(fit)
                change.originals.append(original)

    def _skip(self, name: str, candidate: Candidate, reason: str) -> None:
        original = candidate.original
        if candidate.kind == MODULE and not is_core(original):
            cores = list_cores(original)
            if any(map(_is_replaced, cores)):
                self.over_a_core.add(name)
                reason += "; its core is replaced"
        if form := find_nearest(candidate):
            reason += f'. To replace it, try: mx_driving.patch(..., forms={{{original.__name__}: "{form}"}})'
        self.skipped[name] = reason


def _refuse(original: Any, form: str, reason: str) -> NoReturn:
    fact = f"{form!r} for {original.__qualname__}: {reason}"
    rules.fail(ValueError, "forms", "name the form that a class or function has", fact)


def survey(target: Any) -> tuple[list[Finding], dict[str, str]]:
    """Return the findings for all candidates of a package, a module or a folder, and `Candidates.unknown`.

    Unknown cores and attention modules are tried. `make known` prints the findings as entries of known.jsonl.
    """
    candidates = Candidates(True)
    folder, arguments = pathlib.Path(str(target)), sys.argv
    if not folder.is_dir():
        candidates = find(target, True)
    else:
        sys.path.insert(0, str(folder.resolve()))
        for module_name in find_marked([folder], "**/*.py", ""):
            sys.argv = [module_name]  # An imported file may parse sys.argv.
            try:
                with contextlib.redirect_stdout(sys.stderr):  # Standard output is for our results.
                    candidates.search(importlib.import_module(module_name))
            except (Exception, SystemExit) as error:  # The import of an unknown file may raise anything.
                candidates.unknown[module_name] = f"it cannot be imported: {type(error).__name__}: {error}"
            finally:
                sys.argv = arguments
    replacements, findings = Replacements({}, {}), []
    try:
        # In a trial, modules call the replaced cores, which need no compiled extension.
        for group in ({**candidates.cores, **candidates.pools}, candidates.modules):
            findings += [recognize(candidate, replacements.reader, tries_all=True) for candidate in group.values()]
            replacements.add(group)
    finally:
        Patch(replacements.originals, {}).restore()
    return findings, candidates.unknown


def _put_over_cores(fit: Fit, is_named: bool) -> Fit:
    """Return the fit of an attention module, with the cores that the module may call: its replaced cores. If a user names the
    module's form, the module may call all its cores, because the trial called them.

    A module ignores level_start_index if its core does. On a CPU a module calls its core in plain torch, if it has such a core.
    """
    assert fit.owner is not None
    cores = [*fit.cores, *list_cores(fit.owner)]
    replaced = tuple(core for core in dict.fromkeys(cores) if is_named or _is_replaced(core))
    plain = [core for core in replaced if not is_autograd(core)]
    code = fit.code
    for core in filter(_is_replaced, replaced):
        code = code.join(_changes[id(find_holder(core))].code)
    starts = fit.starts and any(map(reads_starts, replaced or cores))
    starts_on_cpu = starts and any(map(reads_starts, plain or replaced or cores))
    return dataclasses.replace(fit, code=code, cores=replaced, starts=starts, starts_on_cpu=starts_on_cpu)


def _find_change(member: Any) -> Change | None:
    """Return the change of a function or class, or None if there is no change."""
    member = unwrap(member) if isinstance(member, types.FunctionType) else member
    if not isinstance(member, types.FunctionType) and not (isinstance(member, type) and "forward" in vars(member)):
        return None
    return _changes.get(id(find_holder(member)))


def _is_replaced(member: Any) -> bool:
    member = unwrap(member) if isinstance(member, types.FunctionType) else member
    change = _find_change(member)
    return change is not None and any(member is original for original in change.originals)


def _is_served(member: Any, layer: Any) -> bool:
    """Return whether a function or class is replaced, and answers the call of a layer by an operator."""
    change = _find_change(member)
    return change is not None and change.holds and any(serves(layer) for serves in change.serving)


def _is_layer_replaced(layer: Any) -> bool:
    """Return whether a layer's forward is replaced, or a core whose name is in the code of the layer's class."""
    return any(map(_is_replaced, [*type(layer).__mro__[:-1], *list_cores(type(layer))]))


def _patch_in_workers(kinds: Iterable[type], modules: bool, forms: Mapping[Any, str]) -> None:
    """Let a worker process call `patch` with these options when it gets a layer of these classes that is replaced here.

    A spawned worker imports the model's file anew, so nothing is replaced there. Register a reducer of each class for the
    pickler of multiprocessing, torch.multiprocessing and DataLoader. Other pickles (torch.save, cloudpickle) do not change.
    """
    for kind in kinds:
        names = tuple(
            dict.fromkeys(
                base.__module__
                for base in kind.__mro__
                if issubclass(base, torch.nn.Module) and base.__module__.partition(".")[0] != "torch"
            )
        )

        def reduce(layer: Any, names: tuple[str, ...] = names) -> Any:
            make, arguments, *state = layer.__reduce_ex__(2)
            if not _is_layer_replaced(layer):
                return make, arguments, *state
            return _make_patched, (make, arguments, names, modules, dict(forms)), *state

        ForkingPickler.register(kind, reduce)


def _make_patched(make: Any, arguments: Any, names: Iterable[str], modules: bool, forms: Mapping[Any, str]) -> Any:
    """Make a layer in a worker. If it is not replaced in this process yet, patch the modules with these names."""
    layer = make(*arguments)
    if not _is_layer_replaced(layer):
        for name in names:
            patch(importlib.import_module(name), modules=modules, forms=forms)
    return layer


def _get_name(target: Any) -> str:
    if isinstance(target, str):
        return target
    return target.__name__ if isinstance(target, types.ModuleType) else type(target).__name__
