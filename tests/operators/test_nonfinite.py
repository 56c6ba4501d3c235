"""NaN and infinity: exact zeros where the specification says so, and no finite number turned into another one."""

from __future__ import annotations

import cases
import numpy as np
import pytest
import tolerance
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE
from values import assert_same_sums, everywhere, everywhere_each, first, run, skip_unless_every_kernel

NAN, INF = float("nan"), float("inf")


@everywhere_each([MULTI_SCALE, AGGREGATION])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_all_inputs_poisoned_give_exact_zeros(implementation, operator, poison, dtype):
    if (operator, dtype) == (AGGREGATION, torch.float16):
        skip_unless_every_kernel(implementation)
    args = first(operator, implementation, dtype)
    args = tuple(torch.full_like(a, poison) if a.is_floating_point() else a for a in args)
    grad = torch.full_like(cases.grad_for(operator, args), poison).to(dtype)
    for result in run(implementation, operator, args, grad):
        assert not result.any()  # a NaN would be true


@everywhere_each([MULTI_SCALE, AGGREGATION])
def test_invalid_samples_contribute_exactly_zero(implementation, operator):
    """Half of the locations lie outside; there value, weight and grad may be anything."""
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
    """One element poisoned: what truth leaves finite is right, what truth makes non-finite is not finite."""
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
def test_a_head_is_not_touched_by_what_another_one_holds(implementation, operator, points, dtype):
    """What follows a query's samples in memory is another head's: a NaN there stays there."""
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


@everywhere
def test_corner_off_the_map_is_zero_next_to_infinity(implementation):
    """A corner that is off the map is not read: its neighbour's infinity arrives as infinity, not as NaN."""
    value = torch.tensor([INF, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
    shapes, starts = torch.tensor([[2, 2]]), torch.tensor([0])
    location = torch.tensor([0.125, 0.125]).view(1, 1, 1, 1, 1, 2)  # pixel (-0.25, -0.25): only corner 3 is on the map
    weight = torch.ones(1, 1, 1, 1, 1)
    out = cases.forward_of(implementation, MULTI_SCALE)(value, shapes, starts, location, weight)
    assert out.item() == INF


# x on a map of four columns, and the column that it reads
FAR = [(NAN, 0), (-INF, 0), (INF, 3), (1e30, 3), (-1e30, 0), (2.9, 2), (-0.9, 0)]
COLUMNS = {
    torch.int64: [(2**62, 3), (-(2**62), 0), (2**31, 3), (-(2**31), 0), (3, 3), (-5, 0)],
    torch.uint8: [(0, 0), (1, 1), (3, 3), (200, 3), (255, 3)],
    torch.float16: [(NAN, 0), (-INF, 0), (INF, 3), (6e4, 3), (-6e4, 0), (2.9, 2), (-0.9, 0)],
    torch.float32: FAR,
    torch.float64: FAR,
    torch.bfloat16: FAR,
}


@everywhere
@pytest.mark.parametrize("dtype", COLUMNS, ids=str)
def test_geometric_clamps_before_it_converts(implementation, dtype):
    if dtype in (torch.uint8, torch.float16):
        skip_unless_every_kernel(implementation)
    xs, columns = zip(*COLUMNS[dtype], strict=True)
    x = torch.tensor(xs, dtype=dtype)
    locations = torch.stack([x, torch.zeros_like(x)], -1).view(1, -1, 1, 1, 1, 2)
    weights, grad = torch.ones(1, len(xs), 1, 1, 1), torch.ones(1, len(xs), 1)
    args = (torch.arange(4.0).view(1, 4, 1, 1), torch.tensor([[1, 4]]), torch.tensor([0]), locations, weights)
    output, grad_value, grad_weight = run(implementation, GEOMETRIC, args, grad)
    assert output.flatten().tolist() == grad_weight.flatten().tolist() == [*columns]
    assert grad_value.flatten().tolist() == [columns.count(i) for i in range(4)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, 8, 26, 32])
def test_a_nan_of_any_bits_stays_one_in_16_bits(implementation, channels, dtype):
    """Rounded as a number, one whose bits are all set would become zero."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    weights = bits.view(torch.float32).view(1, 4, 1, 1, 1)
    value, shapes, starts = torch.ones(1, 6, 1, channels, dtype=dtype), torch.tensor([[2, 3]]), torch.tensor([0])
    op = cases.forward_of(implementation, MULTI_SCALE)
    assert op(value, shapes, starts, torch.full((1, 4, 1, 1, 1, 2), 0.5), weights).isnan().all()
