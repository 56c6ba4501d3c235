"""Convert recorded calls of the vendor's and the extensions' functions to calls of the operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._foreign_functions import FUNCTIONS
from .._operator.description import OPERATORS, POOL, Operator
from .._operator.problems import Problem
from .._torch_private import TorchDispatchMode
from ..ops._other_shapes import sampling_inputs
from ..ops._stand_ins import stand_in

Facts = dict[str, Any]  # tensors and sizes by name
_ROWS = {row.name: row for row in FUNCTIONS if row.operator == POOL}
_OPTIONAL = dict.fromkeys(("depth", "ranks_depth", "ranks_feat", "memo"))
_CHANNELS_FIRST_FEAT = "voxel_pooling_inference_forward_wrapper"


class _Captured(Exception):
    """Carries the arguments of an operator's call out of the function that calls the operator."""


class _Capture(TorchDispatchMode):
    """Raise _Captured with the arguments of the first operator, instead of computing it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mx_driving":
            raise _Captured(args)
        return func(*args, **(kwargs or {}))


def inputs_of(name: str, about: Facts, tensors: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the operator's input tensors and its sizes."""
    facts = {**_OPTIONAL, **about.get("sizes", {}), **tensors}
    is_pooling = OPERATORS[about["operator"]].kind == "pooling"
    try:
        inputs = _pooling(name, about.get("form", POOL), facts) if is_pooling else _sampling(about["operator"], facts)
    except KeyError as error:
        fact = ", ".join(sorted(name for name, fact in facts.items() if fact is not None))
        raise Problem(f"{name} must hold {error.args[0]}; got {fact or 'nothing'}") from None
    return tuple(inputs[:5]), tuple(inputs[5:])


def _sampling(operator: str, facts: Facts) -> tuple[Tensor, ...]:
    tables = {name: facts[name] for name in ("shapes", "starts") if name in facts}
    tables = {name: t if t.dtype in (torch.int32, torch.int64) else t.long() for name, t in tables.items()}
    return sampling_inputs(operator, {**facts, **tables})


def _pooling(name: str, form: str, facts: Facts) -> Sequence[Any]:
    """Call our function for the recorded function, and return the inputs of the operator that it calls."""
    if form not in _ROWS:
        raise Problem(f"the form of {name} must be one of {', '.join(_ROWS)}; got {form}")
    arguments = [facts[parameter] for parameter in _ROWS[form].names]
    try:
        with torch.no_grad(), _Capture():
            function_named(form)(*arguments)
    except _Captured as captured:
        (inputs,) = captured.args
        return inputs[1:-1] if _ROWS[form].backward else inputs
    raise Problem(f"{name} must call {POOL}; got none")


def function_named(form: str) -> Callable[..., Any]:
    """Return our pool for this row of record.py's table. BEVPoolV3.apply takes the same arguments as bev_pool_v3."""
    if _ROWS[form].module != "mx_driving":
        return stand_in(_ROWS[form])
    return getattr(ops, "bev_pool_v3" if form == "BEVPoolV3.apply" else form)


def output_shape(row: Operator, inputs: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, ...]:
    if row.kind == "pooling":
        return (sizes[0], inputs[0].shape[1], *sizes[1:])
    return (inputs[0].shape[0], inputs[3].shape[1], math.prod(inputs[0].shape[2:]))


def in_operators_shape(about: Facts, result: str, t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a result in the shape of the operator's result, if both have the same number of entries."""
    form = about.get("form", "")
    if about["operator"] == POOL:
        if t.dim() and result in ("output", "grad_output") and form in _ROWS and _ROWS[form].layout.endswith("C"):
            t = t.movedim(-1, 1)
        if t.dim() > 1 and result == "grad_feat":
            t = t.movedim(1, -1) if form == _CHANNELS_FIRST_FEAT else t
            t = t.flatten()[: math.prod(shape)]  # without depth, feat may have more rows than there are points
    return t.reshape(shape) if t.numel() == math.prod(shape) else t
