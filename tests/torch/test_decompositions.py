"""The operators as standard operations, which exporters are given, against the truth."""

from __future__ import annotations

import cases
import logits_cases
import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from values import first

import mx_driving

LARGE = {"BEVFormer spatial", "Sparse4D", "vendor 15 points"}
SMALL = [case for case in cases.CASES if case.name not in LARGE] + logits_cases.CASES


def decomposed(operator, args):
    return torch._decomp.decomposition_table[getattr(torch.ops.mx_driving, operator).default](*args)


@pytest.mark.parametrize("case", SMALL, ids=cases.case_id)
def test_values(case):
    args = cases.cast(case.make(), torch.float64)
    true = cases.truth_of(case.operator, args, cases.grad_for(case.operator, args))
    found = decomposed(case.operator, args)
    assert (found.dtype, tuple(found.shape)) == (torch.float64, true.results[0].shape)
    assert (np.abs(found.numpy() - true.results[0]) <= 1e-12 * (1 + true.scales[0])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", cases.EVERY)
def test_values_of_other_dtypes_are_those_of_the_reference(operator, dtype):
    args = first(operator, dtype=dtype)
    found, expected = decomposed(operator, args), cases.forward_of("reference", operator)(*args)
    torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


@pytest.mark.parametrize("operator", cases.WITH_LOGITS)
def test_exporters_write_gathers_and_sums(operator):
    """Neither the operator nor its bare one is left in a graph."""
    args = first(operator)
    graph = make_fx(getattr(torch.ops.mx_driving, operator).default, decomposition_table=torch._decomp.decomposition_table)(
        *args
    )
    assert not [node for node in graph.graph.nodes if "mx_driving" in str(node.target)]
    torch.testing.assert_close(graph(*args), getattr(mx_driving, operator)(*args), rtol=3e-7, atol=1e-4)
