"""Convert recorded calls of the vendor's and the extensions' functions to calls of the operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .. import ops
from .._foreign.shapes import sampling_inputs
from .._foreign.stand_ins import stand_in
from .._foreign_functions import FUNCTIONS
from .._operator.description import OPERATORS, POOL, Operator
from .._operator.problems import Problem
from .._torch_private import TorchDispatchMode

Facts = dict[str, Any]  # tensors and sizes by name
_POOLS = {function.name: function for function in FUNCTIONS if function.operator == POOL}
_OPTIONAL = dict.fromkeys(("depth", "ranks_depth", "ranks_feat", "memo"))
_CHANNELS_FIRST_FEAT = "voxel_pooling_inference_forward_wrapper"


class _Captured(Exception):
    """Carries the arguments of an operator out of the function that calls the operator."""


class _Capture(TorchDispatchMode):
    """Raise _Captured with the arguments of the first operator, instead of computing it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "mx_driving":
            raise _Captured(args)
        return func(*args, **(kwargs or {}))


def read_inputs(name: str, about: Facts, tensors: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the operator's input tensors and its sizes."""
    facts = {**_OPTIONAL, **about.get("sizes", {}), **tensors}
    is_pooling = OPERATORS[about["operator"]].kind == "pooling"
    try:
        inputs = _pool(name, about.get("form", POOL), facts) if is_pooling else _sample(about["operator"], facts)
    except KeyError as error:
        present = ", ".join(sorted(name for name, fact in facts.items() if fact is not None))
        raise Problem(f"{name} must hold {error.args[0]}; got {present or 'nothing'}") from None
    return tuple(inputs[:5]), tuple(inputs[5:])


def _sample(operator: str, facts: Facts) -> tuple[Tensor, ...]:
    """Return the inputs of a sampling operator."""
    tables = {name: facts[name] for name in ("shapes", "starts") if name in facts}
    tables = {name: t if t.dtype in (torch.int32, torch.int64) else t.long() for name, t in tables.items()}
    return sampling_inputs(operator, {**facts, **tables})


def _pool(name: str, function: str, facts: Facts) -> Sequence[Any]:
    """Call our pooling function for `function` with the recorded arguments. Return the inputs of the operator that it calls."""
    if function not in _POOLS:
        raise Problem(f"the form of {name} must be one of {', '.join(_POOLS)}; got {function}")
    arguments = [facts[parameter] for parameter in _POOLS[function].names]
    try:
        with torch.no_grad(), _Capture():
            find_pool(function)(*arguments)
    except _Captured as captured:
        (inputs,) = captured.args
        return inputs[1:-1] if _POOLS[function].backward else inputs
    raise Problem(f"{name} must call {POOL}; got none")


def find_pool(function: str) -> Callable[..., Any]:
    """Return our pooling function for a name in the table of foreign functions. For BEVPoolV3.apply, return bev_pool_v3, which
    takes the same arguments."""
    if _POOLS[function].module != "mx_driving":
        return stand_in(_POOLS[function])
    return getattr(ops, "bev_pool_v3" if function == "BEVPoolV3.apply" else function)


def find_output_shape(operator: Operator, inputs: Sequence[Tensor], sizes: Sequence[int]) -> tuple[int, ...]:
    if operator.kind == "pooling":
        return (sizes[0], inputs[0].shape[1], *sizes[1:])
    return (inputs[0].shape[0], inputs[3].shape[1], math.prod(inputs[0].shape[2:]))


def to_operator_shape(about: Facts, result: str, t: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return a result in the shape of the operator's result, if both have the same number of entries."""
    function = about.get("form", "")
    if about["operator"] == POOL:
        if t.dim() and result in ("output", "grad_output") and function in _POOLS and _POOLS[function].layout.endswith("C"):
            t = t.movedim(-1, 1)
        if t.dim() > 1 and result == "grad_feat":
            t = t.movedim(1, -1) if function == _CHANNELS_FIRST_FEAT else t
            t = t.flatten()[: math.prod(shape)]  # without depth, feat may have more rows than there are points
    return t.reshape(shape) if t.numel() == math.prod(shape) else t
