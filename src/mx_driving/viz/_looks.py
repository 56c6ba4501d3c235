"""What operators are given while a model runs: `recording()` keeps the inputs of each call as a `Look`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _torch_private
from .._operator import composition
from .._operator.description import OPERATORS, SAMPLING


@dataclass(frozen=True)
class Look:
    """The inputs of one call of a bare operator, without their gradients.

    A call of an operator with logits is looked at as one of its bare operator, with the locations and weights it works out.
    """

    operator: str
    table: Tensor  # value or feature_maps
    shapes: Tensor
    starts: Tensor
    locations: Tensor
    weights: Tensor

    def __repr__(self) -> str:
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}
        inputs = [f"{name} {list(t.shape)} {str(t.dtype).removeprefix('torch.')}" for name, t in tensors.items()]
        return f"Look({self.operator}: {', '.join(inputs)}, on {self.table.device})"


class _Recorder(_torch_private.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Look] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        name = name.removesuffix("_autocast")
        if namespace == "mx_driving" and name in SAMPLING:
            inputs, bare = [a.detach() if isinstance(a, Tensor) else a for a in args], OPERATORS[name].bare
            self.looks.append(Look(bare, *composition.bare_inputs(name, *inputs)) if bare else Look(name, *inputs))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording() -> Iterator[list[Look]]:
    """Record every call of a sampling operator inside the `with` block, in order, by modules, patched models or other code.

    What torch.compile has compiled runs as it is written inside the block, and is compiled as before after it.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.MultiScaleDeformableAttention(16, num_levels=1)
    >>> levels = mx_driving.nn.flatten_levels([torch.rand(1, 16, 4, 4)])
    >>> with recording() as looks:
    ...     out = attention(torch.rand(1, 3, 16), torch.rand(1, 3, 1, 2), *levels)
    >>> [(look.operator, tuple(look.locations.shape)) for look in looks]
    [('multi_scale_deformable_attn', (1, 3, 8, 1, 4, 2))]
    """
    with _as_written(), _Recorder() as recorder:
        yield recorder.looks


def _as_written() -> contextlib.AbstractContextManager[Any]:
    """Run uncompiled: under a mode torch.compile would leave out or split functions, and keep to that afterwards."""
    if torch.compiler.is_dynamo_compiling():
        return contextlib.nullcontext()
    try:
        return torch.compiler.set_stance("force_eager")
    except RuntimeError:  # the block is a part of what was compiled
        return contextlib.nullcontext()
