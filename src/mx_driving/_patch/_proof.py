"""Prove a replacement on the caller's own calls.

A trial on a small example finds the form of a core or of an attention module. Whether a layer computes what the form says may
depend on its state, on its inputs and on the process, and no list of reasons is complete. The first call of a layer in a
situation therefore runs the original for the caller, then both on copies of the inputs, and compares outputs and gradients.
Where they agree, later calls of the situation run the operator. Where they differ, the layer keeps its own code.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ._comparison import Comparison, answer_in, has_saved_tensors_hooks
from ._parameters import STAND_IN
from ._situations import READS, Arguments, can_compare, describe, describe_untraced, is_exporting, list_sizes, spell, write_look
from ._snapshot import VERDICTS
from ._state import State

_is_traced_by_dynamo = torch.compiler.is_dynamo_compiling
_MOST_STATES = 16  # a layer whose attributes change in each call would be compared in each call
_MOST_CALLS = 4096
_LONGEST = 60  # seconds that a call waits for the comparison of another thread
_numbers = itertools.count()
_proving = threading.RLock()
_known: weakref.WeakValueDictionary[str, Verdict] = weakref.WeakValueDictionary()
_told: set[str] = set()  # keys of proofs


class Trials(threading.local):
    """Whether a trial of another class runs: it calls the layer, too, and proves nothing of it."""

    running = False


trials = Trials()


class Verdict:
    """What became of the comparisons of a layer in a situation. It is proven where `reason` is empty."""

    def __init__(self, comparison: Comparison, sizes: Sequence[Any], layer: Any, called: Sequence[str]) -> None:
        self.reason, self.dtypes = comparison.reason, comparison.dtypes
        self.states = [] if self.reason else [State(layer, called)]  # they keep what the layer drops
        self.low, self.high = list(sizes), list(sizes)
        self.owner = None if layer is None else weakref.ref(layer)
        self.key = str(next(_numbers))  # torch.compile makes a number a variable
        _known[self.key] = self

    def is_of(self, layer: Any) -> bool:
        """Return whether the layer is as it was in a comparison."""
        if self.states[0].is_of(layer):
            return True
        found = next((state for state in self.states if state.is_of(layer)), None)
        if found is not None:
            self.states.remove(found)
            self.states.insert(0, found)
        return found is not None

    def covers(self, sizes: Sequence[Any], layer: Any) -> bool:
        """Return whether nothing is left to compare."""
        is_inside = len(sizes) == len(self.low) and all(map(_is_between, self.low, sizes, self.high))
        return bool(self.reason) or (is_inside and self.is_of(layer))

    def add(self, other: Verdict, layer: Any) -> None:
        """Take over a further comparison in the same situation."""
        if not other.reason and not (self.states and self.is_of(layer)):
            self.states = [*other.states, *self.states]
        self.reason, self.dtypes = other.reason, other.dtypes
        if len(other.low) == len(self.low):
            self.low, self.high = list(map(min, self.low, other.low)), list(map(max, self.high, other.high))
        else:
            self.low, self.high = other.low, other.high
        if len(self.states) > _MOST_STATES:
            self.reason = "its attributes change from call to call"


def _is_between(low: Any, size: Any, high: Any) -> bool:
    return low <= size <= high


def _is_as_proven(key: str) -> bool:
    """Return whether a layer is as it was when it was proven. torch.compile asks once, as it compiles."""
    verdict = _known.get(key)
    return verdict is not None and verdict.is_of(verdict.owner and verdict.owner())


class Verdicts:
    """The verdicts of a layer or of a function: by situation, and by what `look` reads of a call. A layer's copy has none."""

    def __init__(self, layer: Any = None) -> None:
        self.owner = None if layer is None else weakref.ref(layer)  # copies without __deepcopy__ share what they copy
        self.situations: dict[Any, Verdict] = {}
        self.calls: dict[Any, Verdict] = {}
        self.look: Callable[[Arguments], Any] = lambda arguments: None
        self._looks: dict[str, Callable[[Arguments], Any]] = {}
        self._parameters: list[dict[str, Any]] = []

    def remember(self, verdict: Verdict, described: Sequence[str], layer: Any, arguments: Arguments) -> None:
        """Let `look` read arguments of such types, and the parameters that the layer has now, and find the verdict by it."""
        self._parameters[:] = [] if layer is None else [part._parameters for part in layer.modules() if part._parameters]
        training = "" if layer is None else "own['training'], "
        source = training + write_look(described, arguments)
        if source not in self._looks:
            names = {**READS, "parameters": self._parameters, "own": {} if layer is None else vars(layer)}
            self._looks[source] = eval(f"lambda g: ({len(self._looks)}, {source})", names)
        self.look = self._looks[source]
        if len(self.calls) > _MOST_CALLS:
            self.calls.clear()
        self.calls[self.look(arguments)] = verdict

    def find(self, arguments: Arguments) -> Verdict | None:
        """Return the verdict of a call whose arguments have other types than those of the call before."""
        for look in list(self._looks.values()):
            with contextlib.suppress(Exception):
                verdict = self.calls[look(arguments)]
                self.look = look
                return verdict
        return None

    def __deepcopy__(self, memo: Any) -> None:
        return None

    def __reduce__(self) -> Any:
        return type(None), ()


