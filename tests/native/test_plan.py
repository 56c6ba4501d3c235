"""A plan says how the native kernels compute a call. ROWS has all ways, which give the same bits for any number of threads.
BOUNDS has the sizes at which a plan changes."""

import ctypes
import functools
import pathlib
import re
from collections.abc import Callable
from typing import NamedTuple

import cases
import logits_cases
import pytest
import torch
import truth
from cases import AGGREGATION, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from plans import describe_plan as plan_of
from torch import Tensor
from values import covering, natively

import mx_driving
from mx_driving import _backends

PLAN = pathlib.Path(__file__).parents[2] / "native" / "src" / "call" / "plan.h"
THREADS = (1, 2, 3, 8, 24)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
PYRAMID = [(24, 32), (12, 16), (6, 8)]
MANY = 24 * 512  # queries: 24 threads pack levels for 512 each


def parts(number: int) -> str:
    return f"BY_PARTS, {number} a head"


def bands(*numbers: int, end: str = "") -> tuple[str, ...]:
    return tuple(f"BY_BANDS, {number}{end}" for number in numbers)


def with_rows_of_no_level(args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    value, *rest = args
    return torch.cat([value, value[:, :5]], 1), *rest


class Row(NamedTuple):
    """A call, and for each of THREADS the way to the gradient of value with all gradients wanted: in float32 and float64, and
    the number of bands in 16 bits, 0 where a worker owns whole heads. One pass that packs all levels of value and gradient
    serves every dtype.
    """

    operator: str
    make: Callable[[], tuple[Tensor, ...]]
    ways: tuple[str, ...]
    bands_of_16_bits: tuple[int, ...]
    one_pass_packs: bool = False


SAMPLES, HEADS = "WITH_SAMPLES", "BY_HEADS"
ALL_SAMPLES, ALL_BUT_24 = (SAMPLES,) * 5, (0, 0, 0, 0, 3)
LOGITS = [(23, 31), (11, 17), (6, 7)]
ROWS = {
    "few queries": Row(MULTI_SCALE, lambda: cases.multi_scale(1, 30, 16, 8, PYRAMID, 4),
        (*[SAMPLES] * 4, parts(3)), ALL_BUT_24),
    # a row of the first level is read 6 times
    "many queries": Row(MULTI_SCALE, lambda: cases.multi_scale(1, MANY, 8, 8, [(96, 80), *PYRAMID[1:]], 1),
        (*[HEADS] * 4, *bands(3)), ALL_BUT_24),
    "3 batches": Row(MULTI_SCALE, lambda: cases.multi_scale(3, 1600, 8, 8, PYRAMID, 4),
        (HEADS, HEADS, HEADS, SAMPLES, SAMPLES), (0,) * 5),
    # bands of 16 bits: three of each level, and one of the rest
    "rows of no level": Row(MULTI_SCALE, lambda: with_rows_of_no_level(cases.multi_scale(1, 520, 8, 8, PYRAMID[1:], 4)),
        (HEADS, SAMPLES, SAMPLES, SAMPLES, parts(2)), (1, 1, 1, 1, 7)),
    "2 heads, 4 points": Row(MULTI_SCALE, lambda: cases.multi_scale(1, 300, 64, 2, PYRAMID, 4),
        (SAMPLES, SAMPLES, parts(3), parts(3), *bands(12)), (0, 0, 3, 3, 12)),
    # a level begins inside a group of ROWS samples, so levels cannot be parts
    "2 heads, 3 points": Row(MULTI_SCALE, lambda: cases.multi_scale(1, 300, 40, 2, PYRAMID, 3),
        (SAMPLES, SAMPLES, *bands(3, 3, 12)), (0, 0, 3, 3, 12)),
    "2 heads, one level": Row(MULTI_SCALE, lambda: cases.multi_scale(1, 300, 64, 2, PYRAMID[:1], 4),
        (SAMPLES, SAMPLES, *bands(3, 4, 12)), (0, 0, 3, 4, 12)),
    "few queries with logits": Row(MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 30, 16, 8, LOGITS, 4),
        (*[SAMPLES] * 4, parts(3)), ALL_BUT_24),
    "many queries with logits": Row(MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 8 * 512, 8, 8, LOGITS, 1),
        (*[HEADS] * 4, *bands(3)), ALL_BUT_24),
    "3 points with logits": Row(MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 300, 40, 2, LOGITS, 3),
        (SAMPLES, SAMPLES, *bands(3, 3, 12)), (0, 0, 3, 3, 12)),
    "68 samples with logits": Row(MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 20, 8, 1, [*LOGITS, (3, 5)], 17),
        (SAMPLES, *bands(4, 4, 8, 24)), (0, 4, 4, 8, 24)),
    "nearest": Row(GEOMETRIC, lambda: cases.geometric(3, MANY // 2, 26, 8, [(6, 8)], 4),
        ALL_SAMPLES, (0,) * 5, one_pass_packs=True),
    # two levels
    "nearest, 3 points": Row(GEOMETRIC, lambda: cases.geometric(2, 300, 42, 12, [(7, 9), (3, 5)], 3),
        ALL_SAMPLES, (0,) * 5, one_pass_packs=True),
    "nearest, 2 heads": Row(GEOMETRIC, lambda: cases.geometric(1, 300, 64, 2, PYRAMID, 4),
        (SAMPLES, SAMPLES, parts(3), parts(3), *bands(12)), (0, 0, 3, 3, 12)),
    "window": Row(GEOMETRIC_LOGITS, lambda: logits_cases.geometric(2, 400, 8, 8, [(6, 7)], (2, 2)),
        (*[SAMPLES] * 4, *bands(3)), ALL_BUT_24, one_pass_packs=True),
    "window, 3 heads": Row(GEOMETRIC_LOGITS, lambda: logits_cases.geometric(2, 160, 26, 3, [(15, 9), (5, 7)], (3, 3)),
        (*[SAMPLES] * 4, *bands(4)), (0, 0, 0, 0, 4), one_pass_packs=True),
    # 1.3 MB in 16 bits
    "window, large map": Row(GEOMETRIC_LOGITS, lambda: logits_cases.geometric(1, MANY, 16, 4, [(129, 79)], (3, 3)),
        (SAMPLES, SAMPLES, SAMPLES, *bands(2, 6)), (0, 0, 0, 2, 6)),
    "cameras": Row(AGGREGATION, lambda: cases.aggregation(2, 60, 13, 64, 8, [[(16, 22), (8, 11)]] * 3),
        bands(1, 1, 1, 6, 12), (1, 1, 1, 6, 12)),
}  # fmt: skip


