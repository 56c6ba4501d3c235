"""torch.vmap of an operator or its backward: a single call, with the vmapped axis folded into the batches or queries."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._operator import checks, rules
from .._operator.description import Operator


def map_call(operator: Operator, op: Any, value: int, size: int, dims: list[int | None], args: tuple[Any, ...]) -> Any:
    """Return the results for all entries of the vmapped axis, and the dimension of the vmapped axis in every result.

    Fold the axis into the batches if an input that all queries read, such as value, is vmapped or needs a gradient; else into
    the queries. Call the operator once per entry for pooling, and if an input that batches share, such as the sizes of maps,
    is vmapped.

    Args:
        value: the index of value among the arguments: 1 in a backward, because grad_output is first; else 0.
        size: the size of the vmapped axis.
        dims: the vmapped dimension of each argument, or None.
    """
    shared = [value + i for i in operator.shared]
    if operator.kind == "pooling" or any(dims[i] is not None for i in shared):
        return _call_for_each(operator, op, value, size, dims, args)
    mask = args[-1] if value else None
    needed = [value + i for i, need in zip(operator.differentiable, mask or (), strict=False) if need]
    read_by_all = [value + i for i, axis in enumerate(operator.axes[operator.queries][:-1]) if axis is None]
    joined = 0 if any(dims[i] is not None or i in needed for i in read_by_all) else 1
    whole = read_by_all if joined else shared
    folded = [
        _move_to(a, dim, size, joined).flatten(joined, joined + 1) if isinstance(a, Tensor) and i not in whole else a
        for i, (a, dim) in enumerate(zip(args, dims, strict=True))
    ]
    locations = value + 3
    count = _move_to(args[locations], dims[locations], size, joined).shape[joined + 1]  # number of batches or queries
    results = op(*folded)
    if mask is None:
        return results.unflatten(joined, (size, count)), joined
    outputs = tuple(g.unflatten(joined, (size, count)) if needed else g for g, needed in zip(results, mask, strict=True))
    return outputs, tuple(joined if needed else None for needed in mask)


def _move_to(t: Tensor, dim: int | None, size: int, axis: int) -> Tensor:
    """Move the vmapped axis to `axis`. Without a vmapped axis, expand a new axis of `size`, which copies nothing."""
    if dim is not None:
        return t.movedim(dim, axis)
    return t.unsqueeze(axis).expand(*t.shape[:axis], size, *t.shape[axis:])


def _call_for_each(operator: Operator, op: Any, value: int, size: int, dims: list[int | None], args: tuple[Any, ...]) -> Any:
    if size == 0:
        name = op.name().partition("::")[2]
        rules.fail(ValueError, "in_dims", f"name axes with entries where vmap calls {name} for each", "size 0")
    entries = ([a if d is None else a.select(d, i) for a, d in zip(args, dims, strict=True)] for i in range(size))
    results = [_call(operator, op, value, entry) for entry in entries]
    if isinstance(results[0], Tensor):
        return torch.stack(results), 0
    return tuple(torch.stack(r) for r in zip(*results, strict=True)), (0,) * len(results[0])


def _call(operator: Operator, op: Any, value: int, args: list[Any]) -> Any:
    """Call the operator for an entry. After an error, check the entry and the numbers in its index tensors here: callers cannot
    read those of vmapped tensors."""
    try:
        return op(*args)
    except RuntimeError:
        (checks.check_backward if value else checks.check_inputs)(operator, *args)
        checks.check_readable_numbers(operator, args[value : len(args) - value])
        raise
