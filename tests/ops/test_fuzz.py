"""Random shapes, layouts, dtypes and index tables, by hypothesis: a result is right, or the call is refused in a sentence."""

import cases
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, MULTI_SCALE
from hypothesis import given, settings
from hypothesis import strategies as st
from values import compare

DTYPES = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
SIZES = st.lists(st.tuples(st.integers(1, 7), st.integers(1, 7)), min_size=1, max_size=4)
FUZZ = settings(max_examples=120, deadline=None, derandomize=True)


@st.composite
def calls(draw):
    operator = draw(st.sampled_from(cases.OPERATORS))
    bs, queries, points = draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 9))
    sizes, seed = draw(SIZES), draw(st.integers(0, 2**20))
    if operator == AGGREGATION:
        groups = draw(st.integers(1, 4))
        cams = draw(st.integers(1, 3))
        args = cases.aggregation(bs, queries, points, groups * draw(st.integers(1, 40)), groups, [sizes] * cams, seed)
    else:
        channels, heads = draw(st.integers(1, 70)), draw(st.integers(1, 4))
        make = cases.multi_scale if operator == MULTI_SCALE else cases.geometric
        args = make(bs, queries, channels, heads, sizes, points, seed)
    return operator, args


def permuted(t: torch.Tensor, order: list[int]) -> torch.Tensor:
    """Return the same tensor with its axes in another order in memory."""
    axes = [a for a in order if a < t.dim()]
    inverse = [axes.index(a) for a in range(t.dim())]
    return t.permute(axes).contiguous().permute(inverse)


@FUZZ
@given(calls(), st.tuples(DTYPES, DTYPES, DTYPES), st.permutations(range(6)), st.booleans())
def test_right_for_any_shape_layout_and_dtype(call, dtypes, order, narrow):
    operator, args = call
    value, shapes, starts, locations, weights = args
    if locations.is_floating_point():
        locations = locations.to(dtypes[1])
    if narrow:
        shapes, starts = shapes.int(), starts.int()
    args = (value.to(dtypes[0]), shapes, starts, locations, weights.to(dtypes[2]))
    args = tuple(permuted(a, order) for a in args)
    compare("native", operator, args, permuted(cases.grad_for(operator, args).to(dtypes[0]), order), some_seen=False)


RULE = " must .*; got "
TABLE = st.one_of(st.integers(-3, 60), st.integers(-(2**63), 2**63 - 1))


@FUZZ
@given(calls(), st.lists(TABLE, min_size=36, max_size=36), st.booleans())
def test_any_index_table_works_or_is_refused(call, numbers, keep_shapes):
    operator, args = call
    shapes = args[1] if keep_shapes else torch.tensor(numbers)[: args[1].numel()].view(args[1].shape)
    starts = torch.tensor(numbers[::-1])[: args[2].numel()].view(args[2].shape)
    args = cases.cast((args[0], shapes, starts, *args[3:]), torch.float32)
    rows, levels = args[0].shape[1], zip(shapes.reshape(-1, 2).tolist(), starts.flatten().tolist(), strict=True)
    fits = all(h > 0 and w > 0 and s >= 0 and s + h * w <= rows for (h, w), s in levels)
    grad = cases.grad_for(operator, args).float()
    if fits:
        compare("native", operator, args, grad, some_seen=False)
    else:
        with pytest.raises(ValueError, match=RULE):
            cases.forward_of("native", operator)(*args)
        with pytest.raises((ValueError, RuntimeError), match=RULE):  # C++ refuses from torch 2.10 on
            cases.gradients_of("native", operator, grad, args)


@FUZZ
@given(st.lists(st.floats(width=32), min_size=8, max_size=8), st.integers(1, 5), st.integers(1, 5))
def test_any_location(numbers, height, width):
    """Locations of any bits give finite results, and those of the reference."""
    for operator in (MULTI_SCALE, GEOMETRIC):
        value = torch.linspace(-1, 1, height * width).view(1, -1, 1, 1)
        locations = torch.tensor(numbers).view(1, 2, 1, 1, 2, 2)
        args = (value, torch.tensor([[height, width]]), torch.tensor([0]), locations, torch.ones(1, 2, 1, 1, 2))
        got = cases.forward_of("native", operator)(*args)
        torch.testing.assert_close(got, cases.forward_of("reference", operator)(*args), rtol=1e-5, atol=1e-5)
        assert all(g.isfinite().all() for g in cases.gradients_of("native", operator, torch.ones(1, 2, 1), args))
