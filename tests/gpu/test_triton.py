"""The GPU kernels on small but hard cases: on a GPU if there is one, in Triton's interpreter otherwise.

The interpreter takes about 0.2 ms for each operation of each program, so everything here is tiny.
"""

from __future__ import annotations

import itertools

import cases
import numpy as np
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE, OPERATORS
from small_cases import INTERPRETED
from values import compare, last_pixels, strided

import mx_driving
from mx_driving import _backends

NAN, INF = float("nan"), float("inf")
pytestmark = pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not()))


def _one_point(make):
    args = make()
    return (*args[:3], args[3][..., :1, :], args[4][..., :1])


WICKED = [
    *((MULTI_SCALE, f"{c} channels", lambda c=c: cases.multi_scale(1, 5, c, 2, [(3, 4)], 2)) for c in (1, 3, 12, 37, 130, 256)),
    (MULTI_SCALE, "1 x 1 levels", lambda: cases.multi_scale(1, 4, 8, 1, [(1, 1), (1, 1)], 5, margin=0.4)),
    (MULTI_SCALE, "one row, one column", lambda: cases.multi_scale(1, 4, 8, 1, [(1, 9), (9, 1)], 2, margin=0.3)),
    (MULTI_SCALE, "mostly outside", lambda: cases.multi_scale(1, 6, 8, 1, [(4, 4)], 4, margin=4)),
    (MULTI_SCALE, "overlapping levels", lambda: (lambda a: (*a[:2], torch.tensor([1, 4, 0]), *a[3:]))(
        cases.multi_scale(1, 4, 8, 1, [(3, 4), (2, 2), (1, 1)], 2))),
    (MULTI_SCALE, "more queries than a tile", lambda: cases.multi_scale(2, 35, 8, 1, [(3, 4)], 1)),
    (MULTI_SCALE, "3 heads, 7 points", lambda: cases.multi_scale(1, 3, 4, 3, [(3, 4)], 7)),
    (MULTI_SCALE, "8 points", lambda: cases.multi_scale(1, 3, 4, 1, [(3, 4)], 8)),
    (MULTI_SCALE, "5 levels", lambda: cases.multi_scale(1, 3, 4, 1, [(3, 4), (2, 3), (2, 2), (1, 2), (1, 1)], 1)),
    *((AGGREGATION, f"{c} channels in {g} groups", lambda c=c, g=g: cases.aggregation(1, 2, 2, c, g, [[(3, 4), (2, 2)]]))
      for c, g in ((1, 1), (37, 1), (6, 6), (12, 3), (256, 8), (20, 5))),
    (AGGREGATION, "1 x 1 maps of three cameras", lambda: cases.aggregation(2, 2, 3, 8, 2, [[(1, 1)]] * 3)),
    (AGGREGATION, "five scales", lambda: cases.aggregation(1, 2, 2, 8, 2, [[(4, 5)] * 5])),
    *((GEOMETRIC, f"{c} channels", lambda c=c: cases.geometric(1, 5, c, 2, [(3, 4)], 2)) for c in (1, 3, 37, 130)),
    (GEOMETRIC, "fractional", lambda: cases.geometric(1, 9, 8, 2, [(3, 4), (1, 1)], 3, integral=False)),
    (GEOMETRIC, "15 points", lambda: cases.geometric(1, 4, 16, 1, [(6, 10)], 15)),
    (GEOMETRIC, "more queries than a tile", lambda: cases.geometric(2, 35, 8, 1, [(3, 4)], 1)),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "make"), [pytest.param(o, m, id=f"{o}: {n}") for o, n, m in WICKED])
def test_wicked(operator, make):
    args = cases.cast(make(), torch.float32)
    compare("triton", operator, args, cases.grad_for(operator, args).float())


@pytest.mark.parametrize("case", cases.LATTICE, ids=cases.case_id)
def test_lattice_and_border(case):
    """On pixel centres, on the border, and for aggregation on 0 and 1, which do not count."""
    args = cases.cast(case.make(), torch.float32)
    compare("triton", case.operator, args, cases.grad_for(case.operator, args).float())


