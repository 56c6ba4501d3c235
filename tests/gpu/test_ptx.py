"""The executor of PTX refuses what a GPU would do wrongly. test_triton.py shows that it computes right."""

import cases
import pytest
import torch

triton = pytest.importorskip("triton", "3.4")  # whose drivers ptx.py stands in for
pytestmark = pytest.mark.skipif(cases.ON_GPU, reason="PTX is executed only where there is no GPU")

import triton.language as tl  # noqa: E402
from ptx import Fault  # noqa: E402


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
    with pytest.raises(Fault, match=reason):
        _copy[(4,)](torch.zeros(100), torch.zeros(100), count, step, BLOCK=32)


def test_a_read_of_what_was_written_is_refused():
    with pytest.raises(Fault, match="reads what it has written"):
        _add_then_read[(1,)](torch.zeros(32), BLOCK=32)
