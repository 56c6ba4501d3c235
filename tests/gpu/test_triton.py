"""What the GPU kernels alone do, and small but hard cases: on a GPU if there is one, otherwise as PTX in ptx.py.

A kernel takes 0.2 to 0.5 s to compile, and then milliseconds. tests/ops has what holds for every implementation.
"""

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS, OPERATORS
from small_cases import TINY
from values import compare, misaligned, skip_unless_every_kernel

import mx_driving
from mx_driving import _backends

NAN = float("nan")
pytestmark = pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not()))


def on_device(args):
    return tuple(map(cases.on_gpu, args)) if cases.ON_GPU else tuple(args)


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
    *((AGGREGATION, f"{c} channels in {g} groups", lambda c=c, g=g: cases.aggregation(1, 4, 3, c, g, [[(3, 4), (2, 2)]]))
      for c, g in ((1, 1), (37, 1), (6, 6), (12, 3), (256, 8), (20, 5))),
    (AGGREGATION, "1 x 1 maps of three cameras", lambda: cases.aggregation(2, 2, 3, 8, 2, [[(1, 1)]] * 3)),
    (AGGREGATION, "40 cameras", lambda: cases.aggregation(1, 2, 3, 8, 2, [[(3, 4)]] * 40)),
    (AGGREGATION, "16 scales", lambda: cases.aggregation(1, 2, 2, 8, 2, [[(3, 4)] * 16] * 2)),
    (AGGREGATION, "five scales", lambda: cases.aggregation(1, 5, 3, 8, 2, [[(4, 5)] * 5])),
    *((GEOMETRIC, f"{c} channels", lambda c=c: cases.geometric(1, 5, c, 2, [(3, 4)], 2)) for c in (1, 3, 37, 130)),
    (GEOMETRIC, "fractional", lambda: cases.geometric(1, 9, 8, 2, [(3, 4), (1, 1)], 3, integral=False)),
    (GEOMETRIC, "15 points", lambda: cases.geometric(1, 4, 16, 1, [(6, 10)], 15)),
    (GEOMETRIC, "more queries than a tile", lambda: cases.geometric(2, 35, 8, 1, [(3, 4)], 1)),
    (AGGREGATION_LOGITS, "70 groups", lambda: logits_cases.aggregation(2, 2, 3, 140, 70, [[(3, 4), (2, 2)]] * 3)),
    (AGGREGATION_LOGITS, "40 cameras", lambda: logits_cases.aggregation(1, 2, 9, 8, 2, [[(3, 4)]] * 40)),
]  # fmt: skip


NARROW = torch.bfloat16, torch.float16
WICKED_DTYPES = [(row, dtype) for k, row in enumerate(WICKED) for dtype in (torch.float32, *NARROW[k % 2 :][: k % 3 == 0])]
# A case compiles two kernels, so `make test` has a few: odd channels, part of a tile, several warps, several rounds of loops.
FEW = {
    (MULTI_SCALE, "37 channels"): torch.float16,
    (MULTI_SCALE, "one row, one column"): torch.float32,
    (MULTI_SCALE, "more queries than a tile"): torch.float32,
    (AGGREGATION, "256 channels in 8 groups"): torch.bfloat16,
    (AGGREGATION, "40 cameras"): torch.float32,
    (GEOMETRIC, "130 channels"): torch.float32,
    (AGGREGATION_LOGITS, "70 groups"): torch.float32,
}
CHOSEN = [(row, dtype) for row, dtype in WICKED_DTYPES if cases.EVERY_KERNEL or FEW.get(row[:2]) == dtype]


@pytest.mark.parametrize(
    ("operator", "make", "dtype"), [pytest.param(o, m, dtype, id=f"{o}: {n}-{dtype}") for (o, n, m), dtype in CHOSEN]
)
def test_wicked(operator, make, dtype):
    compare("triton", operator, cases.cast(make(), dtype))


