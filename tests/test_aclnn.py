"""mx_driving.aclnn: every status, the operator's own bits, any layout, empty input, workspaces, streams."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading

import cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mx_driving import aclnn
from mx_driving.aclnn import Status

NAMES = (
    "value",
    "spatialShape",
    "levelStartIndex",
    "location",
    "attnWeight",
    "gradOutput",
    "gradValue",
    "gradLocation",
    "gradAttnWeight",
)
OK, NULLPTR, INVALID = Status.ACLNN_SUCCESS, Status.ACLNN_ERR_PARAM_NULLPTR, Status.ACLNN_ERR_PARAM_INVALID
FAULT = Status.ACL_ERROR_RT_AICORE_EXCEPTION
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
phase_one = aclnn.multi_scale_deformable_attention_grad_get_workspace_size
phase_two = aclnn.multi_scale_deformable_attention_grad
MARK = -77.0


def nine(bs=1, queries=5, channels=8, heads=2, sizes=((3, 4), (2, 2)), points=3, dtype=torch.float32, seed=0):
    """Nine tensors of a sound call; the outputs hold MARK."""
    inputs = cases.cast(cases.multi_scale(bs, queries, channels, heads, list(sizes), points, seed), dtype)
    return with_outputs(inputs, cases.grad_for(cases.MULTI_SCALE, inputs, seed + 1).to(dtype))


def with_outputs(inputs, grad):
    outputs = [torch.full(inputs[i].shape, MARK, dtype=inputs[i].dtype) for i in (0, 3, 4)]
    return [*inputs, grad, *outputs]


def replaced(index, tensor):
    tensors = nine()
    tensors[index] = tensor(tensors[index]) if callable(tensor) else tensor
    return tensors


def run(tensors, stream=None):
    """Both phases in a workspace of exactly the announced size between canaries; the outputs."""
    status, size, executor = phase_one(*tensors)
    assert status == OK, aclnn.recent_error()
    memory = torch.full((64 + size + 64,), 0x5A, dtype=torch.uint8)
    assert phase_two(memory[64 : 64 + size], size, executor, stream) == OK, aclnn.recent_error()
    assert aclnn.synchronize(stream) == OK, aclnn.recent_error()
    assert (memory[:64] == 0x5A).all()
    assert (memory[-64:] == 0x5A).all()
    return tensors[6:]


def same_bits(got, want):
    for g, w in zip(got, want, strict=True):
        assert g.dtype == w.dtype
        torch.testing.assert_close(g, w, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_forwards_output_may_lie_apart(dtype):
    inputs = cases.cast(WITHIN_LIMITS[0].make(), dtype)
    want = cases.forward_of("native", cases.MULTI_SCALE)(*inputs)
    wide = want.new_full((*want.shape[:-1], 2 * want.shape[-1]), 7)
    aclnn.multi_scale_deformable_attn_function_out(*inputs, wide[..., ::2])
    same_bits([wide[..., ::2], wide[..., 1::2]], [want, torch.full_like(want, 7)])


WITHIN_LIMITS = [
    case
    for case in cases.CASES + cases.LATTICE
    if case.operator == cases.MULTI_SCALE
    and case.make()[0].shape[3] % 8 == 0
    and max(case.make()[0].shape[2], *case.make()[4].shape[3:]) <= 16
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", WITHIN_LIMITS, ids=cases.case_id)
def test_the_operators_bits(case, dtype):
    inputs = cases.cast(case.make(), dtype)
    grad = cases.grad_for(case.operator, inputs).to(dtype)
    want = cases.gradients_of("native", case.operator, grad, inputs)
    for rows in (grad, grad.view(*grad.shape[:2], *inputs[0].shape[2:])):
        same_bits(run(with_outputs(inputs, rows)), want)
    same_bits(aclnn.multi_scale_deformable_attention_grad_out(*inputs, grad), want)
    forward = aclnn.multi_scale_deformable_attn_function_out(*inputs)
    same_bits([forward], [cases.forward_of("native", case.operator)(*inputs)])


def test_at_least_ten_cases_are_within_the_limits():
    assert len(WITHIN_LIMITS) >= 10


def test_known_answer_of_the_vendors_sample():
    one = torch.ones
    inputs = (one(1, 1, 1, 8), one(1, 2).int(), torch.zeros(1).int(), torch.zeros(1, 32, 1, 1, 1, 2), one(1, 32, 1, 1, 1))
    value, location, weight = run(with_outputs(inputs, one(1, 32, 8)))
    assert (value == 8).all()
    assert (location == 4).all()
    assert (weight == 2).all()


@pytest.mark.parametrize("index", range(9))
def test_null(index):
    tensors = replaced(index, None)
    assert phase_one(*tensors) == (NULLPTR, 0, None)
    assert aclnn.recent_error() == f"{NAMES[index]} must be a tensor; got NULL"
    assert aclnn.recent_error() is None


def raw_phase_one(tensors, size, executor):
    handles = [aclnn._describe(name, t) for name, t in zip(NAMES, tensors, strict=True)]
    status = aclnn._library().aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(*handles, size, executor)
    for handle in handles:
        aclnn._library().aclDestroyTensor(handle)
    return status


def test_null_results_and_nothing_written_on_failure():
    size, executor = ctypes.c_uint64(99), ctypes.c_void_p(98)
    assert raw_phase_one(nine(), None, ctypes.byref(executor)) == NULLPTR
    assert raw_phase_one(nine(), ctypes.byref(size), None) == NULLPTR
    assert raw_phase_one(replaced(1, torch.ones(3, 2)), ctypes.byref(size), ctypes.byref(executor)) == INVALID
    assert (size.value, executor.value) == (99, 98)


def test_null_memory():
    value = nine()[0]
    handle = aclnn._library().aclCreateTensor((ctypes.c_int64 * 4)(*value.shape), 4, 0, None, 0, 2, None, 0, None)
    others = [aclnn._describe(name, t) for name, t in zip(NAMES[1:], nine()[1:], strict=True)]
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    call = aclnn._library().aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize
    assert call(handle, *others, ctypes.byref(size), ctypes.byref(executor)) == NULLPTR
    assert aclnn.recent_error() == "value must have memory for its elements; got NULL"
    for each in (handle, *others):
        assert aclnn._library().aclDestroyTensor(each) == OK


FLOATING, INDEX = (0, 3, 4, 5, 6, 7, 8), (1, 2)
BAD_DTYPES = [(i, d) for i in FLOATING for d in (torch.float64, torch.int32, torch.bool)] + [
    (i, d) for i in INDEX for d in (torch.float32, torch.int16, torch.uint8)
]


@pytest.mark.parametrize(("index", "dtype"), BAD_DTYPES)
def test_dtypes_out_of_range(index, dtype):
    assert phase_one(*replaced(index, lambda t: t.to(dtype)))[0] == INVALID
    assert (aclnn.recent_error() or "").startswith(f"{NAMES[index]} must have dtype ")


@pytest.mark.parametrize("change", ["one more axis", "one axis less", *range(6)])
@pytest.mark.parametrize("index", range(9))
def test_shapes_that_do_not_agree(index, change):
    def another(t):
        if change == "one more axis":
            return t.new_ones(*t.shape, 1)
        if change == "one axis less":
            return t.new_ones(t.shape[:-1] if index != 5 else t.shape[:1])
        return t.new_ones([size + 8 * (axis == change) for axis, size in enumerate(t.shape)])

    if isinstance(change, int) and change >= nine()[index].dim():
        return
    assert phase_one(*replaced(index, another))[0] == INVALID
    assert " must have " in (aclnn.recent_error() or "")


def test_sentences():
    assert phase_one(*replaced(8, torch.ones(1, 5, 2, 2, 4)))[0] == INVALID
    rule = "gradAttnWeight must have shape (bs=1, num_queries=5, num_heads=2, num_levels=2, num_points=3); "
    assert aclnn.recent_error() == rule + "got (1, 5, 2, 2, 4)"
    assert phase_one(*replaced(5, torch.ones(1, 5, 17)))[0] == INVALID
    rule = "gradOutput must have shape (bs=1, num_queries=5, num_heads * channels=16); "
    assert aclnn.recent_error() == rule + "got (1, 5, 17)"


LEVELS_16 = [(1, 1)] * 16
LIMITS = [
    ({"channels": 256}, {"channels": 264}, "value must have channels a multiple of 8 and <= 256; got 264"),
    ({"channels": 16}, {"channels": 12}, "value must have channels a multiple of 8 and <= 256; got 12"),
    ({"heads": 16}, {"heads": 17}, "value must have num_heads <= 16; got 17"),
    ({"sizes": LEVELS_16}, {"sizes": [*LEVELS_16, (1, 1)]}, "spatialShape must have num_levels <= 16; got 17"),
    ({"points": 16}, {"points": 17}, "location must have num_points <= 16; got 17"),
    (
        {"queries": 499999, "heads": 1, "points": 1, "sizes": [(1, 1)]},
        {"queries": 500000, "heads": 1, "points": 1, "sizes": [(1, 1)]},
        "location must have num_queries < 500000; got 500000",
    ),
]


@pytest.mark.parametrize(("within", "past", "sentence"), LIMITS, ids=[row[2] for row in LIMITS])
def test_limits(within, past, sentence):
    status, size, executor = phase_one(*nine(**within))
    assert status == OK
    assert size > 0
    assert executor is not None
    assert phase_one(*nine(**past)) == (INVALID, 0, None)
    assert aclnn.recent_error() == sentence


def test_rows_beyond_what_a_kernel_can_count():
    expanded = torch.zeros(1).expand(1, 2**31 - 1, 1, 8)
    tensors = nine(heads=1)
    tensors[0] = tensors[6] = expanded
    assert phase_one(*tensors)[0] == INVALID
    assert aclnn.recent_error() == "value must have num_keys < 2147483647; got 2147483647"


def test_an_output_whose_elements_share_memory():
    for index in (6, 7, 8):
        assert phase_one(*replaced(index, lambda t: t[:, :1].expand(t.shape)))[0] == INVALID
        assert f"{NAMES[index]} must have strides that keep its elements apart" in (aclnn.recent_error() or "")
    window = torch.zeros(64).as_strided((1, 16, 2, 8), (64, 1, 16, 1))
    assert phase_one(*replaced(6, window))[0] == INVALID


def test_a_view_that_leaves_its_storage():
    """torch cannot make one, a C program can."""
    tensors = nine()
    handles = [aclnn._describe(name, t) for name, t in zip(NAMES, tensors, strict=True)]
    shape = (ctypes.c_int64 * 4)(1, 16, 2, 8)
    size, executor = ctypes.c_uint64(), ctypes.c_void_p()
    library = aclnn._library()
    for strides, offset, room, status in (
        ((256, 16, 8, 1), 0, 256, OK),
        ((256, 16, 8, 1), 1, 256, INVALID),
        ((256, 16, 8, 1), 0, 255, INVALID),
        ((256, 16, 8, -1), 7, 256, OK),
        ((256, 16, 8, -1), 6, 256, INVALID),
        ((256, 16, 2**62, 1), 0, 256, INVALID),
        ((256, 2**63 - 1, 8, 1), 0, 256, INVALID),
        ((256, 16, 8, 1), -(2**63), 256, INVALID),
    ):
        grad_value = library.aclCreateTensor(
            shape, 4, 0, (ctypes.c_int64 * 4)(*strides), offset, 2, (ctypes.c_int64 * 1)(room), 1, tensors[6].data_ptr()
        )
        arguments = [*handles[:6], grad_value, *handles[7:]]
        got = library.aclnnMultiScaleDeformableAttentionGradGetWorkspaceSize(
            *arguments, ctypes.byref(size), ctypes.byref(executor)
        )
        assert got == status, (strides, offset, room, aclnn.recent_error())
        if got == OK:
            assert library.aclDestroyAclOpExecutor(executor) == OK
        library.aclDestroyTensor(grad_value)
    for handle in handles:
        library.aclDestroyTensor(handle)


@pytest.mark.parametrize(("format", "status"), [(2, OK), (0, INVALID), (29, INVALID), (-1, INVALID)])
def test_formats(format, status, monkeypatch):
    monkeypatch.setattr(aclnn, "_FORMAT_ND", format)
    assert phase_one(*nine())[0] == status


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


def test_outputs_are_rounded_once_from_float32():
    """Every floating dtype in every place, against the call that writes float32."""
    inputs = cases.cast(cases.multi_scale(2, 9, 24, 3, [(5, 4), (3, 3)], 3), torch.float32)
    grad = cases.grad_for(cases.MULTI_SCALE, inputs).float()
    for turn in range(3):
        kinds = [DTYPES[(turn + place) % 3] for place in range(7)]
        mixed = [inputs[0].to(kinds[0]), *inputs[1:3], inputs[3].to(kinds[1]), inputs[4].to(kinds[2]), grad.to(kinds[3])]
        wide = [torch.empty(mixed[i].shape) for i in (0, 3, 4)]
        narrow = [torch.empty_like(t, dtype=kind) for t, kind in zip(wide, kinds[4:], strict=True)]
        want = [t.to(kind) for t, kind in zip(run([*mixed, *wide]), kinds[4:], strict=True)]
        same_bits(run([*mixed, *narrow]), want)


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
    packed, laid = both
    bases = [base.clone() for base, _ in laid]
    got = run([view for _, view in laid])
    same_bits(got, run(packed))
    same_bits([base for base, _ in laid[:6]], bases[:6])
    for (base, view), before in zip(laid[6:], bases[6:], strict=True):
        view.fill_(0)  # what is left are the neighbours
        neighbours = base != 0
        assert torch.equal(base[neighbours], before[neighbours])


def test_levels_that_do_not_fit_are_told_at_synchronise():
    for index, numbers, sentence in (
        (2, [0, 13], "levelStartIndex[1] must leave room for 2 x 2 rows among 16; got 13"),
        (2, [-1, 12], "levelStartIndex[0] must leave room for 3 x 4 rows among 16; got -1"),
        (1, [[3, 4], [0, 2]], "spatialShape[1] must be positive (H, W); got (0, 2)"),
        (1, [[3, 2**62], [2, 2]], "levelStartIndex[0] must leave room for 3 x 4611686018427387904 rows among 16; got 0"),
    ):
        tensors = replaced(index, torch.tensor(numbers))
        status, size, executor = phase_one(*tensors)
        assert status == OK
        assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor) == OK
        assert aclnn.synchronize() == FAULT
        assert aclnn.recent_error() == sentence
        for output in tensors[6:]:
            assert (output == MARK).all()


def test_phase_two_statuses():
    memory = torch.empty(1024, dtype=torch.uint8)

    def planned():
        status, size, executor = phase_one(*nine())
        assert status == OK
        return size, executor

    assert phase_two(memory, 1024, None) == NULLPTR
    size, executor = planned()
    assert phase_two(None, size, executor) == NULLPTR
    size, executor = planned()
    assert phase_two(memory, size - 1, executor) == INVALID
    assert aclnn.recent_error() == f"workspaceSize must be at least {size}; got {size - 1}"
    size, executor = planned()
    assert phase_two(memory[1:], size, executor) == INVALID
    size, executor = planned()
    assert aclnn.multi_scale_deformable_attn_function(memory, size, executor) == INVALID
    size, executor = planned()
    assert phase_two(memory, size, executor) == OK
    assert phase_two(memory, size, executor) == INVALID
    assert aclnn.recent_error() == "executor must come from phase one and be run once; got a pointer that is no executor"
    assert aclnn.synchronize() == OK
    size, executor = planned()
    with pytest.raises(ValueError, match="workspace must have workspace_size="):
        phase_two(memory[:8], size, executor)


def test_convenience_raises():
    tensors = nine()
    call = aclnn.multi_scale_deformable_attention_grad_out
    for index, bad, error, sentence in (
        (0, tensors[0].double(), TypeError, "value must have dtype ACL_FLOAT, ACL_FLOAT16 or ACL_BF16; got ACL_DOUBLE"),
        (5, None, TypeError, "grad_output must be a tensor; got NULL"),
        (2, torch.tensor([0]), ValueError, "level_start_index must have shape (num_levels=2,); got (1,)"),
        (2, torch.tensor([0, 99]), ValueError, "level_start_index[1] must leave room for 2 x 2 rows among 16; got 99"),
        (4, "weights", TypeError, "attn_weight must be a torch.Tensor; got str"),
        (6, torch.empty(1, device="meta"), ValueError, "grad_value must be a plain strided tensor on the CPU; got "),
    ):
        arguments = [*tensors]
        arguments[index] = bad
        with pytest.raises(error) as caught:
            call(*arguments)
        assert str(caught.value).startswith(sentence)
    wrong = torch.empty(1, 5, 16, dtype=torch.float16)
    with pytest.raises(TypeError, match="output must have value's dtype ACL_FLOAT; got ACL_FLOAT16"):
        aclnn.multi_scale_deformable_attn_function_out(*tensors[:5], wrong)
    with pytest.raises(ValueError, match="value must have shape"):
        aclnn.multi_scale_deformable_attn_function_out(tensors[0][0], *tensors[1:5])


def test_streams_run_side_by_side_and_keep_their_tensors():
    slow, quick = aclnn.Stream(), aclnn.Stream()
    big = nine(bs=2, queries=3000, channels=64, heads=8, sizes=[(40, 40)] * 4, points=8)
    for _ in range(3):
        status, size, executor = phase_one(*big)
        assert status == OK
        assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor, slow) == OK
    last = nine()
    status, size, executor = phase_one(*last)
    assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor, slow) == OK
    del big, executor  # the stream holds what it works on
    same_bits(run(nine(), quick), run(nine()))
    assert (last[6] == MARK).all()  # the slow queue has not got there
    assert aclnn.synchronize(slow) == OK
    same_bits(last[6:], run(nine()))


def test_what_python_drops_is_destroyed():
    _, _, executor = phase_one(*nine())
    handle = executor._handle
    del executor
    assert aclnn._library().aclDestroyAclOpExecutor(handle) == INVALID  # nothing left to destroy

    stream, tensors = aclnn.Stream(), nine(queries=200)
    handle = stream._handle
    _, size, executor = phase_one(*tensors)
    assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor, stream) == OK
    del stream  # waits for its queue
    same_bits(tensors[6:], run(nine(queries=200)))
    assert aclnn._library().aclrtSynchronizeStream(handle) == Status.ACL_ERROR_INVALID_PARAM


FORK = """
import os, torch
from mx_driving import aclnn
torch.set_num_threads(1)
one = torch.ones
inputs = (one(1, 1, 1, 8), one(1, 2).int(), torch.tensor([0]), torch.zeros(1, 4, 1, 1, 1, 2), one(1, 4, 1, 1, 1), one(1, 4, 8))
own = aclnn.Stream()
for stream in (None, own):
    aclnn.multi_scale_deformable_attention_grad_out(*inputs, stream=stream)
child = os.fork()
grads = aclnn.multi_scale_deformable_attention_grad_out(*inputs)
assert (grads[0] == 1).all()
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert own.synchronize() == 0
else:
    assert own.synchronize() == aclnn.Status.ACL_ERROR_INVALID_PARAM
    assert "in this process" in aclnn.recent_error()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_has_a_default_stream_of_its_own():
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def test_threads():
    want, failures = run(nine(seed=3)), []

    def work():
        stream = aclnn.Stream()
        try:
            for turn in range(20):
                same_bits(run(nine(seed=3), stream if turn % 2 else None), want)
                assert phase_one(*replaced(0, None))[0] == NULLPTR
                assert aclnn.recent_error() == "value must be a tensor; got NULL"
        except AssertionError as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
