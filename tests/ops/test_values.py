"""Outputs and gradients are those of float64 truth, for every implementation, dtype and layout."""

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION, CASES, EVERY, LATTICE, MULTI_SCALE, MULTI_SCALE_LOGITS, OPERATORS
from small_cases import GOOD, TWO_PIXELS
from values import DTYPES, MIXED, compare, covering, everywhere, everywhere_each, first, run, skip_unless_every_kernel

from mx_driving._operator import description


@pytest.mark.parametrize("implementation", cases.wanted_implementations()[-1:], indirect=True)
@pytest.mark.parametrize("case", [case for case in CASES if case.name in cases.OF_MILLIONS], ids=cases.case_id)
def test_large_cases(implementation, case):
    compare(implementation, case.operator, cases.cast(cases.made(case), torch.float32))


@covering("case", [case for case in (*CASES, *logits_cases.CASES) if case.name not in cases.OF_MILLIONS], DTYPES, cases.case_id)
def test_cases(implementation, case, dtype):
    compare(implementation, case.operator, cases.cast(cases.made(case), dtype))


@everywhere
@pytest.mark.parametrize("case", LATTICE, ids=cases.case_id)
def test_lattice_and_border(implementation, case):
    """Sizes are powers of two, so positions are exact and even the one-sided gradients there must agree."""
    if case.operator != MULTI_SCALE:
        skip_unless_every_kernel(implementation)
    compare(implementation, case.operator, cases.cast(case.make(), torch.float32))


LONG = [
    (MULTI_SCALE, lambda: cases.multi_scale(1, 2, 32, 2, [(20, 30)] * 4, 400)),
    (AGGREGATION, lambda: cases.aggregation(1, 2, 700, 64, 2, [[(20, 30), (10, 15)]] * 2)),
]


@pytest.mark.parametrize(("operator", "make"), LONG, ids=lambda p: p if isinstance(p, str) else "")
def test_long_sums(implementation, operator, make):
    """Rounding errors of thousands of rows must not add up: the limit is 16 units in the last place of the largest output, and
    the error of the reference."""
    args = make()
    true = cases.forward_of("reference", operator)(*args)
    single = cases.cast(args, torch.float32)

    def error(name):
        return float((cases.forward_of(name, operator)(*single) - true).abs().max())

    assert error(implementation) <= error("reference") + 16 * 2**-24 * float(true.abs().max())


@everywhere_each(EVERY)
@pytest.mark.parametrize("dtypes", MIXED, ids=str)
def test_mixed_dtypes(implementation, operator, dtypes):
    if dtypes not in MIXED[1::2]:
        skip_unless_every_kernel(implementation)
    args = list(first(operator, implementation))
    for i, dtype in zip([i for i, a in enumerate(args) if cases.is_floating(a)], dtypes * 2, strict=False):
        args[i] = args[i].to(dtype)
    args[1], args[2] = args[1].int(), args[2].int()
    compare(implementation, operator, tuple(args))


