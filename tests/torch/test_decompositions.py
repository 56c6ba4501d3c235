"""The operators as standard operations, which exporters are given, against the truth."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import torch

import mx_driving  # noqa: F401

LARGE = {"BEVFormer spatial", "Sparse4D", "vendor 15 points"}
SMALL = [case for case in cases.CASES if case.name not in LARGE]


def decomposed(operator, args):
    return torch._decomp.decomposition_table[getattr(torch.ops.mx_driving, operator).default](*args)


@pytest.mark.parametrize("case", SMALL, ids=cases.case_id)
def test_values(case):
    args = cases.cast(case.make(), torch.float64)
    true = cases.truth_of(case.operator, args, cases.grad_for(case.operator, args))
    found = decomposed(case.operator, args)
    assert (found.dtype, tuple(found.shape)) == (torch.float64, true.results[0].shape)
    assert (np.abs(found.numpy() - true.results[0]) <= 1e-12 * (1 + true.scales[0])).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_values_of_other_dtypes_are_those_of_the_reference(operator, dtype):
    case = next(case for case in SMALL if case.operator == operator)
    args = cases.cast(case.make(), dtype)
    found, expected = decomposed(operator, args), cases.forward_of("reference", operator)(*args)
    torch.testing.assert_close(found, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-5)


def test_every_operator_is_tried():
    assert {case.operator for case in SMALL} == set(cases.OPERATORS)
