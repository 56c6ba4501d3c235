"""Run a model on a caller's inputs, once with its own code and once patched, and compare the outputs."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import sys
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._agreement import largest_magnitude, output_difference
from .._operator import rules
from ._replace import Change

# The allowed difference of an output, as a fraction of its largest magnitude. Patched models differ from their own code by 8e-8
# to 3e-5 in float32, and by less than 1e-13 in float64. In 16 bits the own code rounds locations, weights and samples, and the
# operator does not, so a check in 16 bits shows gross faults only.
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 0.02, torch.bfloat16: 0.1}
_EXCHANGED = 0.02  # the largest share of queries that near ties may exchange


class _WatchLayers(_torch_private.TorchDispatchMode):
    """Notes which layers run operations, and which of them run one of our operators.

    It finds the running layers in the frames of the stack, because hooks on a layer would change which code runs.
    """

    def __init__(self, layers: Mapping[int, str]) -> None:
        super().__init__()
        self._layers = layers
        self.ran: set[str] = set()
        self.called: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        frame = sys._getframe()
        while frame := frame.f_back:
            if frame.f_code is _torch_private.CALL_OF_A_LAYER:
                name = self._layers.get(id(frame.f_locals["self"]))
                if name is not None:
                    self.ran.add(name)
                    if func.name().startswith("mx_driving::"):
                        self.called.add(name)
        return func(*args, **(kwargs or {}))


def compare_runs(model: Any, check: Any, names: Collection[str], changes: Collection[Change]) -> tuple[str, set[str], set[str]]:
    """Return a sentence about the largest difference, the names of the layers that called an operator, and of those that ran.

    Args:
        check: the inputs: a tuple of arguments, a mapping of keyword arguments, or (arguments, keyword arguments).
        names: names of the layers to watch.
        changes: all changes of code. The first run is without these changes.

    Raises:
        ValueError: an output differs by more than rounding.
    """
    if isinstance(check, Mapping):
        args, kwargs = (), dict(check)
    elif isinstance(check, tuple) and len(check) == 2 and isinstance(check[0], tuple) and isinstance(check[1], Mapping):
        args, kwargs = check[0], dict(check[1])
    else:
        args, kwargs = (tuple(check) if isinstance(check, (tuple, list)) else (check,)), {}
    layers = {id(module): name for name, module in model.named_modules() if name in names}
    modes = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.clone() for buffer in model.buffers()}
    watch = _WatchLayers(layers)

    def run(own: bool) -> dict[str, Tensor]:
        for change in changes:
            change.use(own)
        arguments = copy.deepcopy((args, kwargs))  # The model may write to its inputs.
        try:
            with torch.random.fork_rng(), torch.no_grad(), contextlib.nullcontext() if own else watch:
                torch.manual_seed(0)
                outputs = model(*arguments[0], **arguments[1])
            return dict(_list_tensors(outputs, "output", set()))
        finally:
            for buffer, saved in buffers.items():
                with torch.no_grad():
                    buffer.copy_(saved)

    try:
        model.eval()
        theirs, ours = run(True), run(False)
    finally:
        for change in changes:
            change.use(own=False)
        for module, mode in modes.items():
            module.training = mode
    if ours.keys() != theirs.keys():
        name = min(ours.keys() ^ theirs.keys())
        rules.fail(ValueError, "check", "give the outputs of the model's own code", f"{name} in one of two runs alone")
    if not theirs:
        rules.fail(ValueError, "check", "give a floating output to compare", "none in what the model returns")
    differences, exchanged = {}, 0
    for name, their in theirs.items():
        our, limit = ours[name], LIMITS.get(their.dtype, LIMITS[torch.float32])
        if our.dtype != their.dtype:
            fact = f"{name} in {our.dtype} where its own code gives {their.dtype}"
            rules.fail(ValueError, "check", "give the outputs of the model's own code", fact)
        difference = output_difference(our, their)
        if difference > limit and (count := _count_exchanged(our, their, limit)):
            exchanged, difference = max(exchanged, count), 0.0
        differences[name] = difference
        if not difference <= limit:
            fact = f"{name}, which differs by {difference:.1e} of its largest magnitude (limit {limit:.0e})"
            rules.fail(ValueError, "check", "give the outputs of the model's own code", fact)
    sentence = f"outputs agree within {max(differences.values()):.0e} of their largest magnitude"
    if exchanged:
        sentence += f", but for {exchanged} queries that a near tie exchanges"
    return sentence, watch.called, watch.ran


def _count_exchanged(ours: Tensor, theirs: Tensor, limit: float) -> int:
    """Return the number of queries of an output [bs, queries, ..] that near ties exchange; 0 if the outputs differ otherwise.

    Two-stage models rank queries. Rounding exchanges the ranks of queries whose scores nearly tie. These ranks are neighbours,
    and they are few.
    """
    if ours.shape != theirs.shape or ours.dim() < 3 or not (ours.isfinite() == theirs.isfinite()).all():
        return 0
    count, allowed = 0, limit * largest_magnitude(theirs)
    for our, their in zip(ours.flatten(2).double(), theirs.flatten(2).double(), strict=True):
        off = ((our - their).nan_to_num().abs() > allowed).any(1).nonzero()[:, 0]
        if len(off) > _EXCHANGED * len(our):
            return 0
        # Consecutive queries that differ form a group. Both outputs must have the same rows in a group, in any order.
        place = off - torch.arange(len(off), device=off.device)  # the same number for all queries of a group
        near = (our[off, None] - their[None, off]).nan_to_num().abs().amax(-1) <= allowed
        near &= place[:, None] == place
        if not bool((near.any(0) & near.any(1)).all()):
            return 0
        count = max(count, len(off))
    return count


def _list_tensors(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating tensors and numbers in an output of any structure, each with its path, such as output.logits."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield name, value.detach().clone()
        return
    if isinstance(value, float):
        yield name, torch.tensor(value, dtype=torch.float64)
        return
    if isinstance(value, (str, bytes, int, type(None), torch.nn.Module)) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Mapping):
        parts = [(f"{name}.{key}", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)):
        words = getattr(value, "_fields", range(len(value)))
        parts = [(f"{name}.{word}", part) for word, part in zip(words, value, strict=True)]
    elif dataclasses.is_dataclass(value):
        parts = [(f"{name}.{f.name}", getattr(value, f.name)) for f in dataclasses.fields(value)]
    else:  # such as detectron2's Instances
        parts = [(f"{name}.{word}", part) for word, part in getattr(value, "__dict__", {}).items()]
    for word, part in parts:
        yield from _list_tensors(part, word, seen)
