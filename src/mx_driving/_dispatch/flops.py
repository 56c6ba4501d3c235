"""FLOPs for torch.utils.flop_counter: products and sums over channels, counted as for matrix products.

Samples off the map also count. Coordinates and coefficients do not count: their work does not grow with the number of
channels.

The formulas are registered after every execution of the counter's module, because FlopCounterMode copies the registry before
any call of ours. We do not import the counter: it imports Triton if installed, which takes 74 MB and as long as importing this
package (0.3 s of process time; 3 ms without Triton; 2026-11-29).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch

from .._operator.description import OPERATORS, Operator

_COUNTER = "torch.utils.flop_counter"


def register() -> None:
    """Register the formulas now if the counter is imported, and after every later execution of its module."""
    sys.meta_path.insert(0, _CounterFinder())
    if _COUNTER in sys.modules:
        try:
            importlib.import_module(_COUNTER)  # waits for a thread that is importing the counter
        except Exception:  # that thread's import has failed: our finder waits for the next import
            return
        _register_all()


class _CounterFinder(importlib.abc.MetaPathFinder):
    """Finds the counter by the finders after this finder, and registers the formulas after the counter's execution."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != _COUNTER:
            return None
        after = itertools.islice(itertools.dropwhile(lambda finder: finder is not self, sys.meta_path), 1, None)
        spec = next((spec for finder in after if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_register(module: Any) -> None:
                with contextlib.suppress(AttributeError):  # if a shared loader was looked for twice
                    del loader.exec_module  # A loader may load several modules: register after this one only.
                execute(module)
                _register_all()

            loader.exec_module = execute_and_register
        return spec


def _register_all() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for operator in OPERATORS.values():
        for suffix, count in (("", _count_forward), ("_autocast", _count_forward), ("_backward", _count_backward)):
            packet = getattr(torch.ops.mx_driving, operator.name + suffix)
            if packet not in flop_registry:
                register_flop_formula(packet)(functools.partial(count, operator))


def _count_forward(operator: Operator, *inputs: Any, **_: Any) -> int:
    """Count two FLOPs, a product and a sum, for each channel of each row that is read. Inputs are shapes."""
    if operator.kind == "pooling":
        samples = math.prod(inputs[operator.inputs.index("ranks_bev")])  # an element for each row of feat that is read
    else:
        weights = inputs[operator.weights]  # or logits
        samples = math.prod(weights[:-1] if operator.kind == "aggregation" else weights)
    return 2 * operator.rows * samples * inputs[0][-1]


def _count_backward(operator: Operator, grad: Any, *rest: Any, **_: Any) -> int:
    """Count one forward for the gradient of value, and one forward for all other gradients together, because they share the
    products of grad_output and rows."""
    *inputs, mask = rest
    return _count_forward(operator, *inputs) * (bool(mask[0]) + any(mask[1:]))