def attention(queries, heads, channels, sizes, points, dtype=torch.float32) -> tuple[Tensor, ...]:
    """Return inputs without numbers, because a plan reads shapes alone."""
    shapes, starts = cases.levels_of(*sizes)
    value = torch.empty(1, int(shapes.prod(-1).sum()), heads, channels, dtype=dtype)
    samples = (1, queries, heads, len(sizes), points)
    return value, shapes, starts, torch.empty(*samples, 2, dtype=dtype), torch.empty(samples, dtype=dtype)


def moved(args: tuple[Tensor, ...], by: list[int]) -> tuple[Tensor, ...]:
    """Move the first rows of levels."""
    return *args[:2], args[2] + torch.tensor(by), *args[3:]


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
OF_SAMPLES = lambda n: [False] + [True] * (n - 1)  # noqa: E731
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
    (GEOMETRIC, lambda: attention(16384, 2, 64, [(32, 32)], 4, BF16), 1, OF_SAMPLES, "packed_value", f"{ONE}, 128 KB"),
    # the gradients of samples read rows of 16 bits widened, where those of all levels have 15.5 MB at most
    (MULTI_SCALE, lambda: attention(31744, 2, 64, [(248, 256)], 4, BF16), 1, OF_SAMPLES, "packed_value", f"{ONE}, 15872 KB"),
    (MULTI_SCALE, lambda: attention(31872, 2, 64, [(249, 256)], 4, BF16), 1, OF_SAMPLES, "packed_value", f"{ONE}, 7968 KB"),
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
    (GEOMETRIC, lambda: with_rows_of_no_level(attention(8192, 2, 64, [(8, 16)], 4)), 1, OF_ALL, "packed_gradient", NONE),
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
    *((AGGREGATION, lambda r=r: tall(r), 1, OF_VALUE, WAY, f"BY_BANDS, {n}") for r, n in ((7, 1), (8, 1), (9, 2), (17, 3))),
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_the_way_to_the_gradient_of_value(every_thread, name, dtype):
    """For each number of threads: with all gradients, alone, and masked."""
    row = ROWS[name]
    args, others = cases.cast(row.make(), dtype), len(cases.DIFFERENTIABLE[row.operator]) - 1
    is_wide = dtype in (torch.float32, torch.float64)
    for threads, wide_way, number in zip(THREADS, row.ways, row.bands_of_16_bits, strict=True):
        torch.set_num_threads(threads)
        buffered = f"BY_BANDS, {number}, buffered" if number else HEADS
        way = wide_way if is_wide or (wide_way == SAMPLES and row.one_pass_packs) else buffered
        alone = buffered if not is_wide else HEADS if way == SAMPLES else way
        for mask, decisions in (
            ([True] * (1 + others), (way, "WITH_VALUE" if way == SAMPLES else "ALONE")),
            ([True] + [False] * others, (alone, "NOT_WANTED")),
            ([False] + [True] * others, ("NOT_WANTED", "ALONE")),
        ):
            plan = plan_of(row.operator, args, mask)
            assert (plan["value_gradient"], plan["sample_gradients"], plan["threads"]) == (*decisions, str(threads))


