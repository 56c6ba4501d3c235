"""The executor of PTX refuses what a GPU would do wrongly. test_triton.py shows that it computes right."""

from __future__ import annotations

import cases
import pytest
import torch

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(cases.ON_GPU, reason="PTX is executed only where there is no GPU")

import triton.language as tl  # noqa: E402


@triton.jit
def _copy(source, target, count, step, BLOCK: tl.constexpr):
    """Copy `count` elements; `step` is the distance of neighbours in target."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + at * step, tl.load(source + at, mask=at < count), mask=at < count)


@triton.jit
def _add_then_read(target, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.atomic_add(target + at, 1.0, sem="relaxed")
    tl.store(target + at, tl.load(target + at))


def test_a_copy():
    source, target = torch.arange(100.0), torch.zeros(100)
    _copy[(4,)](source, target, 100, 1, BLOCK=32)
    assert torch.equal(source, target)


@pytest.mark.parametrize(
    ("count", "step", "reason"),
    [(101, 1, "lies in no tensor"), (100, 2, "lies in no tensor"), (100, 0, "stores twice")],
    ids=["reads beyond the end", "writes beyond the end", "two threads, one address"],
)
def test_wrong_accesses_are_refused(count, step, reason):
    from ptx import Fault

    with pytest.raises(Fault, match=reason):
        _copy[(4,)](torch.zeros(100), torch.zeros(100), count, step, BLOCK=32)


def test_a_read_of_what_was_written_is_refused():
    from ptx import Fault

    with pytest.raises(Fault, match="reads what it has written"):
        _add_then_read[(1,)](torch.zeros(32), BLOCK=32)


PROGRAM = """
.visible .entry f(.param .u64 .ptr .global .align 1 f_param_0)
.reqntid 64
{{
    ld.param.b64 %rd1, [f_param_0];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.s64 %rd3, %rd1, %rd2;
    {body}
    st.global.b32 [%rd3 + 0], {{ %r3 }};
    ret;
}}
"""


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("setp.lt.u32 %p1, %r1, 9; @%p1 bra $L1; shfl.sync.bfly.b32 %r3, %r1, 5, 31, -1; $L1:\nmov.b32 %r3, 0;", "in part"),
        ("setp.lt.u32 %p1, %r1, 32; @%p1 bra $L1; bar.sync 0; bra $L2; $L1:\nbar.sync 0; $L2:\nmov.b32 %r3, 0;", "barrier"),
        ("add.s64 %rd3, %rd3, 2;", "misaligned"),
        ("brev.b32 %r3, %r1;", "not known"),
    ],
    ids=["shuffle of a part", "two barriers", "misaligned", "unknown"],
)
def test_faults(body, reason):
    from ptx import Driver, Fault, Kernel

    output = torch.zeros(64, dtype=torch.int32)
    with pytest.raises(Fault, match=reason):
        Driver(90).execute(Kernel(PROGRAM.format(body=body.replace(";", ";\n"))), 1, {"output": output}, 0)