@pytest.mark.parametrize(("channels", "dtype"), [(16, torch.bfloat16), (5, torch.float16)], ids=str)
@pytest.mark.parametrize("operator", OPERATORS)
def test_16_bit(operator, channels, dtype):
    make = {
        MULTI_SCALE: lambda: cases.multi_scale(1, 5, channels, 2, [(3, 4), (2, 2)], 2, margin=0.3),
        AGGREGATION: lambda: cases.aggregation(1, 2, 2, channels, 1, [[(3, 4)], [(2, 2)]]),
        GEOMETRIC: lambda: cases.geometric(1, 5, channels, 2, [(3, 4)], 2),
    }[operator]
    args = cases.cast(make(), dtype)
    compare("triton", operator, args, cases.grad_for(operator, args).to(dtype))


@pytest.mark.parametrize(
    "dtypes", [(torch.float16, torch.float32, torch.bfloat16), (torch.float32, torch.float16, torch.float32)]
)
@pytest.mark.parametrize("operator", OPERATORS)
def test_mixed_dtypes_and_narrow_tables(operator, dtypes):
    args = list(INTERPRETED[operator]())
    for i, dtype in zip((0, 3, 4), dtypes, strict=True):
        args[i] = args[i].to(dtype) if args[i].is_floating_point() else args[i].to(torch.int16)
    args[1], args[2] = args[1].int(), args[2].int()
    compare("triton", operator, tuple(args), cases.grad_for(operator, tuple(args)).to(dtypes[0]))