def test_every_way_is_in_the_table(every_thread):
    """So the test of bits below runs every way."""
    declared = re.search(r"enum class ValueGradient \{(.*?)\};", PLAN.read_text(), re.DOTALL)
    assert declared
    names = set(re.findall(r"^    (\w+),", declared.group(1), re.MULTILINE))
    assert names == {way.split(",")[0] for row in ROWS.values() for way in row.ways} | {"NOT_WANTED", HEADS}
    rows = [(row.operator, row.make(), len(cases.DIFFERENTIABLE[row.operator])) for row in ROWS.values()]
    decisions: set[tuple[str, str]] = set()
    for threads in THREADS:
        torch.set_num_threads(threads)
        masks = (FORWARD, OF_VALUE, OF_ALL)
        plans = [plan_of(operator, args, mask and mask(n)) for operator, args, n in rows for mask in masks]
        decisions |= {decision for plan in plans for decision in plan.items()}
        assert any(plan["packed_value"] != NONE for plan in plans)
        assert any(plan.get("packed_gradient", NONE) != NONE and plan[WAY] == SAMPLES for plan in plans)
    assert decisions >= {("prefetched_rows", rows) for rows in ("all", "none", "1 of 1 levels")}
    assert decisions >= {("heads_together", heads) for heads in "012348"}


@pytest.mark.parametrize("row", BOUNDS, ids=[f"{number} {row[4]}" for number, row in enumerate(BOUNDS)])
def test_a_plan_at_a_bound_and_beyond_it(every_thread, row):
    operator, make, threads, mask, decision, text = row
    torch.set_num_threads(threads)
    plan = plan_of(operator, make(), mask and mask(len(cases.DIFFERENTIABLE[operator])))
    assert plan[decision] == text or (text == "1 of 1" and plan[decision].startswith("1 of 1 levels"))


@natively
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_widened_once_give_the_same_bits(implementation, dtype):
    """Few queries leave rows as they are."""
    args = cases.cast(logits_cases.geometric(2, 400, 58, 3, [(15, 9), (5, 7)], (3, 3)), dtype)
    value, shapes, starts, reference, points, logits = args
    few = value, shapes, starts, reference[:, :5], points, logits[:, :5]
    assert [plan_of(GEOMETRIC_LOGITS, inputs)["heads_together"] for inputs in (args, few)] == ["3", "0"]
    op = mx_driving.geometric_kernel_attention_with_logits
    assert torch.equal(op(*args)[:, :5], op(*few))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_an_expanded_value_are_not_widened(axis, dtype):
    """Widened rows would take 2.5 MB, while an expanded value takes almost no memory."""
    value, *others = cases.cast(logits_cases.geometric(1, 3000, 16, 16, [(30, 81)], (1, 1)), dtype)
    args = value.narrow(axis, 0, 1).contiguous().expand_as(value), *others
    assert plan_of(GEOMETRIC_LOGITS, args)["heads_together"] == ("16" if dtype == torch.float32 else "0")
    contiguous = mx_driving.geometric_kernel_attention_with_logits(args[0].contiguous(), *others)
    assert torch.equal(mx_driving.geometric_kernel_attention_with_logits(*args), contiguous)


@functools.cache
def narrow_inputs_and_truth(name: str, narrow: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor, truth.Truth]:
    operator = ROWS[name].operator
    args = cases.cast(ROWS[name].make(), narrow)
    grad = cases.grad_for(operator, args).to(narrow)
    return args, grad, cases.truth_of(operator, args, grad)


