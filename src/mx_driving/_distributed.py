"""DTensor: how an operator's inputs may be sharded so that every process works with what it has.

The rules are registered at the first call with a DTensor, because importing torch.distributed.tensor takes many times
longer than importing this package.
"""

from __future__ import annotations

import functools
import math
import sys
from typing import Any

import torch
from torch import Tensor

from ._operators import OPERATORS, TABLES, WEIGHTS


def prepared(args: tuple[Any, ...], tables: tuple[int, ...]) -> tuple[Any, ...]:
    """The arguments as DTensor's dispatch wants them; `tables` are the places of the two index tables among them."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return args
    mesh = next((a.device_mesh for a in args if isinstance(a, module.DTensor)), None)
    if mesh is None:
        return args
    _register()
    return tuple(_replicated(a, mesh) if i in tables else a for i, a in enumerate(args))


def call(op: Any, *args: Tensor) -> Tensor:
    """Call an operator from a door. The Autograd kernel prepares DTensors, but inference mode skips it."""
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
        args = prepared(args, TABLES)
    return op(*args)


def _replicated(table: Tensor, mesh: Any) -> Tensor:
    """An index table, which every process has from its configuration, as a DTensor."""
    from torch.distributed.tensor import DTensor, Replicate

    if isinstance(table, DTensor):
        return table
    return DTensor.from_local(table, mesh, [Replicate()] * mesh.ndim, run_check=False)


@functools.cache
def _register() -> None:
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
    from torch.distributed.tensor.experimental import register_sharding

    propagator = DTensor._op_dispatcher.sharding_propagator
    for name in OPERATORS:
        forward = getattr(torch.ops.mx_driving, name).default
        backward = getattr(torch.ops.mx_driving, name + "_backward").default
        register_sharding(forward)(functools.partial(_forward_rules, name))
        register_sharding(backward)(functools.partial(_backward_rules, name))
        # cached for each mask, since a gradient that is not wanted has another shape
        propagator.op_to_schema_info[backward] = RuntimeSchemaInfo(6, needs_pytree=True)


def _axes(name: str, inputs: tuple[Any, ...]) -> list[tuple[int | None, ...]]:
    """The axes that can be sharded: `blocks` only with even shards, because only then the output's shards match value's."""
    operator = OPERATORS[name]
    return [places for axis, places in operator.axes.items() if axis != operator.blocks or _even(places, inputs)]


def _even(places: tuple[int | None, ...], inputs: tuple[Any, ...]) -> bool:
    """Whether some input is sharded along the block axis, with all shards of one size."""
    from torch.distributed.tensor import Shard

    mesh = inputs[0].mesh
    cut = set()
    for spec, at in zip(inputs, places, strict=False):
        cut |= {i for i, placement in enumerate(spec.placements) if at is not None and placement == Shard(at)}
    size = inputs[WEIGHTS].shape[places[WEIGHTS]]
    return bool(cut) and size % math.prod(mesh.size(i) for i in cut) == 0


def _placement(at: int | None) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    return Replicate() if at is None else Shard(at)


def _sum(at: int | None) -> Any:
    from torch.distributed.tensor import Partial

    return Partial() if at is None else _placement(at)


def _forward_rules(name: str, *inputs: Any) -> list[tuple[list[Any], list[Any]]]:
    everywhere = _placement(None)
    return [([everywhere], [everywhere] * 5), *(([_sum(at[5])], [_placement(a) for a in at[:5]]) for at in _axes(name, inputs))]


def _backward_rules(name: str, grad: Any, *rest: Any) -> list[tuple[list[Any], list[Any]]]:
    """If every process has an input whole, its gradient is a partial sum. A gradient that is not wanted is empty everywhere."""
    *inputs, mask = rest
    differentiable = OPERATORS[name].differentiable
    everywhere = _placement(None)
    rules = [([everywhere] * len(mask), [everywhere] * 6)]
    for at in _axes(name, (*inputs, grad)):
        gradients = [_sum(at[i]) if wanted else everywhere for i, wanted in zip(differentiable, mask, strict=True)]
        rules.append((gradients, [_placement(at[5]), *(_placement(a) for a in at[:5])]))
    return rules
