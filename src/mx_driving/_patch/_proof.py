"""Prove a replacement on the caller's own calls.

A trial on a small example finds the form of a core or of an attention module. Whether a layer computes what the form says may
depend on its state, on its inputs and on the process, and no list of reasons is complete. The first call of a layer in a
situation therefore runs the original for the caller, then both on copies of the inputs, and compares outputs and gradients.
Where they agree, later calls of the situation run the operator. Where they differ, the layer keeps its own code.

A situation is what `describe` reads of a call: training or not, gradients recorded or not and of which inputs, autocast,
dtypes, the device, numbers of axes, and which optional inputs are given. It is proven for the sizes between the smallest and
the largest that were compared, and for the attributes that the layer had.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ._comparison import PLACES, Comparison, answer_in
from ._parameters import STAND_IN
from ._snapshot import VERDICTS

Arguments = Mapping[str, Any]  # by role
_TENSOR = operator.attrgetter("dtype", "requires_grad", "device", "shape")
_is_compiling, _is_inference = torch.compiler.is_compiling, torch.is_inference_mode_enabled
_MAIN = 3  # tensors that most calls have: query, value and reference, or value, locations and weights
_PLAIN = (bool, int, float, str, type(None))
_MOST_STATES = 16  # a layer whose attributes change in each call would be compared in each call
_MOST_CALLS = 4096
_numbers = itertools.count()
_proving = threading.RLock()


class Trials:
    """Whether a trial of another class runs: it calls the layer, too, and proves nothing of it."""

    running = False


trials = Trials()


class State:
    """The attributes of a layer, with the numbers of its tensors. Parameters may change, but for those that are zero, as a
    fresh layer's are: they hide what is done to offsets and logits."""

    def __init__(self, layer: Any) -> None:
        own = {} if layer is None else vars(layer)
        self._attributes = {**own}
        self._layers, self._buffers = {**own.get("_modules", {})}, {**own.get("_buffers", {})}
        self._zeros = [] if layer is None else [p for p in layer.parameters() if not p.is_inference() and not p.any()]
        tensors = [t for t in (*own.values(), *self._buffers.values()) if isinstance(t, Tensor) and not t.is_inference()]
        self._tensors = [(t, t.detach().clone()) for t in tensors]
        self._watched = [*self._zeros, *tensors]
        self._versions = [t._version for t in self._watched]

    def is_of(self, layer: Any) -> bool:
        if layer is None:
            return True
        if self._watched and not self._has_numbers():
            return False
        own = layer.__dict__
        try:  # what is identical is equal, without a comparison
            return own == self._attributes and own["_modules"] == self._layers and own["_buffers"] == self._buffers
        except (RuntimeError, ValueError, TypeError):  # an attribute is another tensor or array
            return False

    def _has_numbers(self) -> bool:
        """Return whether zeros are zeros and tensors have the same numbers. `p.data` changes numbers without a trace. To look
        for them on a GPU would wait for it."""
        versions = [t._version for t in self._watched]
        if versions == self._versions and not any(p.is_cpu for p in self._zeros):
            return True
        if not all(torch.equal(t, values) for t, values in self._tensors) or any(p.any() for p in self._zeros):
            return False
        self._versions = versions
        return True


class Verdict:
    """What became of the comparisons of a layer in a situation. It is proven where `reason` is empty."""

    def __init__(self, reason: str, dtypes: Sequence[Any], sizes: Sequence[int], layer: Any) -> None:
        self.reason, self.dtypes = reason, dtypes
        self.state = State(None if reason else layer)  # which keeps what the layer drops
        self.low, self.high = list(sizes), list(sizes)
        self.num_states = 1

    def covers(self, sizes: Sequence[int], layer: Any) -> bool:
        """Return whether nothing is left to compare."""
        inside = all(low <= size <= high for low, size, high in zip(self.low, sizes, self.high, strict=True))
        return bool(self.reason) or (inside and self.state.is_of(layer))

    def add(self, other: Verdict, layer: Any) -> None:
        """Take over a further comparison in the same situation."""
        self.num_states += not self.state.is_of(layer)
        self.reason, self.dtypes, self.state = other.reason, other.dtypes, other.state
        self.low, self.high = list(map(min, self.low, other.low)), list(map(max, self.high, other.high))
        if self.num_states > _MOST_STATES:
            self.reason = "its attributes change from call to call"


