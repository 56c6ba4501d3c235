"""Operators with logits: softmax and infinity, reference points, cameras. test_values.py has their values."""

import cases
import logits_cases
import numpy as np
import pytest
import torch
from cases import AGGREGATION_LOGITS, GEOMETRIC_LOGITS, MULTI_SCALE_LOGITS, WITH_LOGITS
from small_cases import TINY
from values import compare, first, run, skip_unless_every_kernel

import mx_driving

pytestmark = pytest.mark.usefixtures("same_bits")

NAN, INF = float("nan"), float("inf")


def test_logits_on_one_axis_or_on_two(implementation):
    args = first(MULTI_SCALE_LOGITS)
    grad = cases.grad_for(MULTI_SCALE_LOGITS, args).float()
    *flat, of_logits = run(implementation, MULTI_SCALE_LOGITS, args, grad)
    split = (*args[:5], args[5].unflatten(3, args[4].shape[3:5]), args[6])
    *found, of_split = run(implementation, MULTI_SCALE_LOGITS, split, grad)
    assert all(torch.equal(a, b) for a, b in zip(flat, found, strict=True))
    assert torch.equal(of_logits, of_split.flatten(3))


@pytest.mark.parametrize("operator", WITH_LOGITS)
def test_a_logit_of_minus_infinity_is_weight_zero(implementation, operator):
    """Results are those of a softmax without the sample."""
    args = first(operator)
    left_out = np.s_[:, :, 1, 0, ::2, 1:3] if operator == AGGREGATION_LOGITS else np.s_[..., 3]
    args[5][left_out] = -INF
    grad = cases.grad_for(operator, args).float()
    compare(implementation, operator, args, grad)
    assert not run(implementation, operator, args, grad)[-1][left_out].any()


@pytest.mark.parametrize("bad", [-INF, NAN])
def test_a_row_that_softmax_turns_to_nan(implementation, bad):
    """The row gives NaN, as softmax does, and no other row."""
    args = first(MULTI_SCALE_LOGITS)
    grad = cases.grad_for(MULTI_SCALE_LOGITS, args).float()
    clean = run(implementation, MULTI_SCALE_LOGITS, args, grad)
    logits = args[5].clone()
    logits[0, 5, 1] = bad
    output, _, of_reference, *others = run(implementation, MULTI_SCALE_LOGITS, (*args[:5], logits, args[6]), grad)
    output, expected = (t.unflatten(2, (args[0].shape[2], -1)) for t in (output, clean[0]))
    elsewhere = torch.ones(output.shape[:3], dtype=torch.bool)
    elsewhere[0, 5, 1] = False
    assert output[0, 5, 1].isnan().all()
    assert torch.equal(output[elsewhere], expected[elsewhere])
    assert all(torch.equal(got[elsewhere], before[elsewhere]) for got, before in zip(others, clean[3:], strict=True))
    assert others[-1][0, 5, 1].isnan().all()
    assert torch.equal(of_reference[1], clean[2][1])


@pytest.mark.parametrize("box", [False, True])
@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [3, 4])
def test_a_sample_off_the_map_counts_in_softmax_alone(implementation, which, poison, box):
    """References or offsets of every second query are poisoned: the output and all gradients are zero there."""
    args = cases.cast(logits_cases.multi_scale(2, 12, 8, 2, [(5, 7), (3, 2)], 3, box=box), torch.float32)
    grad = cases.grad_for(MULTI_SCALE_LOGITS, args).float()
    clean = run(implementation, MULTI_SCALE_LOGITS, args, grad)
    poisoned, g = args[which].clone(), grad.clone()
    poisoned[:, 1::2], g[:, 1::2] = poison, NAN
    found = run(implementation, MULTI_SCALE_LOGITS, (*args[:which], poisoned, *args[which + 1 :]), g)
    for place in (0, 2, 3, 4):
        assert not found[place][:, 1::2].any()
        assert torch.equal(found[place][:, ::2], clean[place][:, ::2])
    assert found[1].isfinite().all()


