"""16-bit inputs whose output is float32: the bits of converting the inputs to float32 first."""

from __future__ import annotations

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from torch import Tensor

from mx_driving import _backends
from mx_driving._operators import OPERATORS

POOL = "bev_pool_v3"
MAPS = [(12, 17), (6, 9)]


def points_of_cells(channels, count):
    generator = torch.Generator().manual_seed(0)
    ranks = (torch.randint(size, (count,), generator=generator) for size in (20, 400, 60))
    feat = torch.randn(20, channels, dtype=torch.float64, generator=generator)
    depth = torch.rand(400, dtype=torch.float64, generator=generator)
    return feat, depth, *ranks, 1, 1, 6, 10


# Channels of a head fill pairs of vectors, of which dot products add up channels in the same order as in float32, or do not.
CASES = {
    "32 channels": (MULTI_SCALE, lambda: cases.multi_scale(2, 40, 32, 2, MAPS, 4)),
    "37 channels": (MULTI_SCALE, lambda: cases.multi_scale(1, 9, 37, 1, MAPS, 3)),
    "nearest": (GEOMETRIC, lambda: cases.geometric(2, 40, 32, 2, MAPS, 4)),
    "packed levels": (MULTI_SCALE, lambda: cases.multi_scale(1, 1100, 32, 2, [(4, 5)], 2)),
    "packed as float32": (GEOMETRIC, lambda: cases.geometric(1, 1100, 32, 2, [(4, 5)], 4)),
    "groups of 32 channels": (AGGREGATION, lambda: cases.aggregation(2, 9, 5, 64, 2, [MAPS, MAPS])),
    "groups of 5 channels": (AGGREGATION, lambda: cases.aggregation(1, 9, 5, 15, 3, [MAPS, MAPS])),
    "offsets": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(2, 40, 32, 2, MAPS, 4)),
    "boxes": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 40, 64, 2, MAPS, 4, box=True)),
    "window": (GEOMETRIC_LOGITS, lambda: logits_cases.geometric(2, 90, 32, 2, MAPS, (2, 2))),
    "heads together": (GEOMETRIC_LOGITS, lambda: logits_cases.geometric(1, 300, 32, 8, [(4, 5)], (3, 5))),
    "projected": (AGGREGATION_LOGITS, lambda: logits_cases.aggregation(2, 9, 5, 64, 2, [MAPS, MAPS])),
    "cells": (POOL, lambda: points_of_cells(16, 900)),
    "few channels": (POOL, lambda: points_of_cells(3, 900)),
}


def widened(args):
    return tuple(a.float() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


@pytest.fixture(params=_backends.native.available_isas() if _backends.native.why_not() is None else [])
def instruction_set(request):
    with _backends.native.use_isa(request.param):
        yield


@pytest.fixture(params=[1, 2, 8])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def in_float32(operator, args):
    """The output of the C function, in float32 memory."""
    function = _backends.native.kernel(operator, False)
    inputs, options = function.split(args)
    output = torch.empty(function.output_shape(*args), dtype=torch.float32)
    function.call(inputs, options, [*inputs, output])
    return output


@pytest.mark.usefixtures("instruction_set", "threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_c_functions_have_the_bits_of_float32(name, dtype):
    operator, make = CASES[name]
    args = cases.cast(make(), dtype)
    output = in_float32(operator, args)
    backward, mask = _backends.native.kernel(operator, True), [True] * len(OPERATORS[operator].differentiable)
    assert torch.equal(output, _backends.native.kernel(operator, False)(*widened(args)))
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    for found, wide in zip(backward(grad, *args, mask), backward(grad, *widened(args), mask), strict=True):
        assert torch.equal(found, wide.to(dtype))
