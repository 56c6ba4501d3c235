"""Decompositions into standard operations, for exporters, compared with truth."""

import cases
import logits_cases
import numpy as np
import pytest
import torch
from small_cases import One, comparisons_of_int64
from values import first

import mx_driving

# A decomposition has one way for all sizes, without a loop over levels. Large maps would test nothing else.
LARGE = {"BEVFormer spatial", "Sparse4D", "vendor 15 points", "vendor 128 x 8 x 8 x 8", "vendor 147 x 7 x 3 x 21"}
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


@pytest.mark.parametrize("operator", cases.EVERY)
def test_no_graph_of_a_sampling_operator_compares_int64(operator):
    """Compilers are known to compute such comparisons wrongly (Core AI, apple/coreai-torch #11). No operator stays whole."""
    args = first(operator)
    tensors = tuple(a for a in args if isinstance(a, torch.Tensor))
    assert comparisons_of_int64(torch.export.export(One(operator, args), tensors)) == []


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("sizes", [(4, 3, 6), (0, 3, 6), (4, 0, 6), (4, 3, 0)])
def test_ranks_without_a_row_add_nothing(sizes, dtype):
    """As in the reference. NaN in the first and last rows enters no cell; a negative rank does not count from the end."""
    rows, elements, cells = sizes
    feat, depth = torch.randn(rows, 2), torch.rand(elements)
    feat[:1], depth[:1] = torch.nan, torch.inf
    feat[-1:], depth[-1:] = torch.inf, torch.nan
    far = torch.iinfo(dtype)
    ranks = [[-1, far.min, far.max, size, 0, 1, 2] for size in sizes]
    points = torch.cartesian_prod(*(torch.tensor(r, dtype=dtype) for r in ranks)).unbind(1)
    args = feat, depth, *points, 1, 1, cells // 3, 3
    expected = mx_driving.reference.bev_pool_v3(*args)
    torch.testing.assert_close(decomposed("bev_pool_v3", args), expected, equal_nan=True, rtol=1e-6, atol=1e-6)
