"""Compare a replacement with the original on one call of a caller."""

from __future__ import annotations

import contextlib
import math
import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from .. import _agreement
from ._snapshot import copy_layer, explain_lost, watch

PLACES = ("reference", "locations", "trajectories", "sampling_location")  # roles of the tensors that place samples
_LOW = (torch.float16, torch.bfloat16)
_UNAVAILABLE = (ImportError, NameError, AttributeError, NotImplementedError, torch.OutOfMemoryError)  # it cannot run here
_JITTER = 0.01


class Results:
    """The outputs of a run, and the gradients of one random direction of them."""

    def __init__(self, returned: Any, leaves: Sequence[Tensor], drawn: Any = None) -> None:
        self.drawn = drawn
        flat, self.structure = tree_flatten(returned)
        self.outputs = [o for o in flat if isinstance(o, Tensor)]
        self.others = [o for o in flat if not isinstance(o, Tensor)]
        self.dtypes = [o.dtype for o in self.outputs]
        self.recorded = [o.requires_grad for o in self.outputs]
        ends = [o for o in self.outputs if o.requires_grad]
        gradients: Sequence[Tensor | None] = [None] * len(leaves)
        if ends and leaves:
            gradients = torch.autograd.grad(ends, leaves, [_make_direction(o) for o in ends], allow_unused=True)
        self.gradients = [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(leaves, gradients, strict=True)]
        self.outputs = [o.detach() for o in self.outputs]

    def measure_outputs(self, theirs: Results) -> float:
        """Return the largest difference of an output. It is infinite if the original returns something else, or if one
        has a gradient where the other has none."""
        if (self.structure, self.others, self.recorded) != (theirs.structure, theirs.others, theirs.recorded):
            return math.inf
        return max(map(_agreement.output_difference, self.outputs, theirs.outputs), default=0.0)

    def measure_gradients(self, theirs: Results) -> float:
        return max(_agreement.gradient_differences(self.gradients, theirs.gradients), default=0.0)


def _make_direction(out: Tensor) -> Tensor:
    generator = torch.Generator(out.device).manual_seed(0)
    return torch.randn(out.shape, generator=generator, device=out.device, dtype=torch.float32).to(out.dtype)