def strided(t: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same numbers in another layout."""
    if how == "reversed axes":
        axes = list(range(t.dim()))[::-1]
        return t.permute(axes).contiguous().permute(axes)
    if how == "every second element":
        wide = t.new_full((*t.shape[:-1], 2 * t.shape[-1]), 7)
        wide[..., ::2] = t
        return wide[..., ::2]
    padded = t.new_full([n + 2 for n in t.shape], 7)
    inner = padded[tuple(slice(1, 1 + n) for n in t.shape)]
    inner.copy_(t)
    return inner


@everywhere_each(EVERY)
@pytest.mark.parametrize("how", ["reversed axes", "every second element", "inside a larger tensor"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strides(implementation, operator, dtype, how):
    if dtype != torch.float32 or operator != AGGREGATION:  # test_value_is_read_in_place has the attentions
        skip_unless_every_kernel(implementation)
    args = first(operator, implementation, dtype)
    changed = tuple(strided(a, how) if isinstance(a, torch.Tensor) else a for a in args)
    assert any(isinstance(a, torch.Tensor) and not a.is_contiguous() for a in changed)
    compare(implementation, operator, changed, strided(cases.grad_for(operator, args).to(dtype), how))


# Kernels read float32 in place, and copy bfloat16.
@covering("operator", EVERY, [torch.float32, torch.bfloat16], start=("native", "triton"))
@pytest.mark.usefixtures("same_bits")
def test_one_element_stands_for_many(implementation, operator, dtype):
    """An input expanded along an axis gives the bits of its copy: each input but value, each axis."""
    args = first(operator, implementation, dtype)
    grad = cases.grad_for(operator, args).to(dtype)
    for place, a in [(i, a) for i, a in enumerate(args) if i and cases.is_floating(a)]:
        for axis in [axis for axis, size in enumerate(a.shape) if size > 1]:
            spread = a.narrow(axis, 0, 1).expand(a.shape)
            pair = ((*args[:place], t, *args[place + 1 :]) for t in (spread, spread.contiguous()))
            found, copied = (run(implementation, operator, changed, grad) for changed in pair)
            assert all(torch.equal(x, y) for x, y in zip(found, copied, strict=True))


@pytest.mark.parametrize("operator", OPERATORS)
def test_rows_too_far_apart_for_32_bits(implementation, operator):
    """A map of two pixels. The memory between them is never touched, so that it takes no pages."""
    value, *others = cases.cast(TWO_PIXELS[operator](), torch.float32)
    step = 2**29 + 64  # elements; 2 GiB and 256 bytes
    apart = torch.empty(step + value[0, 0].numel()).as_strided(value.shape, (0, step, *value.stride()[2:]))
    apart.copy_(value)
    compare(implementation, operator, (apart, *others))


@everywhere_each(OPERATORS)
def test_expanded_inputs(implementation, operator):
    args = first(operator, implementation)
    args = tuple(a if i in (1, 2) else a[:1].expand(2, *a.shape[1:]) for i, a in enumerate(args))
    grad = torch.ones(()).expand(cases.grad_for(operator, args).shape)  # as sum().backward() passes it
    compare(implementation, operator, args, grad)


def without(operator, axis):
    """Return small inputs whose size along this axis is 0. One reference point serves any number of levels."""
    args = list(GOOD[operator]())
    for place, tensor in enumerate(description.OPERATORS[operator].tensors):
        for at, names in enumerate(tensor.axes):
            if axis in names.split(" * "):
                args[place] = args[place].narrow(at, 0, 0)
            if (names, axis) == ("R", "num_levels"):
                args[place] = args[place].narrow(at, 0, 1)
    return tuple(args)


def axes_of(operator):
    """Return the axes that may be empty. Rows of value must hold the levels, and groups must divide the channels."""
    tensors = description.OPERATORS[operator].tensors
    names = {name for tensor in tensors for axes in tensor.axes for name in axes.split(" * ")}
    return sorted(names - {"num_keys", "num_feat", "group", "R", "2", "3", "4", "2 or 4"})


ZERO = [
    *((operator, lambda o=operator, axis=axis: without(o, axis)) for operator in EVERY for axis in axes_of(operator)),
    (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(2, 3, 4, 2, [(2, 3)], 0, 1, "point", box=True)),
]


@everywhere
@pytest.mark.parametrize(("operator", "make"), ZERO)
def test_zero_sizes(request, implementation, operator, make):
    if implementation != "triton":  # Triton runs other kernels if algorithms must be deterministic
        request.getfixturevalue("poisoned_allocations")
    args = cases.cast(make(), torch.float32)
    grad = cases.grad_for(operator, args).float()
    output, *gradients = run(implementation, operator, args, grad)
    assert output.shape == grad.shape
    assert not output.any()
    for i, g in zip(cases.DIFFERENTIABLE[operator], gradients, strict=True):
        assert g.shape == args[i].shape
        assert not g.any()
