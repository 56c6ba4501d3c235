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
        if size == 0:
            name = op.name().partition("::")[2]
            rules.fail(ValueError, "in_dims", f"name axes with entries where vmap calls {name} for each", "size 0")
        entry_results = []
        for entry in range(size):
            inputs = [a if d is None else a.select(d, entry) for a, d in zip(args, dims, strict=True)]
            try:
                entry_results.append(op(*inputs))
            except RuntimeError:  # check the numbers in index tensors here: callers cannot read those of vmapped tensors
                (checks.check_backward if value else checks.check_inputs)(operator, *inputs)
                checks.check_readable_numbers(operator, inputs[value : len(args) - value])
                raise
        if value == 0:
            return torch.stack(entry_results), 0
        return tuple(map(torch.stack, zip(*entry_results, strict=True))), (0,) * len(entry_results[0])
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
