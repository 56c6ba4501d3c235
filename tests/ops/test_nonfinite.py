"""NaN and infinity give exact zeros where the specification says so, and change no finite result."""

import cases
import numpy as np
import pytest
import tolerance
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE, MULTI_SCALE_LOGITS
from values import DTYPES, assert_same_sums, everywhere_each, first, run, skip_unless_every_kernel

NAN, INF = float("nan"), float("inf")


@everywhere_each([MULTI_SCALE, AGGREGATION, MULTI_SCALE_LOGITS])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_all_inputs_poisoned_give_exact_zeros(implementation, operator, poison, dtype):
    """All inputs but logits are poisoned."""
    if (operator, dtype) == (AGGREGATION, torch.float16):
        skip_unless_every_kernel(implementation)
    args = first(operator, implementation, dtype)
    logits = cases.WEIGHTS[operator] if operator in cases.WITH_LOGITS else None
    args = tuple(torch.full_like(a, poison) if cases.is_floating(a) and i != logits else a for i, a in enumerate(args))
    grad = torch.full_like(cases.grad_for(operator, args), poison).to(dtype)
    for result in run(implementation, operator, args, grad):
        assert not result.any()  # a NaN would be true


@everywhere_each([MULTI_SCALE, AGGREGATION])
def test_invalid_samples_contribute_exactly_zero(implementation, operator):
    """Half of the locations lie outside the map. Weights and grad_output of these samples may be NaN or infinite."""
    args = list(first(operator, implementation))
    grad = cases.grad_for(operator, tuple(args)).float()
    locations, weights, g = args[3].clone(), args[4].clone(), grad.clone()
    for odd, bad in ((1, NAN), (3, INF), (5, -7.0)):
        locations[:, odd::6] = bad
    weights[:, 1::2], g[:, 1::2] = NAN, INF
    results = run(implementation, operator, (*args[:3], locations, weights), g)
    args[4][:, 1::2], grad[:, 1::2] = 0, 0
    expected = run(implementation, operator, args, grad)
    assert torch.equal(results[0], expected[0])
    assert_same_sums(implementation, results[1], expected[1])
    for got in results[2:]:
        assert not got[:, 1::2].any()
        assert got[:, ::2].isfinite().all()
    assert torch.equal(results[2][:, ::2], expected[2][:, ::2])


@everywhere_each(cases.OPERATORS)
@pytest.mark.parametrize("which", ["value", "weights", "grad"])
@pytest.mark.parametrize("poison", [NAN, INF])
def test_finite_where_truth_is_finite(implementation, operator, poison, which):
    """One element is poisoned. A result is finite where truth is finite, and near it; nowhere else is it finite."""
    args = list(first(operator, implementation))
    grad = cases.grad_for(operator, tuple(args)).float()
    target = {"value": args[0], "weights": args[4], "grad": grad}[which]
    target.view(-1)[target.numel() // 2] = poison
    with np.errstate(invalid="ignore"):
        true = cases.truth_of(operator, tuple(args), grad)
    for got, expected, scale in zip(run(implementation, operator, tuple(args), grad), *true, strict=True):
        finite = np.isfinite(expected)
        assert (np.isfinite(got.numpy()) == finite).all()
        limit = tolerance.allowed(torch.float32, torch.float32, expected, np.where(np.isfinite(scale), scale, 0), 64, 20)
        error = np.abs(got.double().numpy()[finite] - expected[finite])
        assert (error <= np.broadcast_to(limit, finite.shape)[finite]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("points", [1, 3, 4, 5, 7, 9, 13])
@pytest.mark.parametrize("operator", [MULTI_SCALE, GEOMETRIC])
@pytest.mark.usefixtures("same_bits")
def test_nan_of_a_head_stays_in_this_head(implementation, operator, points, dtype):
    """The weights of another head follow those of a query's head in memory. Vectors must not read its NaN."""
    generator = torch.Generator().manual_seed(points)
    value = torch.randn(1, 20, 4, 32, generator=generator).to(dtype)
    locations = torch.rand(1, 9, 4, 1, points, 2, generator=generator) * (1 if operator == MULTI_SCALE else 4)
    weights = torch.rand(1, 9, 4, 1, points, generator=generator).to(dtype)
    grad = torch.randn(1, 9, 4, 32, generator=generator).to(dtype)

    def by_head(weights):
        locations_of = locations.to(dtype) if operator == MULTI_SCALE else locations.long()
        args = (value, torch.tensor([[4, 5]]), torch.tensor([0]), locations_of, weights)
        output, grad_value, *grad_samples = run(implementation, operator, args, grad.flatten(2))
        return [output.view(1, 9, 4, 32), grad_value, *grad_samples]

    clean, others = by_head(weights), torch.tensor([0, 1, 3])
    weights[:, :, 2] = NAN
    for got, expected in zip(by_head(weights), clean, strict=True):
        assert torch.equal(got[:, :, others], expected[:, :, others])
