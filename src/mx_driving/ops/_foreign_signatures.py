"""The aliases take the calls of other libraries: mmcv passes a step of im2col, transformers uses names of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def with_foreign_signatures(public: Callable[..., Tensor], shapes: str, starts: str) -> Callable[..., Tensor]:
    """`public` for aliases that stand in for other libraries' functions. `shapes` and `starts` are its names of the tables.

    An im2col_step is accepted and not used. The tables may be lists, and their names may begin with "value_" or not. A list
    of shapes may follow them (transformers' value_spatial_shapes_list); it is used if there is no tensor of shapes.
    """
    names = {other + table.removeprefix("value_"): table for table in (shapes, starts) for other in ("", "value_")}

    def call(*args: Any, **named: Any) -> Tensor:
        given, listed = list(args), named.pop("value_spatial_shapes_list", None)
        if len(given) > 2 and _is_of_pairs(given[2]):
            listed = given.pop(2)
        if len(given) == 6 and isinstance(given[5], int):
            del given[5]
        named.pop("im2col_step", None)
        named = {names.get(name, name): a for name, a in named.items()}
        if listed is not None and len(given) < 2 and named.get(shapes) is None:
            named[shapes] = listed
        if len(given) > 1 and given[1] is None:
            given[1] = listed
        value = given[0] if given else named.get("value")
        given[1:3] = (_tensor(a, value) for a in given[1:3])
        return public(*given, **{n: _tensor(a, value) if n in (shapes, starts) else a for n, a in named.items()})

    return call


def _is_of_pairs(a: Any) -> bool:
    return isinstance(a, (list, tuple)) and len(a) > 0 and all(isinstance(pair, (list, tuple)) for pair in a)


def _tensor(table: Any, value: Any) -> Any:
    return torch.tensor(table, device=value.device) if isinstance(table, (list, tuple)) and isinstance(value, Tensor) else table