class Verdicts:
    """The verdicts of a layer or of a function: by situation, and by what `look` reads of a call. A layer's copy has none."""

    def __init__(self) -> None:
        self.situations: dict[Any, Verdict] = {}
        self.calls: dict[Any, Verdict] = {}
        self.look: Callable[[Arguments], Any] = lambda arguments: None
        self._looks: dict[str, Callable[[Arguments], Any]] = {}
        self._parameters: list[dict[str, Any]] = []

    def look_at(self, described: Sequence[str], layer: Any, arguments: Arguments) -> None:
        """Let `look` read arguments of such types, and the parameters that the layer has now."""
        self._parameters[:] = [] if layer is None else [part._parameters for part in layer.modules() if part._parameters]
        source = _write_look(described, arguments)
        if source not in self._looks:
            names = {**_READS, "parameters": self._parameters}
            self._looks[source] = eval(f"lambda g: ({len(self._looks)}, {source})", names)
        self.look = self._looks[source]

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
        if _is_compiling():
            return self._serve_unseen(layer, arguments, args, kwargs)
        verdicts = self.verdicts if layer is None else layer.__dict__.get(self.key) or self._add(layer)
        try:
            verdict = verdicts.calls[verdicts.look(arguments)]
        except Exception:  # a new call, or arguments of other types
            verdict = None
        if verdict is None or not (verdict.reason or verdict.state.is_of(layer)):
            return self._serve_slowly(verdicts, layer, arguments, args, kwargs)
        if verdict.reason:
            return self.original(*args, **kwargs)
        return self._answer(verdict, layer, arguments) if verdict.dtypes else self.form.answer(layer, arguments)

    def _add(self, layer: Any) -> Verdicts:
        layer.__dict__[self.key] = verdicts = Verdicts()
        self.layers.add(layer)
        return verdicts

    def _answer(self, verdict: Verdict, layer: Any, arguments: Arguments) -> Any:
        return answer_in(verdict.dtypes, self.form, layer, arguments)

    def _serve_slowly(
        self, verdicts: Verdicts, layer: Any, arguments: Arguments, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Compare if the situation is new, or larger, or the layer has other attributes. While another thread compares, the
        original answers."""
        if trials.running:
            return self.original(*args, **kwargs)
        if not can_compare(arguments):
            return self._serve_unseen(layer, arguments, args, kwargs)
        situation, sizes = describe(layer, arguments), list_sizes(arguments)
        verdict = verdicts.situations.get(situation)
        if verdict is not None and verdict.covers(sizes, layer):
            if len(verdicts.calls) > _MOST_CALLS:
                verdicts.calls.clear()
            verdicts.look_at(self.form.described, layer, arguments)
            verdicts.calls[verdicts.look(arguments)] = verdict
            return self.original(*args, **kwargs) if verdict.reason else self._answer(verdict, layer, arguments)
        if not _proving.acquire(blocking=False):
            return self.original(*args, **kwargs)
        try:
            comparison = Comparison(self.form, self.original, layer, arguments, args, kwargs)
            result = comparison.run(lambda: self._trusts(layer))
        finally:
            _proving.release()
        if comparison.is_complete:
            self._record(verdicts, situation, Verdict(comparison.reason, comparison.dtypes, sizes, layer), layer)
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
        verdicts = self.verdicts if layer is None else getattr(layer, self.key, None)
        verdict = None if verdicts is None else verdicts.situations.get(_describe_untraced(layer, arguments))
        if verdict is not None:
            return self.original(*args, **kwargs) if verdict.reason else self._answer(verdict, layer, arguments)
        if not torch.compiler.is_dynamo_compiling() and self._trusts(layer):
            return self.form.answer(layer, arguments)
        _warn_of_unproven(self.name)
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


def _write_look(described: Sequence[str], arguments: Arguments) -> str:
    """Return an expression that reads a call with arguments `g` of certain types. Calls of equal readings have one verdict. It
    is one expression, because it runs in each call."""
    tensors = [role for role, a in arguments.items() if isinstance(a, Tensor)]
    floating = [role for role in tensors if arguments[role].is_floating_point()]
    main = [role for role in tensors if role in described]
    main = main if len(main) == _MAIN else tensors
    flags = "".join(f"g[{role!r}].requires_grad, " for role in floating)
    trained = "*[p.requires_grad for own in parameters for p in own.values() if p is not None]"
    parts = [f"is_grad_enabled() and ({flags}{trained})", *_MODES, *(f"g[{role!r}].device" for role in tensors[:1])]
    parts += [*(f"g[{role!r}].shape" for role in main), *(f"g[{role!r}].dtype" for role in floating)]
    for role, a in arguments.items():
        if isinstance(a, (list, tuple)):
            parts.append(_write_reading(f"g[{role!r}]", a))
        elif role not in (*main, *floating):
            parts.append(f"g[{role!r}]" if isinstance(a, _PLAIN) else f"type(g[{role!r}])")
    if isinstance(arguments.get("shapes"), Tensor) and arguments.get("sizes") is None:
        parts.append("read_table(g['shapes'])")
    return ", ".join(parts)


def _write_reading(place: str, sequence: Any) -> str:
    """Return an expression of what counts of a list or a tuple."""
    if any(isinstance(leaf, Tensor) for leaf in tree_leaves(sequence)):
        return f"tuple(map(read, {place}))"
    for expression in (f"tuple({place})", f"tuple(map(tuple, {place}))"):
        with contextlib.suppress(TypeError):
            hash(eval(expression.replace(place, "sequence")))
            return expression
    return f"str({place})"


def _read_table(table: Tensor) -> Any:
    """Return the sides of levels, where a look at them does not wait for a GPU, and nothing is traced or transformed."""
    if not table.is_cpu or torch._C._get_tracing_state() is not None or torch._C._are_functorch_transforms_active():
        return None
    return tuple(map(tuple, table.tolist()))


def _read_entry(entry: Any) -> Any:
    return _TENSOR(entry) if isinstance(entry, Tensor) else entry if isinstance(entry, _PLAIN) else type(entry)


def can_compare(arguments: Arguments) -> bool:
    """Return whether a call has numbers, and nothing but the caller looks at what is computed."""
    tensors = [t for a in arguments.values() for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]
    if any(type(t) not in (Tensor, torch.nn.Parameter) or t.device.type == "meta" for t in tensors):
        return False
    captures = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
    modes = torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active()  # pyright: ignore
    is_traced = torch._C._get_tracing_state() is not None
    return not (captures or modes or is_traced or torch.autograd.forward_ad._current_level >= 0)


def describe(layer: Any, arguments: Arguments) -> tuple[Any, ...]:
    """Return the situation of a call. torch.compile reads this function."""
    recorded = torch.is_grad_enabled()
    device = [*(t.device.type for t in arguments.values() if isinstance(t, Tensor)), "cpu"][0]
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    facts = tuple([_describe_argument(role, a, recorded) for role, a in arguments.items()])
    trained = tuple([p.requires_grad for p in layer.parameters()]) if recorded and layer is not None else ()
    return layer is not None and layer.training, recorded, autocast, device, facts, trained


def _describe_untraced(layer: Any, arguments: Arguments) -> tuple[Any, ...]:
    """Return the situation of a call that may be traced: torch.jit makes sizes tensors. torch.compile reads this function."""
    if _is_compiling():
        return describe(layer, arguments)
    state = torch._C._get_tracing_state()
    torch._C._set_tracing_state(None)  # pyright: ignore
    try:
        return describe(layer, arguments)
    finally:
        torch._C._set_tracing_state(state)  # pyright: ignore


def _describe_argument(role: str, argument: Any, recorded: bool) -> Any:
    if isinstance(argument, Tensor):
        axis = -1 if role in PLACES else 0 if role == "shapes" else None
        size = argument.shape[axis] if axis is not None and argument.dim() else None
        return role, argument.dtype, recorded and argument.requires_grad, argument.dim(), size
    if isinstance(argument, (list, tuple)):
        return role, len(argument), tuple([_describe_argument("", t, recorded) for t in argument if isinstance(t, Tensor)])
    return role, argument if isinstance(argument, _PLAIN) else type(argument).__name__


def list_sizes(arguments: Arguments) -> list[int]:
    """Return what may grow: the sizes of tensors, the numbers in lists, the sides of levels where a CPU has them, and 1 in
    inference mode."""
    leaves = [leaf for a in arguments.values() for leaf in (tree_leaves(a) if isinstance(a, (list, tuple)) else (a,))]
    sizes = [size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape]
    table = arguments.get("shapes")
    sides = table.flatten().tolist() if isinstance(table, Tensor) and table.is_cpu else []
    return sizes + sides + [leaf for leaf in leaves if type(leaf) is int] + [_is_inference()]


def spell(situation: tuple[Any, ...]) -> str:
    """Return a situation in words."""
    training, recorded, autocast, device, facts, trained = situation
    dtypes = sorted(
        {str(f[1]).removeprefix("torch.") for f in facts if isinstance(f[1], torch.dtype) and f[1].is_floating_point}
    )
    given = [role for role, *fact in facts if fact != [None]]
    under = f" under autocast to {str(autocast).removeprefix('torch.')}" if autocast else ""
    frozen = f" and {trained.count(False)} frozen parameters" if False in trained else ""
    mode = f"{'training' if training else 'evaluation'}, {'with' if recorded else 'without'} gradients{frozen}"
    return f"in {mode}, {' and '.join(dtypes)} on {device}{under}, with {', '.join(given)}"


def _warn_of_unproven(name: str) -> None:
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


# what the expression of a look may name
_MODES = ("is_inference()", "is_any_autocast() and (get_autocast_dtype('cpu'), get_autocast_dtype('cuda'))")
_READS = {
    "is_any_autocast": getattr(torch._C, "_is_any_autocast_enabled", torch.is_autocast_enabled),
    **{"is_grad_enabled": torch.is_grad_enabled, "is_inference": _is_inference},
    **{"get_autocast_dtype": torch.get_autocast_dtype, "read": _read_entry, "read_table": _read_table},
}

# what torch.compiler.assume_constant_result does, which would import the compiler
_warn_of_unproven._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]
