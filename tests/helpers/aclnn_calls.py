"""Calls of the two phases over torch tensors, for the tests of mx_driving.aclnn."""

import cases
import torch

from mx_driving import aclnn
from mx_driving.aclnn import Status

NAMES = ("value", "spatialShape", "levelStartIndex", "location", "attnWeight")
NAMES += ("gradOutput", "gradValue", "gradLocation", "gradAttnWeight")
OK, NULLPTR, INVALID = Status.ACLNN_SUCCESS, Status.ACLNN_ERR_PARAM_NULLPTR, Status.ACLNN_ERR_PARAM_INVALID
FAULT = Status.ACL_ERROR_RT_AICORE_EXCEPTION
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
phase_one = aclnn.multi_scale_deformable_attention_grad_get_workspace_size
phase_two = aclnn.multi_scale_deformable_attention_grad
MARK = -77.0


def nine(bs=1, queries=5, channels=8, heads=2, sizes=((3, 4), (2, 2)), points=3, dtype=torch.float32, seed=0):
    """The nine tensors of a legal call; the outputs hold MARK."""
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
    """Run both phases in a workspace of exactly the announced size between canaries -> the outputs."""
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
