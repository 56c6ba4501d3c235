"""mx_driving.aclnn has the bits of the operator, in any layout, on streams and threads. Streams keep their first error."""

import concurrent.futures
import ctypes
import os

import cases
import pytest
import torch
import values
from aclnn_calls import DTYPES, FAULT, INVALID, MARK, OK, nine, phase_one, phase_two, replaced, run, same_bits, with_outputs
from hypothesis import given, settings
from hypothesis import strategies as st
from programs import python
from values import first

from mx_driving import aclnn
from mx_driving.aclnn import Status


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_forwards_output_may_lie_apart(dtype):
    inputs = first(cases.MULTI_SCALE, dtype=dtype)
    want = cases.forward_of("native", cases.MULTI_SCALE)(*inputs)
    wide = want.new_full((*want.shape[:-1], 2 * want.shape[-1]), 7)
    aclnn.multi_scale_deformable_attn_function_out(*inputs, wide[..., ::2])
    same_bits([wide[..., ::2], wide[..., 1::2]], [want, torch.full_like(want, 7)])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_operators_bits(dtype):
    """These functions call the kernels that operators/test_values.py tries on many inputs."""
    inputs = first(cases.MULTI_SCALE, dtype=dtype)
    grad = cases.grad_for(cases.MULTI_SCALE, inputs).to(dtype)
    output, *want = values.run("native", cases.MULTI_SCALE, inputs, grad)
    for rows in (grad, grad.view(*grad.shape[:2], *inputs[0].shape[2:])):
        same_bits(run(with_outputs(inputs, rows)), want)
    same_bits(aclnn.multi_scale_deformable_attention_grad_out(*inputs, grad), want)
    same_bits([aclnn.multi_scale_deformable_attn_function_out(*inputs)], [output])


def without_levels():
    value, shapes, starts, *others = nine()
    samples = {i: t[:, :, :, :0].contiguous() for i, t in enumerate(others) if t.dim() > 4}
    return [value, shapes[:0], starts[:0], *(samples.get(i, t) for i, t in enumerate(others))]


EMPTY = [{"bs": 0}, {"queries": 0}, {"points": 0}, {"channels": 0}, {"heads": 0}, None]


@pytest.mark.parametrize("sizes", EMPTY, ids=lambda sizes: next(iter(sizes or ["levels"])))
def test_empty_input_leaves_the_outputs_alone(sizes):
    tensors = nine(**sizes) if sizes else without_levels()
    status, size, executor = phase_one(*tensors)
    assert (status, size) == (OK, 0)
    assert phase_two(None, 0, executor) == OK
    assert aclnn.synchronize() == OK
    assert all((output == MARK).all() for output in tensors[6:])


def laid_out(draw, t, output):
    """Return a tensor, and a view of it with the numbers of t: permuted, with steps, an offset and neighbours; or expanded."""
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
        view.fill_(0)  # the other elements are neighbours
        neighbours = base != 0
        assert torch.equal(base[neighbours], before[neighbours])


def test_levels_that_do_not_fit_are_reported_by_synchronize():
    room = "must leave room for"
    for index, numbers, sentence in (
        (2, [0, 13], f"levelStartIndex[1] {room} 2 x 2 rows among 16; got 13 (needs 17 rows)"),
        (2, [-1, 12], "levelStartIndex[0] must not be negative; got -1"),
        (1, [[3, 4], [0, 2]], "spatialShape[1] must be positive (H, W); got (0, 2)"),
        (1, [[3, 2**62], [2, 2]], f"levelStartIndex[0] {room} 3 x {2**62} rows among 16; got 0 (needs 2**63 or more rows)"),
    ):
        tensors = replaced(index, torch.tensor(numbers))
        status, size, executor = phase_one(*tensors)
        assert status == OK
        assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor) == OK
        assert aclnn.synchronize() == FAULT
        assert aclnn.recent_error() == sentence
        assert all((output == MARK).all() for output in tensors[6:])


def test_a_workspace_that_is_too_small_is_refused():
    """tests/native/test_streams.cpp has the statuses of phase two."""
    status, size, executor = phase_one(*nine())
    assert status == OK
    with pytest.raises(ValueError, match="workspace must have workspace_size="):
        phase_two(torch.empty(8, dtype=torch.uint8), size, executor)


def test_a_stream_remembers_its_first_error():
    """Work is done when phase two returns. Calls after a failed call run. Another stream has no error."""
    stream, other = aclnn.Stream(), aclnn.Stream()
    good = nine()
    for tensors in (replaced(2, torch.tensor([0, 13])), replaced(2, torch.tensor([-1, 12])), good):
        _, size, executor = phase_one(*tensors)
        assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor, stream) == OK
    same_bits(good[6:], run(nine(), other))
    assert aclnn.synchronize() == OK
    assert stream.synchronize() == FAULT
    assert (aclnn.recent_error() or "").startswith("levelStartIndex[1] must leave room")
    assert stream.synchronize() == OK


def test_a_deleted_executor_or_stream_is_destroyed():
    _, _, executor = phase_one(*nine())
    handle = executor._handle
    del executor
    assert aclnn._library().aclDestroyAclOpExecutor(handle) == INVALID  # nothing left to destroy
    stream = aclnn.Stream()
    handle = stream._handle
    del stream
    assert aclnn._library().aclrtSynchronizeStream(handle) == Status.ACL_ERROR_INVALID_PARAM
    rule = "stream must come from aclrtCreateStream and not be destroyed"
    assert aclnn.recent_error() == f"{rule}; got a pointer that is no stream"


def test_determinism_may_be_asked_for():
    """The bits do not depend on the setting."""
    library, want = aclnn._library(), run(nine())
    for set_parameter in (library.aclrtCtxSetSysParamOpt, library.aclrtSetSysParamOpt):
        set_parameter.argtypes = [ctypes.c_int, ctypes.c_int64]
        for value in (1, 0):
            assert [set_parameter(opt, value) for opt in (0, 1, 2)] == [OK] * 3
            same_bits(run(nine()), want)
        assert set_parameter(0, 2) == Status.ACL_ERROR_INVALID_PARAM
        assert aclnn.recent_error() == "value must be 0 or 1; got 2"
        assert set_parameter(3, 1) == Status.ACL_ERROR_INVALID_PARAM
        assert aclnn.recent_error() == "opt must be an aclSysParamOpt; got 3"


FORK = """
import os, signal, torch
from mx_driving import aclnn
signal.alarm(120)  # ends one that hangs
torch.set_num_threads(1)
one = torch.ones
inputs = (one(1, 1, 1, 8), one(1, 2).int(), torch.tensor([0]), torch.zeros(1, 4, 1, 1, 1, 2), one(1, 4, 1, 1, 1), one(1, 4, 8))
streams = (None, aclnn.Stream())
for stream in streams:
    aclnn.multi_scale_deformable_attention_grad_out(*inputs, stream=stream)
child = os.fork()
for stream in streams:
    grads = aclnn.multi_scale_deformable_attention_grad_out(*inputs, stream=stream)
    assert (grads[0] == 1).all()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_uses_its_parents_streams():
    python("-c", FORK)


def test_threads():
    """tests/native/test_streams.cpp has more."""
    want = run(nine(seed=3))

    def work(_):
        same_bits(run(nine(seed=3), aclnn.Stream()), want)
        assert phase_one(*replaced(0, None))[0] == Status.ACLNN_ERR_PARAM_NULLPTR
        return aclnn.recent_error()

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        assert set(pool.map(work, range(24))) == {"value must be a tensor; got NULL"}