class Proof:
    """The verdicts of the layers of one replaced class, or of one replaced function.

    Args:
        form: `answer(layer, arguments)` is what replaces the original, `described` has the roles of its main tensors, and
            `trusts(layer)` says whether the layer is like that of the trial.
        original: the original's own code. It takes the layer first, if there is one.
        name: of the class or the function, for warnings.
    """

    def __init__(self, form: Any, original: Callable[..., Any], name: str) -> None:
        self.form, self.original, self.name = form, original, name
        self.key = f"{VERDICTS}{next(_numbers)}"  # a layer may be of two replaced classes, and may be patched again
        self.verdicts = Verdicts()  # of a function
        self.layers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def serve(self, layer: Any, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the original returns for a call that the form takes."""
        if _is_traced_by_dynamo():
            return self._serve_unseen(layer, arguments, args, kwargs)
        verdicts = self.verdicts if layer is None else layer.__dict__.get(self.key) or self._add(layer)
        try:
            verdict = verdicts.calls[verdicts.look(arguments)]
        except Exception:  # a new call, or arguments of other types
            verdict = verdicts.find(arguments)
        if verdict is None or not (verdict.reason or verdict.states[0].is_of(layer) or verdict.is_of(layer)):
            return self._serve_slowly(verdicts, layer, arguments, args, kwargs)
        if verdict.reason:
            return self.original(*args, **kwargs)
        return self._answer(verdict, layer, arguments) if verdict.dtypes else self.form.answer(layer, arguments)

    def _add(self, layer: Any) -> Verdicts:
        layer.__dict__[self.key] = verdicts = Verdicts(layer)
        self.layers.add(layer)
        return verdicts

    def _answer(self, verdict: Verdict, layer: Any, arguments: Arguments) -> Any:
        return answer_in(verdict.dtypes, self.form, layer, arguments)

    def _serve_slowly(
        self, verdicts: Verdicts, layer: Any, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer a call of which nothing is remembered. While another thread compares, the original answers."""
        if trials.running or any(hasattr(type(a), "__next__") for a in arguments.values()):  # what can be read once
            return self.original(*args, **kwargs)
        is_copy = verdicts.owner is not None and verdicts.owner() is not layer
        if not can_compare(arguments) or (is_copy and getattr(layer, "_is_replica", False)):  # DataParallel's
            return self._serve_unseen(layer, arguments, args, kwargs)
        return self._serve_compared(self._add(layer) if is_copy else verdicts, layer, arguments, args, kwargs)

    def _serve_compared(
        self, verdicts: Verdicts, layer: Any, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compare, if nothing kept covers the call."""
        situation, sizes = describe(layer, arguments), list_sizes(arguments)
        verdict = verdicts.situations.get(situation)
        if verdict is not None and verdict.covers(sizes, layer):
            verdicts.remember(verdict, self.form.described, layer, arguments)
            return self.original(*args, **kwargs) if verdict.reason else self._answer(verdict, layer, arguments)
        if not _proving.acquire(timeout=_LONGEST if has_saved_tensors_hooks() else 0):  # a checkpoint computes twice, alike
            return self.original(*args, **kwargs)
        comparison = Comparison(self.form, self.original, layer, arguments, args, kwargs)
        try:
            result = comparison.run(lambda: self._trusts(layer))
        finally:
            _proving.release()
        if comparison.is_complete:
            self._record(verdicts, situation, Verdict(comparison, sizes, layer, self.form.calls), layer)
        elif comparison.is_trusted:
            new = Verdict(comparison, sizes, layer, self.form.calls)
            verdicts.remember(new, self.form.described, layer, arguments)
        return result

    def _record(self, verdicts: Verdicts, situation: Any, verdict: Verdict, layer: Any) -> None:
        known = verdicts.situations.setdefault(situation, verdict)
        if known is not verdict:
            known.add(verdict, layer)
        if known.reason:
            where = spell(situation)
            _warn(f"mx_driving.patch: {self.get_name(layer)} keeps its own code {where}: {known.reason}")

    def _serve_unseen(self, layer: Any, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call whose numbers cannot be compared. torch.compile reads this function."""
        if not torch.compiler.is_compiling() and is_exporting():
            return self.original(*args, **kwargs)
        verdicts = self.verdicts if layer is None else getattr(layer, self.key, None)
        verdict = None if verdicts is None else verdicts.situations.get(describe_untraced(layer, arguments))
        if verdict is not None and (verdict.reason or _is_as_proven(verdict.key)):
            return self.original(*args, **kwargs) if verdict.reason else self._answer(verdict, layer, arguments)
        if not torch.compiler.is_dynamo_compiling() and self._trusts(layer):
            return self.form.answer(layer, arguments)
        _warn_of_unproven(self.name, self.key)
        return self.original(*args, **kwargs)

    def _trusts(self, layer: Any) -> bool:
        """Return whether nothing tells the layer from that of the trial, or the function from the function of the trial."""
        return self.form.trusts(layer) if layer is not None else not getattr(self.original, "__closure__", None)

    def name_layers(self, model: torch.nn.Module) -> None:
        """Remember the names that a model has for its layers whose forward is the replaced class's."""
        for name, layer in model.named_modules():
            if next(base for base in type(layer).__mro__ if "forward" in vars(base)) is self.form.tried[0]:
                self.names.setdefault(layer, name or self.name)

    def list_verdicts(self) -> list[tuple[str, dict[str, str]]]:
        """Return the name of all that was called, and its situations in words -> why it keeps its own code, or nothing."""
        things = [(self.name, self.verdicts), *((self.get_name(layer), vars(layer).get(self.key)) for layer in self.layers)]
        lists = []
        for name, verdicts in things:
            own = {spell(s): v.reason for s, v in (verdicts.situations if verdicts else {}).items()}
            if own:
                lists.append((name, {words: reason and f"{words}: {reason}" for words, reason in own.items()}))
        return lists

    def get_name(self, layer: Any) -> str:
        return self.name if layer is None else self.names.get(layer, self.name)

    def forget(self) -> None:
        """Remove the verdicts from all layers."""
        for layer in list(self.layers):
            vars(layer).pop(self.key, None)


def _warn_of_unproven(name: str, key: str) -> None:
    if key in _told:
        return
    _told.add(key)
    text = f"mx_driving.patch: {name} runs its own code in a call whose numbers cannot be compared"
    _warn(f"{text}; call the model once, as it will be used, before compiling, exporting or capturing it")


def _warn(text: str) -> None:
    """Warn at the line that calls the layer or the core."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and (frame.f_code.co_filename == STAND_IN or _is_below(frame.f_globals.get("__name__", ""))):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level)


def _is_below(module: str) -> bool:
    return module.partition(".")[0] in ("mx_driving", "torch", "contextlib")


# what torch.compiler.assume_constant_result does, which would import the compiler
_warn_of_unproven._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
_is_as_proven._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
