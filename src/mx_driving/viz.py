"""Where models look: `recording()` notes what the operators were asked, `sampling_points` and `bev` draw it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


@dataclass(frozen=True)
class Look:
    """The inputs of one call of an operator, without their gradients."""

    operator: str
    table: Tensor  # value or feature_maps
    shapes: Tensor
    starts: Tensor
    locations: Tensor
    weights: Tensor


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.looks: list[Look] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "mx_driving" and not name.endswith("_backward"):
            self.looks.append(Look(name, *(a.detach() for a in args)))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def recording() -> Iterator[list[Look]]:
    """Every call of an operator inside the `with` block, in order: of modules, of patched models, of anything.

    >>> import torch, mx_driving
    >>> attention = mx_driving.nn.MultiScaleDeformableAttention(16, num_levels=1)
    >>> levels = mx_driving.nn.flatten_levels([torch.rand(1, 16, 4, 4)])
    >>> with recording() as looks:
    ...     out = attention(torch.rand(1, 3, 16), torch.rand(1, 3, 1, 2), *levels)
    >>> [(look.operator, tuple(look.locations.shape)) for look in looks]
    [('multi_scale_deformable_attn', (1, 3, 8, 1, 4, 2))]
    """
    with _Recorder() as recorder:
        yield recorder.looks