@pytest.mark.parametrize("operator", [MULTI_SCALE, GEOMETRIC])
@pytest.mark.parametrize("axes", [(1, 0, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=["keys first", "heads first", "batch last"])
def test_value_is_read_in_place(operator, axes):
    """The layouts that models hand over: no copy of value is made, whatever the order of its axes but the last."""
    if (operator, axes) != (MULTI_SCALE, (1, 0, 2, 3)):
        skip_unless_every_kernel("triton")
    args = cases.cast(TINY[operator](), torch.float32)
    inverse = [axes.index(i) for i in range(4)]
    value = args[0].permute(axes).contiguous().permute(inverse)
    assert not value.is_contiguous()
    compare("triton", operator, (value, *args[1:]))
    from mx_driving._backends.triton import launch

    assert launch.packed(value).data_ptr() == value.data_ptr()


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
    args = list(cases.cast(TINY[operator](), torch.float32))
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
    torch.testing.assert_close((found, *gradients), (expected, *expected_gradients), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("operator", OPERATORS)
def test_data_checks_refuse_garbage_tables(operator):
    args = list(cases.cast(TINY[operator](), torch.float32))
    grad = cases.grad_for(operator, tuple(args)).float()
    args[2] = args[2] + 1000
    cases.forward_of("triton", operator)(*args)
    for run in (cases.forward_of("triton", operator), lambda *args: cases.gradients_of("triton", operator, grad, args)):
        with mx_driving.data_checks(), pytest.raises(ValueError, match="must leave room"):
            run(*args)


@pytest.mark.parametrize("name", [*cases.EVERY, f"{GEOMETRIC} in bfloat16"])
def test_deterministic_mode(name):
    operator, dtype = name.split()[0], torch.bfloat16 if name.endswith("bfloat16") else torch.float32
    if dtype != torch.float32 or operator in cases.WITH_LOGITS:
        skip_unless_every_kernel("triton")
    args = cases.cast(TINY[operator](), dtype)
    grad = cases.grad_for(operator, args).to(dtype)
    torch.use_deterministic_algorithms(True)
    compare("triton", operator, args, grad)
    first, second = (cases.gradients_of("triton", operator, grad, args) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_pairs_that_no_access_of_their_size_can_read(dtype):
    """Offsets and references an element after an address that is a multiple of a pair's bytes."""
    if dtype != torch.float32:
        skip_unless_every_kernel("triton")
    args = list(cases.cast(TINY[MULTI_SCALE_LOGITS](), dtype))
    for i in (3, 4):
        args[i] = misaligned(args[i])
        assert args[i].is_contiguous()
    compare("triton", MULTI_SCALE_LOGITS, tuple(args))


FUSED = MULTI_SCALE_LOGITS, GEOMETRIC_LOGITS  # their forward is one kernel


@pytest.mark.parametrize(("operator", "kernels", "made"), [*((name, 1, 0) for name in FUSED), (AGGREGATION_LOGITS, 2, 2)])
def test_logits_without_a_tensor_of_weights(monkeypatch, operator, kernels, made):
    """One kernel makes no tensor but the output. Locations and sums of the softmax are made for an aggregation."""
    from mx_driving._backends.triton import launch

    launched, run = [], launch.run
    monkeypatch.setattr(launch, "run", lambda kernel, *args, **flags: launched.append(args[1]) or run(kernel, *args, **flags))
    args = cases.cast(TINY[operator](), torch.float32)
    inputs = on_device(args)
    output = _backends.triton.kernel(operator, False)(*inputs)
    assert len(launched) == kernels
    others = {t.data_ptr() for tensors in launched for t in tensors}
    others -= {t.data_ptr() for t in (*inputs, output) if isinstance(t, torch.Tensor)}
    assert len(others) == made


WIDER = {
    MULTI_SCALE_LOGITS: lambda: logits_cases.multi_scale(2, 5, 32, 2, [(5, 7), (3, 2)], 4),
    GEOMETRIC_LOGITS: lambda: logits_cases.geometric(2, 5, 32, 2, [(5, 7), (3, 2)], (2, 2)),
}


@pytest.mark.parametrize("operator", [*OPERATORS, *cases.WITH_LOGITS])
def test_autocast_reads_16_bits_as_they_are(operator):
    """The output is float32, as of inputs that were converted first. In a single kernel, the sums of a row of powers do not
    depend on the threads that have its columns, which the dtype of value changes."""
    narrow = on_device(cases.cast((TINY | WIDER)[operator](), torch.bfloat16))
    kernel = _backends.triton.kernel(operator, False)
    output, expected = kernel(*narrow, dtype=torch.float32), kernel(*cases.cast(narrow, torch.float32))
    assert output.any()
    # a GPU's assembler contracts multiplications and additions, and on sm_100 Triton does
    driver = pytest.importorskip("triton").runtime.driver
    is_exact = operator in FUSED and not cases.ON_GPU and driver.active.get_current_target().arch < 100
    near = 0 if is_exact else 2e-6
    torch.testing.assert_close(output, expected, rtol=near, atol=near)


def test_products_of_references_are_rounded_before_the_window_is_added():
    """(i + 0.5) / 41 as float32, times 41, is i + 0.5 or nearly; rounding half to even shows whether a product was rounded."""
    xs = ((torch.arange(40) + 0.5).double() / 41).float()
    args = (torch.arange(41.0).view(1, 41, 1, 1), torch.tensor([[1, 41]]), torch.tensor([0]))
    args += (torch.stack([xs, torch.zeros(40)], -1).view(1, 40, 1, 2), torch.tensor([[1, 0]]), torch.zeros(1, 40, 1, 1))
    output = _backends.triton.kernel(GEOMETRIC_LOGITS, False)(*on_device(args))
    assert output.flatten().tolist() == (xs * 41 + 1).round().clamp(max=40).tolist()


def test_float64_and_very_tall_tables_go_to_the_reference():
    small = torch.zeros(1)
    assert _backends.triton.serves(torch.zeros(1, 5), small, small)
    assert not _backends.triton.serves(torch.zeros(1, 5), small, small.double())
    assert not _backends.triton.serves(torch.zeros(1, 1).expand(1, 2**30 + 1), small, small)