class Comparison:
    """One call, answered and compared.

    Attributes:
        reason: why the original must answer such calls, or nothing.
        dtypes: of the original's outputs, where ours have others.
        is_complete: whether there was a comparison.
        is_trusted: whether there was none because the original cannot run, and the operator answers.
    """

    def __init__(
        self,
        form: Any,
        original: Callable[..., Any],
        layer: Any,
        arguments: Mapping[str, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._form, self._original, self._layer, self._arguments = form, original, layer, dict(arguments)
        self._inputs = args[layer is not None :], kwargs
        self._tensors = [t for t in tree_leaves(self._arguments) if isinstance(t, Tensor)]
        self._device = next((t.device for t in self._tensors), torch.device("cpu"))
        self.reason, self.is_complete, self.is_trusted = "", True, False
        self.dtypes: Sequence[torch.dtype] = ()

    def run(self, can_trust: Callable[[], bool]) -> Any:
        """Return the result of the call.

        The original answers, so that what it does to its inputs and to the layer is done once, and its graph is the caller's.
        In 16 bits, where plain PyTorch may give NaN, and under hooks of saved tensors, by which checkpoints run a forward
        again and count its tensors, the operator answers where it agrees.

        Args:
            can_trust: whether the operator may answer where the original cannot run.
        """
        self._random = Random(self._device)
        dtype = self._find_low_dtype()
        if dtype is None and not has_saved_tensors_hooks():
            return self._run_original(can_trust)
        try:
            if dtype is not None:
                self._compare_in_16_bits(dtype)
            else:
                self._compare(self._layer)
        except _UNAVAILABLE as error:
            self.is_complete, self.reason = False, "" if can_trust() else "it cannot run"
            self.is_trusted = not self.reason and not isinstance(error, torch.OutOfMemoryError)
        except Exception as error:  # the original raises for the caller, or what is done for the comparison is not for it
            self.reason = _explain_failure(error)
        self._random.restore(self._device)
        return self._run_theirs(self._layer, self._inputs) if self.reason else self.answer()

    def answer(self) -> Any:
        return answer_in(self.dtypes, self._form, self._layer, self._arguments)

    def _run_original(self, can_trust: Callable[[], bool]) -> Any:
        try:
            with watch(self._layer, self._inputs, self._original) as written:
                result = self._run_theirs(self._layer, self._inputs)
        except _UNAVAILABLE as error:
            self.is_complete = False
            if not can_trust():
                raise
            self.is_trusted = not isinstance(error, torch.OutOfMemoryError)
            return self.answer()
        try:
            self._compare(self._layer, result, written)
        except torch.OutOfMemoryError:
            self.reason = "" if can_trust() else "there is too little memory to compare it"
        except Exception as error:
            self.reason = _explain_failure(error)
        return result

    def _run_theirs(self, layer: Any, inputs: tuple[Any, Any]) -> Any:
        return self._original(*([] if layer is None else [layer]), *inputs[0], **inputs[1])

    def _compare(
        self, layer: Any, result: Any = None, written: set[str] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Compare on copies. `result` and `written` are of the original's run for the caller; without them it runs unseen."""
        with isolate(layer, self._device):
            inputs, arguments, leaves = self._copy(layer, dtype)
            theirs = None
            drawn = Random(self._device)  # by the original's run for the caller
            if written is None:
                theirs, written = self._compute(layer, inputs, leaves, lambda: self._run_theirs(layer, inputs))
            try:
                ours, done = self._compute(layer, inputs, leaves, lambda: self._form.answer(layer, arguments))
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # a form may raise anything over an unknown call
                self.reason = _explain_refusal(error)
                return
            if written - done:
                self.reason = explain_lost(written - done)
                return
            if ours.drawn != (drawn if theirs is None else theirs.drawn):
                self.reason = "it draws other random numbers"
                return
            if theirs is None and (leaves or _updates(layer)):
                theirs, _ = self._compute(layer, inputs, leaves, lambda: self._run_theirs(layer, inputs))
            self._judge(layer, ours, theirs or Results(result, []), dtype)

    def _judge(self, layer: Any, ours: Results, theirs: Results, dtype: torch.dtype | None) -> None:
        """Judge, and compare again on varied inputs where the first ones say too little. Gradients of locations jump at pixel
        centres, where fresh models have their samples; a mask that hides nothing does not show what is done with one, nor a
        tensor of one number what is done with its axes."""
        single = any(t.dtype != torch.float64 for t in (*self._tensors, *theirs.outputs) if t.is_floating_point())
        precision = torch.float32 if single or dtype else torch.float64
        self._judge_outputs(ours, theirs, precision)
        if self.reason:
            return
        if dtype is None and ours.dtypes != theirs.dtypes:
            self.dtypes = theirs.dtypes
        uniform = any(map(_is_uniform, self._tensors))
        if ours.measure_gradients(theirs) <= _agreement.GRADIENT_LIMITS[precision] and not uniform:
            return
        inputs, arguments, leaves = self._copy(layer, dtype, varied=True)
        theirs, _ = self._compute(layer, inputs, leaves, lambda: self._run_theirs(layer, inputs))
        ours, _ = self._compute(layer, inputs, leaves, lambda: self._form.answer(layer, arguments))
        self._judge_outputs(ours, theirs, precision)
        if not self.reason and not (worst := ours.measure_gradients(theirs)) <= _agreement.GRADIENT_LIMITS[precision]:
            self.reason = f"its gradients differ from the operator's by {worst:.1e} of their size"

    def _judge_outputs(self, ours: Results, theirs: Results, precision: torch.dtype) -> None:
        if not (worst := ours.measure_outputs(theirs)) <= _agreement.OUTPUT_LIMITS[precision]:
            self.reason = f"its result differs from the operator's by {worst:.1e} of its size"

    def _compute(self, layer: Any, inputs: Any, leaves: Sequence[Tensor], run: Callable[[], Any]) -> tuple[Results, set[str]]:
        """Return the results of a run, and what it writes to the layer or its arguments."""
        self._random.restore(self._device)
        with _keep_state(layer):
            with watch(layer, inputs, self._original) as written:
                returned = run()
            drawn = Random(self._device)
            return Results(returned, leaves, drawn), written

    def _copy(self, layer: Any, dtype: torch.dtype | None, varied: bool = False) -> tuple[Any, dict[str, Any], list[Tensor]]:
        """Return copies of the call's arguments, also by role, and the tensors that record gradients: copies and parameters.
        A tensor that is given twice has one copy. Varied copies have samples a little beside, and random numbers where one
        number was given."""
        copies: dict[int, Tensor] = {}
        recorded = torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        places = {id(t) for role in PLACES for t in tree_leaves(self._arguments.get(role)) if isinstance(t, Tensor)}

        def copy_tensor(t: Any) -> Any:
            if not isinstance(t, Tensor) or id(t) in copies:
                return copies.get(id(t), t)
            twin = t.detach().clone()
            if varied and (id(t) in places or _is_uniform(t)):
                generator = torch.Generator("cpu").manual_seed(0)
                noise = torch.rand(t.shape, generator=generator, device="cpu").to(t.device)
                size = max(1.0, _agreement.largest_magnitude(t)) if _is_uniform(t) else _JITTER
                twin = noise < 0.3 if t.dtype == torch.bool else twin + (size * noise).to(twin)
            if t.is_floating_point():
                twin = twin if dtype is None else twin.to(dtype)
                twin.requires_grad_(recorded and t.requires_grad)
            copies[id(t)] = twin
            return twin

        inputs, arguments = tree_map(copy_tensor, self._inputs), tree_map(copy_tensor, self._arguments)
        parameters = [] if layer is None or not recorded else [p for p in layer.parameters() if p.requires_grad]
        return inputs, arguments, [*(t for t in copies.values() if t.requires_grad), *parameters]

    def _find_low_dtype(self) -> torch.dtype | None:
        """Return the dtype of 16 bits in which the call computes, or None."""
        if torch.is_autocast_enabled(self._device.type):
            return torch.get_autocast_dtype(self._device.type)
        parameters = [] if self._layer is None else self._layer.parameters()
        return next((t.dtype for t in (*self._tensors, *parameters) if t.dtype in _LOW), None)

    def _compare_in_16_bits(self, low: torch.dtype) -> None:
        """Compare with the original in float32, tightly in float32 and loosely in 16 bits, on copies of the layer."""
        twin = copy_layer(self._layer)
        try:
            dtypes, ours = self._run_low(twin)
        except Exception as error:
            self.reason = _explain_refusal(error)
            return
        if twin is not None:
            twin.float()
        with torch.autocast(self._device.type, enabled=False):
            self._compare(twin, dtype=torch.float32)
        if self.reason:
            return
        with torch.no_grad(), torch.autocast(self._device.type, enabled=False):
            inputs, _, _ = self._copy(twin, torch.float32)
            theirs, _ = self._compute(twin, inputs, [], lambda: self._run_theirs(twin, inputs))
        worst = max(map(_agreement.output_difference, ours.outputs, theirs.outputs), default=0.0)
        if not worst <= _agreement.OUTPUT_LIMITS[low]:
            self.reason = f"its result in float32 differs from the operator's in 16 bits by {worst:.1e} of its size"
        self.dtypes = () if dtypes == ours.dtypes else dtypes

    def _run_low(self, twin: Any) -> tuple[Sequence[torch.dtype], Results]:
        """Return the dtypes of the original's outputs in 16 bits, where it runs, and our outputs."""
        dtypes: Sequence[torch.dtype] = ()
        with torch.no_grad(), isolate(twin, self._device):
            inputs, arguments, _ = self._copy(twin, None)
            ours, _ = self._compute(twin, inputs, [], lambda: self._form.answer(twin, arguments))
            with contextlib.suppress(Exception):  # plain PyTorch may not have its operators in 16 bits
                dtypes = self._compute(twin, inputs, [], lambda: self._run_theirs(twin, inputs))[0].dtypes
        return dtypes, ours


def _explain_refusal(error: Exception) -> str:
    return f"the operator does not take the call: {type(error).__name__}: {error}"


def _explain_failure(error: Exception) -> str:
    return f"its own code cannot be compared: {type(error).__name__}: {error}"


def answer_in(dtypes: Sequence[torch.dtype], form: Any, layer: Any, arguments: Mapping[str, Any]) -> Any:
    """Return the operator's outputs in the dtypes of the original's, where they differ. A function that returns more digits
    than it gets computes with them."""
    if not dtypes:
        return form.answer(layer, arguments)
    if layer is None and torch.float32 in dtypes:
        arguments = {role: a.float() if isinstance(a, Tensor) and a.dtype in _LOW else a for role, a in arguments.items()}
    returned = form.answer(layer, arguments)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    outputs = tuple([o.to(dtype) for o, dtype in zip(outputs, dtypes, strict=True)])
    return outputs if isinstance(returned, tuple) else outputs[0]


@contextlib.contextmanager
def isolate(layer: Any, device: torch.device) -> Iterator[None]:
    """Keep what is computed from the caller: its hooks of saved tensors, and its random numbers."""
    before = Random(device)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    try:
        with hooks if has_saved_tensors_hooks() else contextlib.nullcontext():
            yield
    finally:
        before.restore(device)


def _is_uniform(t: Tensor) -> bool:
    """Return whether a tensor, which is no table, has one number."""
    return (t.is_floating_point() or t.dtype == torch.bool) and t.numel() > 1 and bool((t == t.flatten()[0]).all())


def _updates(layer: Any) -> bool:
    """Return whether a run may leave other buffers, as spectral_norm's does in training."""
    return layer is not None and layer.training and any(True for _ in layer.buffers())


@contextlib.contextmanager
def _keep_state(layer: Any) -> Iterator[None]:
    """Let each run begin with the same buffers and attributes, also of layers within the layer, which a run may count in."""
    parts = [] if layer is None else list(layer.modules())
    spaces = [(space, {**space}) for part in parts for space in (vars(part), part._buffers)]
    buffers = [] if layer is None else [(b, b.detach().clone()) for b in layer.buffers()]
    try:
        yield
    finally:
        for space, before in spaces:
            for name in [*(space.keys() - before.keys()), *(n for n in before if space.get(n) is not before[n])]:
                space.pop(name, None)
                space.update({name: before[name]} if name in before else {})
        for buffer, values in buffers:
            if not torch.equal(buffer, values):
                buffer.data.copy_(values)  # leaves its version, which a graph of the caller's may count


def has_saved_tensors_hooks() -> bool:
    """Return whether the caller sees which tensors are saved. torch refuses to disable such hooks while there are some."""
    hooks: Any = torch._C._autograd  # pyright: ignore
    if not hooks._saved_tensors_hooks_is_enabled():
        return False
    try:
        hooks._saved_tensors_hooks_disable("there are none")
    except RuntimeError:
        return True
    finally:
        hooks._saved_tensors_hooks_enable()
    return False


class Random:
    """The states of the generators that a layer may draw from: torch's, also of a device, Python's and NumPy's."""

    def __init__(self, device: torch.device) -> None:
        on_cpu = device.type == "cpu"
        self.tensors = [torch.get_rng_state(), *([] if on_cpu else [torch.get_device_module(device).get_rng_state(device)])]
        numpy = sys.modules.get("numpy.random")
        self.python, self.numpy = random.getstate(), None if numpy is None else numpy.get_state()

    def __eq__(self, other: Any) -> bool:
        words, others = (pickle.dumps((each.python, each.numpy)) for each in (self, other))
        return words == others and all(map(torch.equal, self.tensors, other.tensors))

    def restore(self, device: torch.device) -> None:
        torch.set_rng_state(self.tensors[0])
        for state in self.tensors[1:]:
            torch.get_device_module(device).set_rng_state(state, device)
        random.setstate(self.python)
        if self.numpy is not None:
            sys.modules["numpy.random"].set_state(self.numpy)
