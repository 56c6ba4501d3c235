"""mx_driving.aclnn runs: workspaces, streams, handles, threads."""

from __future__ import annotations

import ctypes
import os
import threading

import pytest
import torch
from aclnn_calls import FAULT, INVALID, MARK, NULLPTR, OK, nine, phase_one, phase_two, replaced, run, same_bits
from programs import python

from mx_driving._vendor import aclnn
from mx_driving.aclnn import Status


def test_levels_that_do_not_fit_are_told_at_synchronise():
    for index, numbers, sentence in (
        (2, [0, 13], "levelStartIndex[1] must leave room for 2 x 2 rows among 16; got 13 (needs 17 rows)"),
        (2, [-1, 12], "levelStartIndex[0] must not be negative; got -1"),
        (1, [[3, 4], [0, 2]], "spatialShape[1] must be positive (H, W); got (0, 2)"),
        (
            1,
            [[3, 2**62], [2, 2]],
            f"levelStartIndex[0] must leave room for 3 x {2**62} rows among 16; got 0 (needs 2**63 or more rows)",
        ),
    ):
        tensors = replaced(index, torch.tensor(numbers))
        status, size, executor = phase_one(*tensors)
        assert status == OK
        assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor) == OK
        assert aclnn.synchronize() == FAULT
        assert aclnn.recent_error() == sentence
        for output in tensors[6:]:
            assert (output == MARK).all()


def test_the_workspace_is_as_large_as_is_said():
    """tests/native/test_streams.cpp has the statuses of phase two."""
    status, size, executor = phase_one(*nine())
    assert status == OK
    with pytest.raises(ValueError, match="workspace must have workspace_size="):
        phase_two(torch.empty(8, dtype=torch.uint8), size, executor)
    memory = torch.empty(size, dtype=torch.uint8)
    assert aclnn.multi_scale_deformable_attn_function(memory, size, executor) == INVALID  # it is the gradient's


def test_the_work_is_done_when_phase_two_returns():
    tensors = nine()
    _, size, executor = phase_one(*tensors)
    assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor) == OK
    same_bits(tensors[6:], run(nine()))


def test_a_stream_remembers_its_first_error():
    """Calls behind a failed one run, and another stream knows nothing of it."""
    stream, other = aclnn.Stream(), aclnn.Stream()
    good = nine()
    calls = (replaced(2, torch.tensor([0, 13])), replaced(2, torch.tensor([-1, 12])), good)
    for tensors in calls:
        _, size, executor = phase_one(*tensors)
        assert phase_two(torch.empty(size, dtype=torch.uint8), size, executor, stream) == OK
    same_bits(good[6:], run(nine(), other))
    assert aclnn.synchronize() == OK
    assert stream.synchronize() == FAULT
    assert (aclnn.recent_error() or "").startswith("levelStartIndex[1] must leave room")
    assert stream.synchronize() == OK


def test_what_python_drops_is_destroyed():
    _, _, executor = phase_one(*nine())
    handle = executor._handle
    del executor
    assert aclnn._library().aclDestroyAclOpExecutor(handle) == INVALID  # nothing left to destroy
    stream = aclnn.Stream()
    handle = stream._handle
    del stream
    assert aclnn._library().aclrtSynchronizeStream(handle) == Status.ACL_ERROR_INVALID_PARAM
    assert (
        aclnn.recent_error() == "stream must come from aclrtCreateStream and not be destroyed; got a pointer that is no stream"
    )


def test_determinism_may_be_asked_for():
    """The bits never depend on it."""
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
from mx_driving._vendor import aclnn
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
    want, failures = run(nine(seed=3)), []

    def work():
        stream = aclnn.Stream()
        try:
            for turn in range(8):
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
