"""The executor of PTX refuses what a GPU would do wrongly, and computes what PTX defines."""

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


def execute(body: str) -> list[int]:
    """The register %r3 of 64 threads, of which %r1 is the thread's number."""
    from ptx import Driver, Kernel

    output = torch.zeros(64, dtype=torch.int32)
    Driver(90).execute(Kernel(PROGRAM.format(body=body.replace(";", ";\n"))), 1, {"output": output}, 0)
    return output.tolist()


LANE = range(64)
ARITHMETIC = {
    "mul.hi.u32 %r3, %r1, 1431655766;": [i // 3 for i in LANE],
    "sub.s32 %r2, %r1, 32; div.s32 %r3, %r2, 5;": [int((i - 32) / 5) for i in LANE],
    "sub.s32 %r2, %r1, 32; rem.s32 %r3, %r2, 5;": [i - 32 - 5 * int((i - 32) / 5) for i in LANE],
    "sub.s32 %r2, %r1, 32; shr.s32 %r3, %r2, 40;": [-(i < 32) for i in LANE],
    "shr.u32 %r3, %r1, 40;": [0] * 64,
    "bfe.u32 %r3, %r1, 2, 3;": [i >> 2 & 7 for i in LANE],
    "mov.b32 %r2, 0f7FC00000; setp.neu.f32 %p1, %r2, 0f00000000; selp.b32 %r3, 1, 0, %p1;": [1] * 64,
    "mov.b32 %r2, 0f7FC00000; setp.ne.f32 %p1, %r2, 0f00000000; selp.b32 %r3, 1, 0, %p1;": [0] * 64,
    "cvt.rzi.s32.f32 %r3, 0f7F800000;": [2**31 - 1] * 64,
    "cvt.rzi.s32.f32 %r3, 0fC0300000;": [-2] * 64,
    "cvt.rn.bf16x2.f32 %r3, 0f3F808000, 0f3F818000;": [0x3F803F82] * 64,
    "mov.b64 %rd5, 0x400000003F800000; mul.f32x2 %rd6, %rd5, %rd5; mov.b64 {%r4, %r3}, %rd6;": [0x40800000] * 64,
    "shfl.sync.bfly.b32 %r3, %r1, 5, 31, -1;": [i ^ 5 for i in LANE],
    "redux.sync.add.s32 %r3, %r1, -1;": [sum(LANE[:32])] * 32 + [sum(LANE[32:])] * 32,
    "mov.b32 %r3, 7; setp.lt.u32 %p1, %r1, 9; @%p1 bra $L1; add.s32 %r3, %r3, %r1; $L1:\nmov.b32 %r4, 0;": [
        7 + i * (i >= 9) for i in LANE
    ],
}


@pytest.mark.parametrize("body", ARITHMETIC)
def test_arithmetic(body):
    assert execute(body) == ARITHMETIC[body]


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
    from ptx import Fault

    with pytest.raises(Fault, match=reason):
        execute(body)
