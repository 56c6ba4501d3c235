"""mx_driving.aclnn computes: the operator's own bits, any layout, empty input."""

from __future__ import annotations

import cases
import pytest
import torch
import values
from aclnn_calls import DTYPES, MARK, OK, nine, phase_one, phase_two, run, same_bits, with_outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from values import first

from mx_driving import aclnn


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_forwards_output_may_lie_apart(dtype):
    inputs = first(cases.MULTI_SCALE, dtype=dtype)
    want = cases.forward_of("native", cases.MULTI_SCALE)(*inputs)
    wide = want.new_full((*want.shape[:-1], 2 * want.shape[-1]), 7)
    aclnn.multi_scale_deformable_attn_function_out(*inputs, wide[..., ::2])
    same_bits([wide[..., ::2], wide[..., 1::2]], [want, torch.full_like(want, 7)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators_bits(dtype):
    """operators/test_values.py has many inputs. These functions call the same kernels."""
    inputs = first(cases.MULTI_SCALE, dtype=dtype)
    grad = cases.grad_for(cases.MULTI_SCALE, inputs).to(dtype)
    output, *want = values.run("native", cases.MULTI_SCALE, inputs, grad)
    for rows in (grad, grad.view(*grad.shape[:2], *inputs[0].shape[2:])):
        same_bits(run(with_outputs(inputs, rows)), want)
    same_bits(aclnn.multi_scale_deformable_attention_grad_out(*inputs, grad), want)
    same_bits([aclnn.multi_scale_deformable_attn_function_out(*inputs)], [output])


EMPTY = [{"bs": 0}, {"queries": 0}, {"points": 0}, {"channels": 0}, {"heads": 0}]


@pytest.mark.parametrize("sizes", EMPTY, ids=lambda sizes: next(iter(sizes)))
def test_empty_input_leaves_the_outputs_alone(sizes):
    tensors = nine(**sizes)
    status, size, executor = phase_one(*tensors)
    assert (status, size) == (OK, 0)
    assert phase_two(None, 0, executor) == OK
    assert aclnn.synchronize() == OK
    for output in tensors[6:]:
        assert (output == MARK).all()


def test_no_levels_is_empty_too():
    tensors = nine()
    tensors[1], tensors[2] = tensors[1][:0], tensors[2][:0]
    for index in (3, 4, 7, 8):
        tensors[index] = tensors[index][:, :, :, :0].contiguous()
    status, size, executor = phase_one(*tensors)
    assert (status, size) == (OK, 0)
    assert phase_two(None, 0, executor) == OK
    assert (tensors[6] == MARK).all()


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_outputs_are_rounded_once_from_float32(dtype):
    """Float32 holds 16-bit inputs exactly, so its outputs, rounded, have the bits of the 16-bit call."""
    inputs = cases.cast(cases.multi_scale(2, 9, 24, 3, [(5, 4), (3, 3)], 3), dtype)
    grad = cases.grad_for(cases.MULTI_SCALE, inputs).to(dtype)
    wide = [t.float() if t.is_floating_point() else t for t in inputs]
    want = aclnn.multi_scale_deformable_attention_grad_out(*wide, grad.float())
    same_bits(aclnn.multi_scale_deformable_attention_grad_out(*inputs, grad), [t.to(dtype) for t in want])


def laid_out(draw, t, output):
    """The numbers of t in a view of another layout: axes in another order, steps, an offset, neighbours; or expanded."""
    if not output and t.dim() > 2 and t.shape[0] > 1 and draw(st.booleans()):
        t[:] = t[:1].clone()
        row = t[:1].clone()
        return row, row.expand(t.shape)
    order = draw(st.permutations(range(t.dim())))
    step = draw(st.sampled_from([1, 1, 2, 3]))
    before, after = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    moved = t.permute(order)
    base = torch.full((before + moved.numel() * step + after,), -5, dtype=t.dtype)
    strides = [step * stride for stride in moved.contiguous().stride()]
    view = base.as_strided(moved.shape, strides, before).permute([order.index(axis) for axis in range(t.dim())])
    view.copy_(t)
    return base, view


@st.composite
def layouts(draw):
    bs, queries, points = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    sizes = draw(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 5)), min_size=1, max_size=3))
    channels, heads = draw(st.sampled_from([8, 16, 24, 72])), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    tensors = nine(bs, queries, channels, heads, sizes, points, dtype, draw(st.integers(0, 999)))
    if draw(st.booleans()):
        tensors[5] = tensors[5].view(bs, queries, heads, channels)
    if draw(st.booleans()):
        tensors[1], tensors[2] = tensors[1].int(), tensors[2].int()
    return tensors, [laid_out(draw, t, index > 5) for index, t in enumerate(tensors)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(layouts())
def test_any_strides(both):
    plain, laid = both
    bases = [base.clone() for base, _ in laid]
    got = run([view for _, view in laid])
    same_bits(got, run(plain))
    same_bits([base for base, _ in laid[:6]], bases[:6])
    for (base, view), before in zip(laid[6:], bases[6:], strict=True):
        view.fill_(0)  # what is left are the neighbours
        neighbours = base != 0
        assert torch.equal(base[neighbours], before[neighbours])