HALVES = [(0.125, 0), (0.25, 1), (0.375, 2), (0.625, 2), (0.65, 3), (0.875, 3)]
BEYOND = [(NAN, 0), (-INF, 0), (INF, 3), (-0.5, 0), (9.0, 3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_pixels_are_rounded_half_to_even(implementation, dtype):
    """0.125 is half a pixel of a map that is four pixels wide. Pixels beyond a border are moved to it."""
    xs, columns = zip(*HALVES, *BEYOND, strict=True)
    value, tables = torch.arange(4.0).view(1, 4, 1, 1), (torch.tensor([[1, 4]]), torch.tensor([0]))
    reference = torch.stack([torch.tensor(xs), torch.zeros(len(xs))], -1).to(dtype).view(1, -1, 1, 2)
    args = (value, *tables, reference, torch.tensor([[0, 0]]), torch.zeros(1, len(xs), 1, 1))
    assert cases.forward_of(implementation, GEOMETRIC_LOGITS)(*args).flatten().tolist() == [*columns]


def test_image_size_and_pair_scale_may_be_left_out(implementation):
    """None is a size of 1, and a scale of 1."""
    args = cases.cast(logits_cases.aggregation(1, 9, 5, 24, 3, [[(6, 7)]] * 3, False, False), torch.float32)
    grad = cases.grad_for(AGGREGATION_LOGITS, args).float()
    ones = (*args[:6], torch.ones(1, 3, 2), torch.ones(1, 9, 3, 5))
    found = run(implementation, AGGREGATION_LOGITS, args, grad)
    for got, expected in zip(found, run(implementation, AGGREGATION_LOGITS, ones, grad), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(found[0], cases.forward_of(implementation, AGGREGATION_LOGITS)(*args[:6], None, None))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("which", [3, 4])
def test_what_no_camera_sees_gives_exact_zeros(implementation, poison, which):
    """Poison the first key point of every anchor, or one camera. Other gradients stay finite."""
    args = list(cases.cast(logits_cases.aggregation(2, 9, 7, 32, 8, [[(6, 7), (3, 4)], [(5, 5), (2, 2)]]), torch.float32))
    grad = cases.grad_for(AGGREGATION_LOGITS, tuple(args)).float()
    args[which] = args[which].clone()
    (args[3][:, :, 0] if which == 3 else args[4][:, 1])[:] = poison
    output, of_maps, of_points, of_projection, of_logits = run(implementation, AGGREGATION_LOGITS, tuple(args), grad)
    assert all(t.isfinite().all() for t in (output, of_maps, of_points, of_projection, of_logits))
    assert of_points.any()
    assert not (of_points[:, :, 0] if which == 3 else of_projection[:, 1]).any()
    assert not of_projection[:, :, 3].any()


def test_a_point_nearer_than_can_be_has_no_gradient_along_its_depth(implementation):
    """A camera whose depth is -1 everywhere sees a point at (u, v) / 1e-5."""
    maps, shape, start = torch.arange(16.0).view(1, 16, 1), torch.tensor([[[4, 4]]]), torch.tensor([[0]])
    projection = torch.zeros(1, 1, 4, 4)
    projection[..., 0, 0] = projection[..., 1, 1] = 1e-5
    projection[..., 2, 2], projection[..., 2, 3] = 1, -2
    args = (maps, shape, start, torch.tensor([0.4, 0.55, 1.0]).view(1, 1, 1, 3), projection, torch.zeros(1, 1, 1, 1, 1, 1))
    output, _, of_points, of_projection, _ = run(implementation, AGGREGATION_LOGITS, (*args, None, None), torch.ones(1, 1, 1))
    torch.testing.assert_close(output, torch.full((1, 1, 1), 0.4 * 4 - 0.5 + 4 * (0.55 * 4 - 0.5)))
    torch.testing.assert_close(of_points.flatten(), torch.tensor([4.0, 16, 0]))
    assert not of_projection[0, 0, 2:].any()


@pytest.mark.needs("Sampling by Triton")
@pytest.mark.skipif(cases.ON_GPU, reason="test_cases runs on a GPU")
@pytest.mark.parametrize("name", [*WITH_LOGITS, f"{GEOMETRIC_LOGITS} in bfloat16"])
def test_triton_kernels(name):
    pytest.importorskip("triton")
    operator, dtype = name.split()[0], torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    if dtype != torch.float32:
        skip_unless_every_kernel("triton")
    args = cases.cast(TINY[operator](), dtype)
    grad = cases.grad_for(operator, args).to(dtype)
    compare("triton", operator, args, grad)
    mask = [i % 2 == 0 for i in range(len(cases.DIFFERENTIABLE[operator]))]
    found = cases.gradients_of("triton", operator, grad, args, mask)
    assert [g.numel() > 0 for g in found] == mask


@pytest.mark.parametrize("operator", WITH_LOGITS)
def test_data_checks_look_at_the_samples(operator):
    """A warning names the operator that was called, and the inputs of its bare operator."""
    args = list(first(operator))
    args[3] = args[3] * 0 - 30
    with mx_driving.data_checks(), pytest.warns(mx_driving.DataWarning, match=f"{operator}: .* should (mostly )?lie "):
        getattr(mx_driving, operator)(*args)
