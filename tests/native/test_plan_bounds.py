"""Where a plan changes: a call at a bound, and one just beyond it. test_plan.py has a plan of each kind, and its results."""

from __future__ import annotations

import ctypes

import cases
import pytest
import torch
from cases import AGGREGATION, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE
from torch import Tensor

import mx_driving
from mx_driving import _backends

pytestmark = pytest.mark.usefixtures("every_thread")
plan_of = _backends.native.describe_plan


def attention(
    queries: int, heads: int, channels: int, sizes: list[tuple[int, int]], points: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Inputs of no special numbers: a plan reads none."""
    shapes, starts = cases.levels_of(*sizes)
    value = torch.empty(1, int(shapes.prod(-1).sum()), heads, channels, dtype=dtype)
    samples = (1, queries, heads, len(sizes), points)
    return value, shapes, starts, torch.empty(*samples, 2, dtype=dtype), torch.empty(samples, dtype=dtype)


def moved(args: tuple[Tensor, ...], by: list[int]) -> tuple[Tensor, ...]:
    """The levels begin so many rows later."""
    return *args[:2], args[2] + torch.tensor(by), *args[3:]


def with_a_row_of_no_level(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return torch.cat([args[0], args[0][:, :1]], 1), *args[1:]


def tall(rows: int) -> tuple[Tensor, ...]:
    """An aggregation of rows of 2 MB."""
    samples = torch.empty(1, 1, 1, 1, 2), torch.empty(1, 1, 1, 1, 1, 1)
    return torch.empty(1, rows, 2**19), torch.tensor([[[rows, 1]]]), torch.tensor([[0]]), *samples


def with_window(queries: int, heads: int, channels: int, side: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    value = torch.empty(1, side * side, heads, channels, dtype=dtype)
    shapes, starts = cases.levels_of((side, side))
    window, logits = torch.zeros(4, 2, dtype=torch.int64), torch.empty(1, queries, heads, 4, dtype=dtype)
    return value, shapes, starts, torch.empty(1, queries, heads, 2, dtype=dtype), window, logits


NONE, ONE, WAY = "none", "1 of 1 levels", "value_gradient"
FORWARD, OF_VALUE, OF_ALL = None, lambda n: [True] + [False] * (n - 1), lambda n: [True] * n
SMALL, TWO, BF16 = [(8, 8)], [(8, 8), (4, 4)], torch.bfloat16
# operator, inputs, threads, gradients, decision, what it begins with
BOUNDS = [
    # a level is packed up to 15.5 MB (248 x 256 rows of 256 bytes), and where its rows are read eight times
    (MULTI_SCALE, lambda: attention(31744, 2, 64, [(248, 256)], 4), 1, FORWARD, "packed_value", "1 of 1"),
    (MULTI_SCALE, lambda: attention(31743, 2, 64, [(248, 256)], 4), 1, FORWARD, "packed_value", NONE),
    (MULTI_SCALE, lambda: attention(99999, 2, 64, [(255, 249)], 4), 1, FORWARD, "packed_value", NONE),
    # a nearest sample reads one row
    (GEOMETRIC, lambda: attention(3200, 2, 16, [(20, 20)], 1), 1, FORWARD, "packed_value", f"{ONE}, 25 KB"),
    (GEOMETRIC, lambda: attention(3199, 2, 16, [(20, 20)], 1), 1, FORWARD, "packed_value", NONE),
    (GEOMETRIC, lambda: attention(1000, 2, 16, [(20, 20)], 1), 1, FORWARD, "packed_value", NONE),
    # rows are near, and packed as computed, up to 256 KB
    (MULTI_SCALE, lambda: attention(4096, 2, 64, [(32, 32)], 4), 1, FORWARD, "prefetched_rows", NONE),
    (MULTI_SCALE, lambda: attention(4096, 2, 64, [(33, 32)], 4), 1, FORWARD, "prefetched_rows", ONE),
    (GEOMETRIC, lambda: attention(16384, 2, 64, [(32, 32)], 4, BF16), 1, FORWARD, "packed_value", f"{ONE}, 256 KB"),
    (GEOMETRIC, lambda: attention(16384, 2, 64, [(33, 32)], 4, BF16), 1, FORWARD, "packed_value", f"{ONE}, 132 KB"),
    # rows of one head lie side by side
    (MULTI_SCALE, lambda: attention(4096, 1, 16, SMALL, 4), 1, FORWARD, "packed_value", NONE),
    (MULTI_SCALE, lambda: attention(4096, 1, 16, SMALL, 4), 1, OF_VALUE, "packed_gradient", NONE),
    (MULTI_SCALE, lambda: attention(4096, 2, 16, SMALL, 4), 1, FORWARD, "packed_value", f"{ONE}, 4 KB"),
    # each thread has 512 queries where levels are packed
    *(
        (MULTI_SCALE, lambda n=512 * t - less: attention(n, 2, 16, SMALL, 4), t, FORWARD, "packed_value", text)
        for t in (1, 3)
        for less, text in ((0, f"{ONE}, 4 KB"), (1, NONE))
    ),
    # packed levels begin at 64 bytes: 90 levels of 9 rows of 20 bytes, 192 in place of 180
    (MULTI_SCALE, lambda: attention(4096, 2, 5, [(3, 3)] * 90, 1), 1, FORWARD, "packed_value", "90 of 90 levels, 16 KB"),
    # overlapping levels are not packed in the gradient
    (MULTI_SCALE, lambda: attention(4096, 2, 16, TWO, 4), 1, OF_VALUE, "packed_gradient", "2 of 2 levels, 5 KB"),
    (MULTI_SCALE, lambda: moved(attention(4096, 2, 16, TWO, 4), [0, -1]), 1, OF_VALUE, "packed_gradient", NONE),
    # each thread has its own packed gradient: 5 MB, at most 15.5 MB together
    *(
        (MULTI_SCALE, lambda: attention(24576, 8, 64, [(128, 160)], 4), t, OF_VALUE, "packed_gradient", text)
        for t, text in ((1, "1 of 1"), (2, "1 of 1"), (4, NONE))
    ),
    # one pass packs up to 128 KB, because value and gradient are near together, and where all rows belong to a level
    (GEOMETRIC, lambda: attention(8192, 2, 64, [(32, 16)], 4), 1, OF_ALL, "packed_gradient", f"{ONE}, 128 KB"),
    (GEOMETRIC, lambda: attention(8192, 2, 64, [(33, 16)], 4), 1, OF_ALL, "packed_gradient", NONE),
    (GEOMETRIC, lambda: attention(8192, 2, 64, [(33, 16)], 4), 1, OF_ALL, WAY, "WITH_SAMPLES"),
    (GEOMETRIC, lambda: attention(8192, 2, 64, [(8, 16)], 4), 1, OF_ALL, "packed_gradient", f"{ONE}, 32 KB"),
    (GEOMETRIC, lambda: with_a_row_of_no_level(attention(8192, 2, 64, [(8, 16)], 4)), 1, OF_ALL, "packed_gradient", NONE),
    # of cuts that take as long the first is chosen: 5 parts take two rounds, as long as 3 in one
    (MULTI_SCALE, lambda: attention(300, 1, 16, [(4, 4)] * 5, 4), 4, OF_ALL, WAY, "BY_PARTS, 3 a head"),
    (MULTI_SCALE, lambda: attention(300, 1, 16, [(4, 4)] * 5, 4), 5, OF_ALL, WAY, "BY_PARTS, 5 a head"),
    (MULTI_SCALE, lambda: attention(300, 1, 16, [(4, 4)] * 5, 3), 4, OF_ALL, WAY, "BY_BANDS, 5"),
    # levels that touch do not overlap
    (MULTI_SCALE, lambda: attention(300, 1, 16, [(4, 4)] * 3, 4), 3, OF_ALL, WAY, "BY_PARTS, 3 a head"),
    (MULTI_SCALE, lambda: moved(attention(300, 1, 16, [(4, 4)] * 3, 4), [0, 0, -1]), 3, OF_ALL, WAY, "BY_BANDS, 5"),
    # a buffered band has 6 MB or one row, of sums in float32
    *(
        (MULTI_SCALE, lambda c=c: attention(1, 1, c, [(5, 1)], 1, BF16), 1, OF_VALUE, WAY, f"BY_BANDS, {n}, buffered")
        for c, n in ((3 * 2**18, 3), (3 * 2**19, 5), (3 * 2**20, 5), (2**19, 2))
    ),
    # a band of an aggregation has 16 MB
    *(
        (AGGREGATION, lambda r=r: tall(r), 1, OF_VALUE, WAY, f"BY_BANDS, {n}")
        for r, n in ((7, 1), (8, 1), (9, 2), (17, 3))
    ),
    # heads go together where value is near (1 MB), and has more samples than rows to widen
    (GEOMETRIC_LOGITS, lambda: with_window(1, 4, 64, 32), 1, FORWARD, "heads_together", "4"),
    (GEOMETRIC_LOGITS, lambda: with_window(1, 4, 64, 33), 1, FORWARD, "heads_together", "0"),
    (GEOMETRIC_LOGITS, lambda: with_window(256, 4, 64, 32, BF16), 1, FORWARD, "heads_together", "4"),
    (GEOMETRIC_LOGITS, lambda: with_window(255, 4, 64, 32, BF16), 1, FORWARD, "heads_together", "0"),
    # heads of one pass are near together: 4 of 32 KB and 2 of 64 KB with the gradient's
    *(
        (GEOMETRIC_LOGITS, lambda s=s: with_window(4096, 4, 64, s), 1, OF_ALL, "heads_together", n)
        for s, n in ((8, "4"), (11, "4"), (12, "2"), (16, "2"), (17, "1"), (22, "1"))
    ),
]  # fmt: skip


@pytest.mark.parametrize("row", BOUNDS, ids=[f"{number} {row[4]}" for number, row in enumerate(BOUNDS)])
def test_a_plan_at_a_bound_and_beyond_it(row):
    operator, make, threads, mask, decision, text = row
    torch.set_num_threads(threads)
    plan = plan_of(operator, make(), mask and mask(len(cases.DIFFERENTIABLE[operator])))
    assert plan[decision] == text or (text == "1 of 1" and plan[decision].startswith("1 of 1 levels"))


def test_subnormal_numbers_are_widened():
    """A float16 value beside float64 locations."""
    value = (torch.arange(-1032, 1032).double() * 2**-24).half().view(1, -1, 1, 8)
    assert (value.double() * 2**24 == torch.arange(-1032, 1032).view_as(value)).all()
    rows = value.shape[1]
    shapes, starts = cases.levels_of((1, rows))
    x = (torch.arange(rows).double() + 0.5) / rows
    locations = torch.stack([x, torch.full_like(x, 0.5)], -1).view(1, rows, 1, 1, 1, 2)
    with cases.implementations()["native-baseline"]():
        out = mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, torch.ones(1, rows, 1, 1, 1).double())
    assert torch.equal(out.view_as(value).double(), value.double())


def test_channels_that_lie_apart_are_widened():
    value, *others = cases.multi_scale(2, 5, 8, 2, [(3, 4), (2, 2)], 3)
    value = value.float()
    apart = torch.stack([value, -value], -1)[..., 0]
    assert apart.stride(-1) == 2
    with cases.implementations()["native-baseline"]():
        found, expected = (mx_driving.multi_scale_deformable_attn(v, *others) for v in (apart, value))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gradient_in_float32_of_a_value_in_16_bits(dtype):
    """In C alone. One pass would take them to be laid out alike."""
    args = cases.cast(cases.multi_scale(1, 30, 16, 8, [(6, 8)], 4), dtype)
    grad = cases.grad_for(MULTI_SCALE, args).to(dtype)
    gradient = torch.full(args[0].shape, 7.0)

    def into_gradient(name, tensors, numbers):
        return _backends.native._run(name, [*tensors[:6], _backends.native._pack(gradient), *tensors[7:]], numbers)

    plain = _backends.native.kernel(MULTI_SCALE, True)(grad, *args, [True] * 3)
    others = _backends.native.kernel(MULTI_SCALE, True, into_gradient)(grad, *args, [True] * 3)
    assert torch.equal(gradient.to(dtype), plain[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], others[1:], strict=True))


@pytest.mark.parametrize("axis", [1, 2])
def test_heads_do_not_go_together_where_value_lies_backwards(axis):
    """In C alone: torch has no negative strides."""
    value, *others = with_window(1, 4, 64, 8, torch.float32)
    sizes, strides = list(value.shape), list(value.stride())
    last = value.data_ptr() + 4 * (sizes[axis] - 1) * strides[axis]
    strides[axis] = -strides[axis]
    backwards = _backends.native._PACK[4](last, 0, *sizes, *strides)
    others[-1] = others[-1].unflatten(-1, (1, 4))
    packed = [backwards, *map(_backends.native._pack, others), _backends.native._pack(torch.empty(1, 1, 4, 64))]
    text = ctypes.create_string_buffer(1024)
    pointers = (ctypes.c_char_p * len(packed))(*packed)
    assert _backends.native.loaded().mxd_describe_plan(GEOMETRIC_LOGITS.encode(), pointers, 1, text, len(text)) == 0
    assert b"heads_together: 0" in text.value
