"""No byte outside the tensors is read into a result or written, whatever the index tables hold; every output is written."""

from __future__ import annotations

import cases
import pytest
import torch
from test_errors import GOOD


@pytest.fixture
def poisoned_allocations():
    """torch.empty comes filled with NaN, so that an element nobody wrote shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    before = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.utils.deterministic.fill_uninitialized_memory = before
    torch.use_deterministic_algorithms(False)


def embedded(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """t in the middle of a buffer of NaN (or of an absurd integer), and the buffer."""
    canary = float("nan") if t.is_floating_point() else -(2**30)
    buffer = torch.full((t.numel() + 512,), canary, dtype=t.dtype)
    inner = buffer[256 : 256 + t.numel()].view(t.shape)
    inner.copy_(t)
    return inner, buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("channels", [1, 3, 8, 37, 64])
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_surroundings_are_neither_read_nor_written(implementation, poisoned_allocations, operator, channels, dtype):
    make = {
        cases.MULTI_SCALE: lambda: cases.multi_scale(2, 9, channels, 2, [(3, 4), (2, 2)], 3, margin=0.5),
        cases.AGGREGATION: lambda: cases.aggregation(2, 5, 3, channels, 1, [[(3, 4)], [(2, 2)]]),
        cases.GEOMETRIC: lambda: cases.geometric(2, 9, channels, 2, [(3, 4), (2, 2)], 3),
    }[operator]
    plain = cases.cast(make(), dtype)
    grad = cases.grad_for(operator, plain).to(dtype)
    expected = [
        cases.forward_of(implementation, operator)(*plain),
        *cases.gradients_of(implementation, operator, grad, plain),
    ]
    inner, buffers = zip(*(embedded(t) for t in (*plain, grad)), strict=True)
    before = [b.clone() for b in buffers]
    got = [
        cases.forward_of(implementation, operator)(*inner[:5]),
        *cases.gradients_of(implementation, operator, inner[5], inner[:5]),
    ]
    for a, b in zip(got, expected, strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
    for a, b in zip(buffers, before, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


GARBAGE = [
    [[0, 4], [2, 2]],
    [[3, 4], [2, -2]],
    [[2**31, 2**31], [2, 2]],
    [[2**62, 4], [2, 2]],
    [[1, 2**63 - 1], [2, 2]],
    [[-(2**63), 1], [2, 2]],
    [[17, 1], [2, 2]],
]
STARTS = [[-1, 0], [0, 16], [2**62, 0], [0, 2**63 - 1], [-(2**63), 0], [5, 12]]


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_garbage_tables_are_refused(implementation, operator):
    good = GOOD[operator]()
    backward = getattr(torch.ops.mx_driving, operator + "_backward").default
    mask = [True] * len(cases.DIFFERENTIABLE[operator])
    for place, tables in ((1, GARBAGE), (2, STARTS)):
        for table in tables:
            args = list(good)
            args[place] = torch.tensor(table).view(good[place].shape)
            with pytest.raises(ValueError, match="must"):
                getattr(torch.ops.mx_driving, operator).default(*args)
            with pytest.raises(ValueError, match="must"):
                backward(cases.grad_for(operator, good).float(), *args, mask)


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_reference_masks_what_tables_push_outside(operator):
    """On devices where tables cannot be read for free nothing is raised: rows that do not exist count as zero."""
    args = list(GOOD[operator]())
    args[2] = args[2] + 1000
    assert not cases.forward_of("reference", operator)(*args).any()
    for g in cases.gradients_of("reference", operator, cases.grad_for(operator, tuple(args)).float(), tuple(args)):
        assert not g.any()
