"""multi_scale_deformable_attn: corners off the map, overlapping levels, NaN of any bits, the vendor's largest call."""

import cases
import numpy as np
import pytest
import tolerance
import torch
from cases import MULTI_SCALE
from values import everywhere

INF = float("inf")


@everywhere
def test_corner_off_the_map_is_zero_next_to_infinity(implementation):
    """A corner off the map is not read: zero times the infinity beside it would be NaN."""
    value = torch.tensor([INF, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
    shapes, starts = torch.tensor([[2, 2]]), torch.tensor([0])
    location = torch.tensor([0.125, 0.125]).view(1, 1, 1, 1, 1, 2)  # pixel (-0.25, -0.25): only corner 3 is on the map
    weight = torch.ones(1, 1, 1, 1, 1)
    out = cases.forward_of(implementation, MULTI_SCALE)(value, shapes, starts, location, weight)
    assert out.item() == INF


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("channels", [1, 8, 26, 32])
def test_a_nan_of_any_bits_stays_one_in_16_bits(implementation, channels, dtype):
    """A NaN whose bits are all set would become zero if it were rounded as a number."""
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    weights = bits.view(torch.float32).view(1, 4, 1, 1, 1)
    value, shapes, starts = torch.ones(1, 6, 1, channels, dtype=dtype), torch.tensor([[2, 3]]), torch.tensor([0])
    op = cases.forward_of(implementation, MULTI_SCALE)
    assert op(value, shapes, starts, torch.full((1, 4, 1, 1, 1, 2), 0.5), weights).isnan().all()


@pytest.mark.parametrize("axis", [0, 1], ids=["W", "H"])
def test_bilinear_corners_stay_on_the_map(implementation, axis):
    """No location reads the NaN that follows a map of ones in memory."""
    size = (1 << 24) + 3  # rounds up in float32
    padded = torch.full((1, size + 1, 1, 1), float("nan"))
    padded[:, :-1] = 1
    shapes = torch.tensor([[1, size] if axis == 0 else [size, 1]])
    locations = torch.full((1, 9, 1, 1, 3, 2), 0.5)
    edges = [1.0, 1 - 2**-24, 1 - 2**-23, 1 + 2**-23, 0.0, 2**-25, -(2**-25), 0.5, float("inf")]
    locations[..., axis] = torch.tensor(edges).view(1, -1, 1, 1, 1)
    weights = torch.ones(locations.shape[:-1])
    args = (padded[:, :-1], shapes, torch.tensor([0]), locations, weights)
    out = cases.forward_of(implementation, MULTI_SCALE)(*args)
    assert (out >= 0).all()
    assert (out <= 3).all()
    gradients = cases.gradients_of(implementation, MULTI_SCALE, torch.ones_like(out), args)
    assert all(g.isfinite().all() for g in gradients)
    assert gradients[0].sum() == out.sum()


@pytest.mark.parametrize("implementation", cases.on_the_cpu(), indirect=True)
@pytest.mark.parametrize("points", [3, 4])
def test_overlapping_levels_bitwise(implementation, every_thread, points):
    """A row of two levels has one owner at a time, so that its sum has one order."""
    args = cases.overlapping(points)
    args = cases.cast(args, torch.float32)
    grad = cases.grad_for(MULTI_SCALE, args).float()
    first = None
    for threads in (1, 2, 3, 8, 24):
        torch.set_num_threads(threads)
        found = cases.gradients_of(implementation, MULTI_SCALE, grad, args)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))


def test_vendor_full_size_multi_scale():
    """[6, 9680, 32, 8, 4, 4] with the vendor's magnitudes; truth on a slice of queries, gradient of value by its total. Inputs
    are those of float16, which float32 holds, too."""
    value, shapes, starts, *samples = cases.cast(cases.multi_scale(1, 9680, 32, 8, [cases.VENDOR_LEVEL] * 4, 4), torch.float16)
    value = value * 0.01 * torch.linspace(0.5, 1, 6).half().view(6, 1, 1, 1)
    half = (value, shapes, starts, *(t.expand(6, *t.shape[1:]) for t in samples))
    half_grad = (cases.grad_for(MULTI_SCALE, half) * 1e-3).half()
    some = slice(4000, 4060)
    part = (*half[:3], half[3][:, some], half[4][:, some])
    true = cases.truth_of(MULTI_SCALE, part, half_grad[:, some])
    again = cases.gradients_of("native", MULTI_SCALE, half_grad.double(), cases.cast(half, torch.float64), [True, False, False])
    scale = again[0].abs().max().item()
    for dtype in (torch.float32, torch.float16):
        args, full_grad = cases.cast(half, dtype), half_grad.to(dtype)
        output = cases.forward_of("native", MULTI_SCALE)(*args)
        gradients = cases.gradients_of("native", MULTI_SCALE, full_grad, args)
        for got, place in ((output[:, some], 0), (gradients[1][:, some], 2), (gradients[2][:, some], 3)):
            limit = tolerance.allowed(dtype, torch.float32, true.results[place], true.scales[place], 256, 60)
            assert (np.abs(got.double().numpy() - true.results[place]) <= limit).all()
        loss = torch.finfo(dtype).eps / 2 + 1e-4  # one rounding to the dtype, and positions in float32
        assert (gradients[0].double() - again[0]).abs().max().item() <= loss * scale
