"""The same bits for any order of samples, for any output mask, and in 16 bits as in 32. native/test_plan.py has numbers of
threads."""

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE, Case
from values import run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bits_do_not_depend_on_where_a_sample_stands(dtype):
    """Kernels compute sixteen samples at once, or eight. Eight samples off the map shift samples from one to the other."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(1, 35, 2, 40, generator=generator).to(dtype)
    edges = torch.tensor([-0.5, -0.1, -0.0, 0, 0.1, 0.3, 0.5, 0.9, 1, 1.1, 1.5, 1e9, -1e9, torch.nan, torch.inf, 1e-9])
    locations = (edges[torch.randint(16, (1, 300, 2, 1, 16, 2), generator=generator)] / torch.tensor([7, 5]) * 5).to(dtype)
    weights = torch.rand(1, 300, 2, 1, 16, generator=generator).to(dtype)
    off_map = torch.full((1, 300, 2, 1, 8, 2), -3.0, dtype=dtype), torch.zeros(1, 300, 2, 1, 8, dtype=dtype)
    shifted = torch.cat([off_map[0], locations], 4), torch.cat([off_map[1], weights], 4)
    operator, tables = torch.ops.mx_driving.multi_scale_deformable_attn, (torch.tensor([[5, 7]]), torch.tensor([0]))
    grad = torch.randn(1, 300, 80, generator=generator).to(dtype)
    assert torch.equal(operator(value, *tables, locations, weights), operator(value, *tables, *shifted))
    backward = torch.ops.mx_driving.multi_scale_deformable_attn_backward
    grad_value, *of_samples = backward(grad, value, *tables, locations, weights, [True] * 3)
    shifted_value, *of_shifted = backward(grad, value, *tables, *shifted, [True] * 3)
    assert torch.equal(grad_value, shifted_value)
    for gradient, shifted_gradient in zip(of_samples, of_shifted, strict=True):
        assert torch.equal(gradient, shifted_gradient[:, :, :, :, 8:])


# Larger than a band, which holds 6 MB of sums for a 16-bit gradient, or 16 MB of an aggregation's gradient in place.
LONG = [
    Case(MULTI_SCALE, "9 MB a head", lambda: cases.multi_scale(1, 40, 256, 1, [(96, 96)], 4)),
    Case(AGGREGATION, "17 MB", lambda: cases.aggregation(1, 9, 7, 256, 8, [[(130, 130)]])),
    Case(GEOMETRIC, "9 MB a head", lambda: cases.geometric(1, 40, 256, 1, [(96, 96)], 4)),
]


@pytest.mark.parametrize("implementation", cases.on_the_cpu(), indirect=True)
@pytest.mark.parametrize("case", LONG, ids=cases.case_id)
def test_a_16_bit_gradient_of_value_is_that_of_float32_rounded(implementation, case):
    """The two gradients may be cut into different numbers of bands."""
    args = cases.cast(case.make(), torch.bfloat16)
    grad = cases.grad_for(case.operator, args).bfloat16()
    narrow = cases.gradients_of(implementation, case.operator, grad, args)[0]
    wide = cases.gradients_of(implementation, case.operator, grad.float(), cases.cast(args, torch.float32))[0]
    assert narrow.dtype == torch.bfloat16
    assert narrow.any()
    assert torch.equal(narrow, wide.bfloat16())


SEVERAL = [(case, torch.float32) for case in (*cases.CASES, *logits_cases.CASES) if case.name not in cases.OF_MILLIONS]
SEVERAL += [(case, torch.bfloat16) for case in logits_cases.CASES]


@pytest.mark.parametrize("implementation", [i for i in cases.on_the_cpu() if i != "reference"], indirect=True)
@pytest.mark.parametrize(("case", "dtype"), SEVERAL, ids=lambda p: str(p) if isinstance(p, torch.dtype) else cases.case_id(p))
def test_gradients_asked_for_together_or_one_by_one(implementation, every_thread, case, dtype):
    """One pass through the queries computes all gradients, or each gradient takes a pass: the bits are the same.

    The reference has one way; test_autograd.py tries it with all masks."""
    args = cases.cast(cases.made(case), dtype)
    grad = cases.grad_for(case.operator, args).to(dtype)
    places, first = range(len(cases.DIFFERENTIABLE[case.operator])), None
    for threads in (1, 3):
        torch.set_num_threads(threads)
        together = run(implementation, case.operator, args, grad)
        first = first or together
        assert all(torch.equal(a, b) for a, b in zip(first, together, strict=True))
        for i in places:
            alone = cases.gradients_of(implementation, case.operator, grad, args, [i == j for j in places])
            assert torch.equal(alone[i], together[1 + i])