@pytest.mark.parametrize("how", ["reversed axes", "every second element", "inside a larger tensor", "expanded"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_strides(operator, how):
    args = cases.cast(INTERPRETED[operator](), torch.float32)
    grad = cases.grad_for(operator, args).float()
    if how == "expanded":
        args = tuple(a if i in (1, 2) else a[:1].expand(3, *a.shape[1:]) for i, a in enumerate(args))
        return compare("triton", operator, args, torch.ones(()).expand(3, *grad.shape[1:]))
    compare("triton", operator, tuple(strided(a, how) for a in args), strided(grad, how))


@pytest.mark.parametrize("operator", [MULTI_SCALE, GEOMETRIC])
@pytest.mark.parametrize("axes", [(1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=["keys first", "heads first", "batch last"])
def test_value_is_read_in_place(operator, axes):
    """The layouts that models hand over: no copy of value is made, whatever the order of its axes but the last."""
    args = cases.cast(INTERPRETED[operator](), torch.float32)
    inverse = [axes.index(i) for i in range(4)]
    value = args[0].permute(axes).contiguous().permute(inverse)
    assert not value.is_contiguous()
    compare("triton", operator, (value, *args[1:]), cases.grad_for(operator, args).float())
    from mx_driving._backends.triton import launch

    assert launch.packed(value).data_ptr() == value.data_ptr()


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
@pytest.mark.parametrize("operator", [MULTI_SCALE, AGGREGATION])
def test_all_inputs_poisoned_give_exact_zeros(operator, poison):
    args = cases.cast(INTERPRETED[operator](), torch.float32)
    args = tuple(torch.full_like(a, poison) if a.is_floating_point() else a for a in args)
    grad = torch.full_like(cases.grad_for(operator, args), poison).float()
    assert not cases.forward_of("triton", operator)(*args).any()
    for gradient in cases.gradients_of("triton", operator, grad, args):
        assert not gradient.any()  # a NaN would be true


@pytest.mark.parametrize("operator", [MULTI_SCALE, AGGREGATION])
def test_samples_outside_ignore_what_is_not_finite(operator):
    """Every second query looks elsewhere or nowhere; its weights and gradient are NaN and infinite, and change nothing."""
    args = list(cases.cast(INTERPRETED[operator](), torch.float32))
    grad = cases.grad_for(operator, tuple(args)).float()
    args[3][:, 1::2] = torch.tensor([NAN, -7.0])
    clean = [cases.forward_of("triton", operator)(*args), *cases.gradients_of("triton", operator, grad, tuple(args))]
    args[4][:, 1::2], grad[:, 1::2] = NAN, INF
    found = [cases.forward_of("triton", operator)(*args), *cases.gradients_of("triton", operator, grad, tuple(args))]
    for place, (a, b) in enumerate(zip(found, clean, strict=True)):
        if place == 1:
            torch.testing.assert_close(a, b, rtol=1e-6, atol=0)  # atomics: the order may differ
        else:
            assert torch.equal(a, b)
    assert not found[2][:, 1::2].any()


@pytest.mark.parametrize("which", ["value", "weights", "grad"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_finite_where_truth_is_finite(operator, which):
    """A few NaN spread as far as they do in truth, and no further."""
    args = cases.cast(INTERPRETED[operator](), torch.float32)
    grad = cases.grad_for(operator, args).float()
    target = {"value": args[0], "weights": args[4], "grad": grad}[which]
    target.view(-1)[:: target.numel() // 3] = NAN
    true = cases.truth_of(operator, args, grad)
    assert not all(np.isfinite(result).all() for result in true.results)
    found = [cases.forward_of("triton", operator)(*args), *cases.gradients_of("triton", operator, grad, args)]
    for got, expected in zip(found, true.results, strict=True):
        assert (got.isfinite().numpy() == np.isfinite(expected)).all()


def test_corner_off_the_map_is_zero_next_to_infinity():
    value = torch.tensor([INF, 1.0, 2.0, 3.0]).view(1, 4, 1, 1)
    location = torch.tensor([0.125, 0.125]).view(1, 1, 1, 1, 1, 2)  # pixel (-0.25, -0.25): only corner 3 is on the map
    args = (value, torch.tensor([[2, 2]]), torch.tensor([0]), location, torch.ones(1, 1, 1, 1, 1))
    assert cases.forward_of("triton", MULTI_SCALE)(*args).item() == INF


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64, torch.uint8], ids=str)
def test_geometric_clamps_before_it_converts(dtype):
    wide = dtype == torch.int64
    xs = [2**62, -(2**62), 2**31, -5, 3, 2, 0] if wide else [0, 1, 3, 200, 255, 2, 4]
    if dtype.is_floating_point:
        xs = [NAN, -INF, INF, 6e4, -6e4, 2.9, -0.9]
    x = torch.tensor(xs, dtype=dtype)
    location = torch.stack([x, torch.zeros_like(x)], -1).view(1, 7, 1, 1, 1, 2)
    args = (torch.arange(4.0).view(1, 4, 1, 1), torch.tensor([[1, 4]]), torch.tensor([0]), location, torch.ones(1, 7, 1, 1, 1))
    columns = [min(3, max(0, int(v))) if v == v and abs(v) != INF else (3 if v == INF else 0) for v in xs]
    assert cases.forward_of("triton", GEOMETRIC)(*args).flatten().tolist() == columns
    grad_value, grad_weight = cases.gradients_of("triton", GEOMETRIC, torch.ones(1, 7, 1), args)
    assert grad_value.flatten().tolist() == [columns.count(i) for i in range(4)]
    assert grad_weight.flatten().tolist() == columns


TABLES = [
    ([[3, 4], [2, 2]], [3, 14]),  # the end of each level lies outside
    ([[3, 4], [2, 2]], [-5, 12]),
    ([[3, 4], [2, 2]], [1000, -1000]),
    ([[3, 400], [200, 2]], [0, 0]),
    ([[0, 4], [2, -2]], [0, 0]),
    ([[2**31, 2**31], [2, 2]], [0, 2**62]),
    ([[1, 2**63 - 1], [-(2**63), 1]], [-(2**63), 2**63 - 1]),
]


@pytest.mark.parametrize(("shapes", "starts"), TABLES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_garbage_tables(operator, shapes, starts):
    """Rows that the tables push outside count as zero. Nothing beside value is read: its surroundings are NaN."""
    args = list(cases.cast(INTERPRETED[operator](), torch.float32))
    args = [a if i in (1, 2) else a[:1] for i, a in enumerate(args)]  # tables are one for all batches
    double = 2 if operator == AGGREGATION else 1  # cameras
    args[1] = torch.tensor(shapes * double).view(args[1].shape)
    args[2] = torch.tensor(starts * double).view(args[2].shape)
    if operator == GEOMETRIC:
        args[3] = args[3].float()
    grad = cases.grad_for(operator, tuple(args)).float()
    clean = torch.nn.functional.pad(args[0], (0, 0) * (args[0].dim() - 2) + (50, 50), value=NAN)[:, 50:-50]
    assert clean.isfinite().all()
    found = cases.forward_of("triton", operator)(clean, *args[1:])
    gradients = cases.gradients_of("triton", operator, grad, (clean, *args[1:]))
    if operator == GEOMETRIC and shapes[0][0] == 2**31:
        assert not found.any()  # a level of more than 2**30 pixels samples nothing here; the reference reads its first line
        return
    expected = cases.forward_of("reference", operator)(*args)
    expected_gradients = cases.gradients_of("reference", operator, grad, tuple(args))
    for a, b in zip((found, *gradients), (expected, *expected_gradients), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", OPERATORS)
def test_data_checks_refuse_garbage_tables(operator):
    args = list(cases.cast(INTERPRETED[operator](), torch.float32))
    grad = cases.grad_for(operator, tuple(args)).float()
    args[2] = args[2] + 1000
    cases.forward_of("triton", operator)(*args)
    with mx_driving.data_checks(), pytest.raises(ValueError, match="must leave room"):
        cases.forward_of("triton", operator)(*args)
    with mx_driving.data_checks(), pytest.raises(ValueError, match="must leave room"):
        cases.gradients_of("triton", operator, grad, tuple(args))


@pytest.mark.parametrize("operator", OPERATORS)
def test_only_wanted_gradients(operator):
    args = cases.cast(INTERPRETED[operator](), torch.float32)
    grad = cases.grad_for(operator, args).float()
    full = cases.gradients_of("triton", operator, grad, args)
    for mask in itertools.product([False, True], repeat=len(full)):
        if any(mask):
            found = cases.gradients_of("triton", operator, grad, args, list(mask))
            for wanted, a, b in zip(mask, found, full, strict=True):
                torch.testing.assert_close(a, b if wanted else b.new_empty(0))


@pytest.mark.parametrize(
    ("operator", "dtype"), [*((operator, torch.float32) for operator in OPERATORS), (GEOMETRIC, torch.bfloat16)], ids=str
)
def test_deterministic_mode(operator, dtype):
    args = cases.cast(INTERPRETED[operator](), dtype)
    grad = cases.grad_for(operator, args).to(dtype)
    torch.use_deterministic_algorithms(True)
    try:
        compare("triton", operator, args, grad)
        first, second = (cases.gradients_of("triton", operator, grad, args) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("operator", OPERATORS)
def test_zero_sizes(operator):
    """No batch, no queries, no points, no keys, no channels: zeros, nothing launched."""
    args = cases.cast(INTERPRETED[operator](), torch.float32)
    point_axis = 2 if operator == AGGREGATION else 4
    empty = [
        (args[0][:0], *args[1:3], args[3][:0], args[4][:0]),
        (*args[:3], args[3][:, :0], args[4][:, :0]),
        (*args[:3], args[3].narrow(point_axis, 0, 0), args[4].narrow(point_axis, 0, 0)),
        (args[0][:, :0], *args[1:]),
        (args[0][..., :0], *args[1:]) if operator != AGGREGATION else (args[0][..., :0], *args[1:4], args[4][..., :1]),
    ]
    for some in empty:
        grad = cases.grad_for(operator, some).float()
        assert cases.forward_of("triton", operator)(*some).shape == grad.shape
        assert not cases.forward_of("triton", operator)(*some).any()
        for i, g in zip(cases.DIFFERENTIABLE[operator], cases.gradients_of("triton", operator, grad, some), strict=True):
            assert g.shape == some[i].shape
            assert not g.any()


def test_float64_and_very_tall_tables_go_to_the_reference():
    small = torch.zeros(1)
    assert _backends.triton.serves(torch.zeros(1, 5), small, small)
    assert not _backends.triton.serves(torch.zeros(1, 5), small, small.double())
    assert not _backends.triton.serves(torch.zeros(1, 1).expand(1, 2**30 + 1), small, small)


def test_the_last_pixel_of_a_map_that_float32_does_not_count():
    """2^26 + 3 is 2^26 in float32."""
    found = cases.forward_of("triton", GEOMETRIC)(*last_pixels(2**26 + 3))
    assert torch.equal(found.flatten(), torch.tensor([4.0, 4, 4, 2]).half())