def inputs_and_truth(name: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor, truth.Truth]:
    """Return numbers that float16 holds, so that float32, float64 and float16 share one truth."""
    args, grad, true = narrow_inputs_and_truth(name, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    return cases.cast(args, dtype), grad.to(dtype), true


@covering("name", [*ROWS], DTYPES, start="native")
def test_every_way_gives_the_same_bits_near_the_truth(implementation, every_thread, name, dtype):
    """The gradient of value alone may take another way than together with other gradients. It has the same bits."""
    row = ROWS[name]
    args, grad, true = inputs_and_truth(name, dtype)
    others = len(cases.DIFFERENTIABLE[row.operator]) - 1
    first: list[Tensor] = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        results = [getattr(mx_driving, row.operator)(*args), *cases.gradients_of(implementation, row.operator, grad, args)]
        alone = cases.gradients_of(implementation, row.operator, grad, args, [True] + [False] * others)[0]
        assert torch.equal(alone, results[1])
        first = first or results
        assert all(torch.equal(a, b) for a, b in zip(first, results, strict=True))
    cases.assert_near(true, row.operator, args, first)


def backward_into(gradient: Tensor, operator: str, grad: Tensor, args: tuple[Tensor, ...], mask: list[bool]):
    """Run a backward as in C, where the gradient of value may be of another dtype than value, and have gaps."""
    index = 1 + len(args)  # behind the gradient of the output and the inputs

    def run(name, tensors, numbers):
        return _backends.native._run(name, [*tensors[:index], _backends.native._pack(gradient), *tensors[index + 1 :]], numbers)

    return _backends.native.Kernel(operator, True, run)(grad, *args, mask)


INTO = [
    *((dtype, into) for dtype in (torch.float32, torch.float64) for into in DTYPES),
    *((dtype, into) for dtype in (torch.float16, torch.bfloat16) for into in (dtype, torch.float32)),
]


@pytest.mark.parametrize(("dtype", "into"), INTO, ids=str)
@pytest.mark.parametrize("name", ["nearest, 3 points", "window, 3 heads"])
def test_one_packed_pass_writes_a_gradient_of_any_dtype_and_layout(every_thread, name, dtype, into):
    """The gradient is rounded once."""
    args, grad, _ = inputs_and_truth(name, dtype)
    operator = ROWS[name].operator
    bs, keys, heads, channels = args[0].shape
    memory = torch.full((bs, channels, keys, heads + 1), 7.0, dtype=into)
    gradient = memory.permute(0, 2, 3, 1)[:, :, :heads]
    torch.set_num_threads(2)
    mask = [True] * len(cases.DIFFERENTIABLE[operator])
    plain = _backends.native.Kernel(operator, True)(grad, *args, mask)
    others = backward_into(gradient, operator, grad, args, mask)
    if dtype in (torch.float32, torch.float64):
        assert torch.equal(gradient, plain[0].to(into))
    else:
        assert torch.equal(gradient.to(dtype), plain[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], others[1:], strict=True))
    assert (memory[..., heads] == 7).all()


@pytest.mark.parametrize("name", [b"multi_scale_deformable_attn", b"multi_scale", b"deformable_aggregation_forward", b""])
def test_a_name_that_no_function_has(name):
    status = 0 if name == b"multi_scale_deformable_attn" else 5
    args = cases.cast(ROWS["few queries"].make(), torch.float32)
    packed = [*map(_backends.native._pack, args), _backends.native._pack(torch.empty(1, 30, 8, 16))]
    pointers = (ctypes.c_char_p * len(packed))(*packed)
    text = ctypes.create_string_buffer(b"?" * 16)
    assert _backends.native.loaded().mxd_describe_plan(name, pointers, 1, text, 9) == status
    assert text.raw[:10] == (b"threads:\0?" if status == 0 else b"?" * 10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_gradient_in_float32_of_a_value_in_16_bits(dtype):
    """One pass needs value and its gradient in one dtype. This call must not take one pass."""
    args = cases.cast(cases.multi_scale(1, 30, 16, 8, [(6, 8)], 4), dtype)
    grad = cases.grad_for(MULTI_SCALE, args).to(dtype)
    gradient = torch.full(args[0].shape, 7.0)
    plain = _backends.native.Kernel(MULTI_SCALE, True)(grad, *args, [True] * 3)
    others = backward_into(gradient, MULTI_SCALE, grad, args, [True] * 3)
    assert torch.equal(gradient.to(dtype), plain[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], others[1:], strict=True))


@pytest.mark.parametrize("axis", [1, 2])
def test_heads_do_not_go_together_where_value_lies_backwards(axis):
    """Only a caller in C can pass negative strides."""
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
