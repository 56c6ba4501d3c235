"""mx_driving.aclnn runs: workspaces, streams, handles, threads."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from aclnn_calls import FAULT, INVALID, MARK, NULLPTR, OK, nine, phase_one, phase_two, replaced, run, same_bits
from programs import python

from mx_driving import aclnn
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
import os, signal, torch
from mx_driving import aclnn
signal.alarm(120)  # ends one that hangs
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
    python("-c", FORK)


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
