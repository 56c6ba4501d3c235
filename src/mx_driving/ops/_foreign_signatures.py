"""Aliases that accept the arguments of other libraries: mmcv's im2col_step, transformers' names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._arguments import rename_once


def with_foreign_signatures(public: Callable[..., Tensor], shapes: str, starts: str) -> Callable[..., Tensor]:
    """Return `public` with the arguments of other libraries. `shapes` and `starts` are the index tables' names in `public`.

    Accept an im2col_step and ignore it. Accept the index tables as lists, and with or without "value_" before their names.
    Accept transformers' value_spatial_shapes_list, and use this list if the tensor of shapes is None or missing.
    """
    names = {other + table.removeprefix("value_"): table for table in (shapes, starts) for other in ("", "value_")}

    def call(*args: Any, **named: Any) -> Tensor:
        positional, listed = list(args), named.pop("value_spatial_shapes_list", None)
        if len(positional) > 2 and _holds_pairs(positional[2]):
            listed = positional.pop(2)
        if len(positional) == 6 and isinstance(positional[5], int):
            del positional[5]
        named.pop("im2col_step", None)
        named = rename_once(named, names)
        if listed is not None and len(positional) < 2 and named.get(shapes) is None:
            named[shapes] = listed
        if len(positional) > 1 and positional[1] is None:
            positional[1] = listed
        value = positional[0] if positional else named.get("value")
        positional[1:3] = (_as_table(a, value) for a in positional[1:3])
        return public(*positional, **{n: _as_table(a, value) if n in (shapes, starts) else a for n, a in named.items()})

    return call


def _holds_pairs(a: Any) -> bool:
    return isinstance(a, (list, tuple)) and len(a) > 0 and all(isinstance(pair, (list, tuple)) for pair in a)


def _as_table(table: Any, value: Any) -> Any:
    return torch.tensor(table, device=value.device) if isinstance(table, (list, tuple)) and isinstance(value, Tensor) else table
