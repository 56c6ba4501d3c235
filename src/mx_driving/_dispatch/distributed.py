"""DTensor: the shardings of an operator's inputs that let every process compute from its own shards.

The first call with a DTensor registers the rules, because importing torch.distributed.tensor takes many times as long as
importing this package.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch

from .. import _needs, _torch_private
from .._operator.description import OPERATORS, Operator

MODULE = "torch.distributed.tensor"  # nobody has a DTensor before this module is imported


def skips_autograd() -> bool:
    """Return whether a call may have DTensors that our Autograd kernel does not prepare: inference mode skips this kernel,
    unless torch.compile traces. A public function must call `prepare` in place of the skipped kernel."""
    return MODULE in sys.modules and not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def prepare(args: tuple[Any, ...], shared: tuple[int, ...]) -> tuple[Any, ...]:
    """Return the arguments. If one is a DTensor, wrap the arguments at the indices `shared`, such as index tables, as
    replicated DTensors."""
    # Without the default, a module that another thread is importing would raise AttributeError.
    DTensor = getattr(sys.modules.get(MODULE), "DTensor", None)
    sharded = next((a for a in args if isinstance(a, DTensor)), None) if DTensor else None
    if sharded is None:
        return args
    mesh = sharded.device_mesh
    if mesh.ndim > 1:
        _needs.check("DTensor on a mesh of several dimensions")
    if isinstance(_torch_private.local_tensor(sharded), _torch_private.FakeTensor):
        _needs.check("DTensor under torch.compile")
    _register()
    # Nothing is sent or compared: every process has computed the same tables.
    replicated = [_placement(None)] * mesh.ndim
    return tuple(
        DTensor.from_local(a, mesh, replicated, run_check=False) if i in shared and not isinstance(a, DTensor) else a  # pyright: ignore
        for i, a in enumerate(args)
    )


@functools.cache
def _register() -> None:
    from torch.distributed.tensor.experimental import register_sharding

    for name, operator in OPERATORS.items():
        forward = getattr(torch.ops.mx_driving, name).default
        backward = getattr(torch.ops.mx_driving, name + "_backward").default
        register_sharding(forward)(functools.partial(_forward_rules, name))
        autocast = getattr(torch.ops.mx_driving, name + "_autocast").default
        register_sharding(autocast)(functools.partial(_forward_rules, name))
        register_sharding(backward)(functools.partial(_backward_rules, name))
        _torch_private.cache_shardings_by_mask(backward, 1 + len(operator.inputs))


def _placement(dim: int | None, partial: bool = False) -> Any:
    """Return the placement of a shard along `dim`; for None, of the whole tensor or of a partial sum."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Shard(dim) if dim is not None else Partial() if partial else Replicate()


def _rules(operator: Operator, inputs: tuple[Any, ...]) -> list[tuple[tuple[int | None, ...], list[Any]]]:
    """Return (dimensions, placements of the inputs that are not None) for every axis that can be sharded. The first entry
    shards nothing."""
    sharded: list[tuple[int | None, ...]] = [(None,) * (len(inputs) + 1)]
    for axis, dims in operator.axes.items():
        if axis == operator.blocks:
            # DTensor shards the output by channels, and would cut it at other places than inputs with unequal shards of heads
            # or groups. So an input must be sharded along the axis already, with shards of equal size.
            cut = set()
            for spec, dim in zip(inputs, dims, strict=False):
                if spec is not None and dim is not None:
                    cut |= {i for i, placement in enumerate(spec.placements) if placement == _placement(dim)}
            size = inputs[operator.weights].shape[dims[operator.weights]]
            if not cut or size % math.prod(inputs[0].mesh.size(i) for i in cut):
                continue
        sharded.append(dims)
    return [(dims, [_placement(dim) for dim, spec in zip(dims, inputs, strict=False) if spec is not None]) for dims in sharded]


def _forward_rules(name: str, *args: Any) -> list[tuple[list[Any], list[Any]]]:
    operator = OPERATORS[name]
    (_, whole), *rest = _rules(operator, args[: len(operator.inputs)])
    return [([_placement(None)], whole), *(([_placement(dims[-1], partial=True)], placements) for dims, placements in rest)]


def _backward_rules(name: str, grad: Any, *rest: Any) -> list[tuple[list[Any], list[Any]]]:
    """Return the rules of a backward. If an input is replicated, each process has a partial sum of its gradient."""
    operator = OPERATORS[name]
    inputs, mask = rest[: len(operator.inputs)], rest[-1]
    everywhere = _placement(None)
    (_, whole), *shards = _rules(operator, inputs)
    needs = list(zip(operator.differentiable, mask, strict=True))
    rules = [([everywhere] * len(mask), [everywhere, *whole])]
    for dims, placements in shards:
        gradients = [_placement(dims[i], partial=True) if needed else everywhere for i, needed in needs]
        rules.append((gradients, [_placement(dims[-1]), *placements]))
    return rules
