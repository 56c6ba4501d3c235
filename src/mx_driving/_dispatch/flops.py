"""FLOPs for torch.utils.flop_counter: products and sums over channels, counted as for matrix products.

Samples off the map count, too. Coordinates and coefficients do not count: their work does not grow with the number of
channels.

The formulas are registered whenever the counter's module has been executed, because FlopCounterMode copies the registry before
any call of ours. We do not import the counter: it imports Triton if installed, which takes 74 MB and as long as importing this
package (0.3 s of process time; 3 ms without Triton; 2026-11-29).
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
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
    """An import finder that lets the finders after it find the counter, and registers the formulas after its execution."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != _COUNTER:
            return None
        after = itertools.islice(itertools.dropwhile(lambda finder: finder is not self, sys.meta_path), 1, None)
        spec = next((spec for finder in after if (spec := finder.find_spec(fullname, path, target))), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _CounterLoader(spec.loader)
        return spec


class _CounterLoader(importlib.abc.Loader):
    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        return self.loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__loader__ = module.__spec__.loader = self.loader  # tools read sources through these attributes
        self.loader.exec_module(module)
        _register_all()


def _register_all() -> None:
    from torch.utils.flop_counter import flop_registry, register_flop_formula

    for operator in OPERATORS.values():
        forward, backward = _make_formulas(operator)
        for suffix, formula in (("", forward), ("_autocast", forward), ("_backward", backward)):
            packet = getattr(torch.ops.mx_driving, operator.name + suffix)
            if packet not in flop_registry:
                register_flop_formula(packet)(formula)


def _make_formulas(operator: Operator) -> tuple[Any, Any]:
    # ranks_bev has an element for each row of feat that is read
    weights = operator.weights if operator.kind != "pooling" else operator.inputs.index("ranks_bev")

    def forward(*inputs: Any, out_shape: Any = None, **_: Any) -> int:
        """Count two FLOPs, a product and a sum, for each channel of each row that is read. Inputs are shapes."""
        shape = inputs[weights]  # of weights, or of logits
        samples = math.prod(shape[:-1] if operator.kind == "aggregation" else shape)
        return 2 * operator.rows * samples * inputs[0][-1]

    def backward(grad: Any, *rest: Any, **_: Any) -> int:
        """Count the FLOPs of a forward once for the gradient of value, and once for all other gradients: these share the
        products of grad_output and rows."""
        *inputs, mask = rest
        return forward(*inputs) * (bool(mask[0]) + any(mask[1:]))

    return forward, backward
