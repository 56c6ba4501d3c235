"""The native kernels say how they do a call. Every way runs with every number of threads, and gives the same bits."""

from __future__ import annotations

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
from cases import AGGREGATION, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS, wanted_implementations
from torch import Tensor
from values import covering

import mx_driving
from mx_driving import _backends

NATIVE = [name for name in wanted_implementations() if name.startswith("native")]
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
    """A call, and for each of THREADS: the way to the gradient of value with all gradients wanted, in float32 and float64; the
    number of bands in 16 bits; how many levels of value the forward packs, and how many of the gradient of value are packed
    where that is wanted alone. One pass packs all levels of both or none, and is taken in 16 bits where it packs them. A
    window's heads go together, all of them or none in the forward, and in one pass some.
    """

    operator: str
    make: Callable[[], tuple[Tensor, ...]]
    ways: tuple[str, ...]
    bands_of_16_bits: tuple[int, ...]
    packed_value: tuple[int, ...] = (0,) * 5
    packed_gradient: tuple[int, ...] = (0,) * 5
    one_pass_packs: bool = False
    packed_is_near: bool = True
    heads_of_forward: int = 0
    heads_of_one_pass: tuple[int, ...] = (0,) * 5


SAMPLES, HEADS = "WITH_SAMPLES", "BY_HEADS"
ALL_SAMPLES, ALL_BUT_24 = (SAMPLES,) * 5, (1, 1, 1, 1, 3)
LOGITS = [(23, 31), (11, 17), (6, 7)]
ROWS = {
    "few queries": Row(
        MULTI_SCALE, lambda: cases.multi_scale(1, 30, 16, 8, PYRAMID, 4),
        (*[SAMPLES] * 4, parts(3)), ALL_BUT_24, packed_gradient=(1, 1, 1, 1, 0),
    ),
    "many queries": Row(  # a row of the first level is read 6 times
        MULTI_SCALE, lambda: cases.multi_scale(1, MANY, 8, 8, [(96, 80), *PYRAMID[1:]], 1),
        (*[HEADS] * 4, *bands(3)), ALL_BUT_24, packed_value=(2, 2, 2, 2, 2), packed_gradient=(2, 2, 2, 2, 0),
    ),
    "3 batches": Row(
        MULTI_SCALE, lambda: cases.multi_scale(3, 1600, 8, 8, PYRAMID, 4),
        (HEADS, HEADS, HEADS, SAMPLES, SAMPLES), (1,) * 5, packed_value=(3, 3, 3, 0, 0), packed_gradient=(3,) * 5,
    ),
    "rows of no level": Row(  # bands of 16 bits: three of each level, and one of the rest
        MULTI_SCALE, lambda: with_rows_of_no_level(cases.multi_scale(1, 520, 8, 8, PYRAMID[1:], 4)),
        (HEADS, SAMPLES, SAMPLES, SAMPLES, parts(2)), (1, 1, 1, 1, 7),
        packed_value=(2, 0, 0, 0, 0), packed_gradient=(2, 2, 2, 2, 0),
    ),
    "2 heads, 4 points": Row(
        MULTI_SCALE, lambda: cases.multi_scale(1, 300, 64, 2, PYRAMID, 4),
        (SAMPLES, SAMPLES, parts(3), parts(3), *bands(12)), (1, 1, 3, 3, 12), packed_gradient=(2, 2, 0, 0, 0),
    ),
    "2 heads, 3 points": Row(  # a level begins inside a group of ROWS samples, so levels cannot be parts
        MULTI_SCALE, lambda: cases.multi_scale(1, 300, 40, 2, PYRAMID, 3),
        (SAMPLES, SAMPLES, *bands(3, 3, 12)), (1, 1, 3, 3, 12), packed_gradient=(2, 2, 0, 0, 0),
    ),
    "2 heads, one level": Row(
        MULTI_SCALE, lambda: cases.multi_scale(1, 300, 64, 2, PYRAMID[:1], 4),
        (SAMPLES, SAMPLES, *bands(3, 4, 12)), (1, 1, 3, 4, 12),
    ),
    "few queries with logits": Row(
        MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 30, 16, 8, LOGITS, 4),
        (*[SAMPLES] * 4, parts(3)), ALL_BUT_24, packed_gradient=(1, 1, 1, 1, 0),
    ),
    "many queries with logits": Row(
        MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 8 * 512, 8, 8, LOGITS, 1),
        (*[HEADS] * 4, *bands(3)), ALL_BUT_24, packed_value=(3, 3, 3, 3, 0), packed_gradient=(3, 3, 3, 3, 0),
    ),
    "3 points with logits": Row(
        MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 300, 40, 2, LOGITS, 3),
        (SAMPLES, SAMPLES, *bands(3, 3, 12)), (1, 1, 3, 3, 12), packed_gradient=(2, 2, 0, 0, 0),
    ),
    "68 samples with logits": Row(
        MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 20, 8, 1, [*LOGITS, (3, 5)], 17),
        (SAMPLES, *bands(4, 4, 8, 24)), (1, 4, 4, 8, 24),
    ),
    "nearest": Row(
        GEOMETRIC, lambda: cases.geometric(3, MANY // 2, 26, 8, [(6, 8)], 4),
        ALL_SAMPLES, (1,) * 5, packed_value=(1, 1, 1, 1, 0), packed_gradient=(1,) * 5, one_pass_packs=True,
    ),
    "nearest, 3 points": Row(  # on two levels
        GEOMETRIC, lambda: cases.geometric(2, 300, 42, 12, [(7, 9), (3, 5)], 3),
        ALL_SAMPLES, (1,) * 5, packed_gradient=(2,) * 5, one_pass_packs=True,
    ),
    "nearest, 2 heads": Row(
        GEOMETRIC, lambda: cases.geometric(1, 300, 64, 2, PYRAMID, 4),
        (SAMPLES, SAMPLES, parts(3), parts(3), *bands(12)), (1, 1, 3, 3, 12), packed_gradient=(1, 1, 0, 0, 0),
    ),
    "window": Row(
        GEOMETRIC_LOGITS, lambda: logits_cases.geometric(2, 400, 8, 8, [(6, 7)], (2, 2)),
        (*[SAMPLES] * 4, *bands(3)), ALL_BUT_24, packed_gradient=(1, 1, 1, 1, 0), one_pass_packs=True,
        heads_of_forward=8, heads_of_one_pass=(4, 4, 2, 2, 0),
    ),
    "window, 3 heads": Row(
        GEOMETRIC_LOGITS, lambda: logits_cases.geometric(2, 160, 26, 3, [(15, 9), (5, 7)], (3, 3)),
        (*[SAMPLES] * 4, *bands(4)), (1, 1, 1, 1, 4), packed_gradient=(2, 2, 2, 2, 0), one_pass_packs=True,
        heads_of_forward=3, heads_of_one_pass=(1, 1, 1, 1, 0),
    ),
    "window, large map": Row(  # 1.3 MB in 16 bits
        GEOMETRIC_LOGITS, lambda: logits_cases.geometric(1, MANY, 16, 4, [(129, 79)], (3, 3)),
        (SAMPLES, SAMPLES, SAMPLES, *bands(2, 6)), (1, 1, 1, 2, 6),
        packed_value=(1,) * 5, packed_gradient=(1, 1, 1, 0, 0), packed_is_near=False,
    ),
    "cameras": Row(
        AGGREGATION, lambda: cases.aggregation(2, 60, 13, 64, 8, [[(16, 22), (8, 11)]] * 3),
        bands(1, 1, 1, 6, 12), (1, 1, 1, 6, 12),
    ),
}  # fmt: skip


def levels(text: str) -> int:
    return 0 if text == "none" else int(text.split(" of ")[0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_plans(every_thread, name, dtype):
    """For each number of threads, the way that is expected is the way that is taken."""
    row = ROWS[name]
    args = cases.cast(row.make(), dtype)
    others = len(cases.DIFFERENTIABLE[row.operator]) - 1
    is_wide = dtype in (torch.float32, torch.float64)
    for i, threads in enumerate(THREADS):
        torch.set_num_threads(threads)
        buffered = bands(row.bands_of_16_bits[i], end=", buffered")[0]
        way = row.ways[i] if is_wide or (row.ways[i] == SAMPLES and row.one_pass_packs) else buffered
        forward = _backends.native.describe_plan(row.operator, args)
        all_gradients = _backends.native.describe_plan(row.operator, args, [True] * (1 + others))
        of_value = _backends.native.describe_plan(row.operator, args, [True] + [False] * others)
        of_samples = _backends.native.describe_plan(row.operator, args, [False] + [True] * others)
        assert {plan["threads"] for plan in (forward, all_gradients, of_value, of_samples)} == {str(threads)}
        assert levels(forward["packed_value"]) == row.packed_value[i]
        packed, number = row.packed_value[i], args[1].shape[0]
        far = number - packed if row.packed_is_near else number
        assert forward["prefetched_rows"] == ("all" if packed == 0 else f"{far} of {number} levels" if far else "none")
        assert all_gradients["value_gradient"] == way
        assert all_gradients["sample_gradients"] == ("WITH_VALUE" if way == SAMPLES else "ALONE")
        assert levels(all_gradients["packed_value"]) == (0 if way == SAMPLES else row.packed_value[i])
        if way == SAMPLES:
            assert levels(all_gradients["packed_gradient"]) == (number if row.one_pass_packs else 0)
        if row.operator == GEOMETRIC_LOGITS:
            together = [plan["heads_together"] for plan in (forward, all_gradients, of_value, of_samples)]
            assert together == [str(row.heads_of_forward), str(row.heads_of_one_pass[i] if way == SAMPLES else 0), "0", "0"]
        assert of_value["value_gradient"] == (buffered if not is_wide else HEADS if way == SAMPLES else way)
        assert of_value["sample_gradients"] == "NOT_WANTED"
        assert levels(of_value["packed_gradient"]) == (row.packed_gradient[i] if is_wide else 0)
        assert (of_samples["value_gradient"], of_samples["sample_gradients"]) == ("NOT_WANTED", "ALONE")


def test_every_way_is_in_the_table():
    declared = re.search(r"enum class ValueGradient \{(.*?)\};", PLAN.read_text(), re.DOTALL)
    assert declared
    names = set(re.findall(r"^    (\w+),", declared.group(1), re.MULTILINE))
    taken = {way.split(",")[0] for row in ROWS.values() for way in row.ways}
    assert names == taken | {"NOT_WANTED", HEADS}
    packed = [row for row in ROWS.values() if any(row.packed_value)]
    assert all(any(row.packed_value[i] for row in packed) for i in range(len(THREADS)))
    assert all(any(row.packed_gradient[i] for row in ROWS.values()) for i in range(len(THREADS)))
    assert {n for row in ROWS.values() for n in row.heads_of_one_pass} == {0, 1, 2, 4}


@pytest.mark.parametrize(("side", "kilobytes", "in_16_bits", "of_samples"), [(20, 25, 25, 12), (68, 289, 144, 144)])
def test_rows_that_all_stay_near_are_widened_when_they_are_packed(side, kilobytes, in_16_bits, of_samples):
    """In the forward alone. Rows of the larger map stay near in 16 bits only."""
    torch.set_num_threads(1)
    args = cases.geometric(1, 12000, 16, 2, [(side, side)], 4)
    for dtype, of_forward, of_backward in (
        (torch.float32, kilobytes, kilobytes),
        (torch.bfloat16, in_16_bits, of_samples),
        (torch.float16, in_16_bits, of_samples),
    ):
        inputs = cases.cast(args, dtype)
        plans = (
            _backends.native.describe_plan(GEOMETRIC, inputs),
            _backends.native.describe_plan(GEOMETRIC, inputs, [False, True]),
        )
        assert [plan["packed_value"] for plan in plans] == [f"1 of 1 levels, {n} KB" for n in (of_forward, of_backward)]


@pytest.mark.parametrize("implementation", NATIVE, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_rows_widened_once_give_the_same_bits(implementation, dtype):
    """Few queries leave rows as they are."""
    args = cases.cast(logits_cases.geometric(2, 400, 58, 3, [(15, 9), (5, 7)], (3, 3)), dtype)
    value, shapes, starts, reference, points, logits = args
    few = value, shapes, starts, reference[:, :5], points, logits[:, :5]
    assert [_backends.native.describe_plan(GEOMETRIC_LOGITS, inputs)["heads_together"] for inputs in (args, few)] == ["3", "0"]
    op = mx_driving.geometric_kernel_attention_with_logits
    assert torch.equal(op(*args)[:, :5], op(*few))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_of_an_expanded_value_are_not_widened(axis, dtype):
    """They would take the memory that value has not, 2.5 MB here."""
    value, *others = cases.cast(logits_cases.geometric(1, 3000, 16, 16, [(30, 81)], (1, 1)), dtype)
    args = value.narrow(axis, 0, 1).contiguous().expand_as(value), *others
    assert _backends.native.describe_plan(GEOMETRIC_LOGITS, args)["heads_together"] == ("16" if dtype == torch.float32 else "0")
    assert torch.equal(
        mx_driving.geometric_kernel_attention_with_logits(*args),
        mx_driving.geometric_kernel_attention_with_logits(args[0].contiguous(), *others),
    )


@functools.cache
def narrow_inputs_and_truth(name: str, narrow: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor, truth.Truth]:
    operator = ROWS[name].operator
    args = cases.cast(ROWS[name].make(), narrow)
    grad = cases.grad_for(operator, args).to(narrow)
    return args, grad, cases.truth_of(operator, args, grad)


def inputs_and_truth(name: str, dtype: torch.dtype) -> tuple[tuple[Tensor, ...], Tensor, truth.Truth]:
    """Numbers of 16 bits, so that float32, float64 and float16 share one truth. test_values.py has float32's own."""
    args, grad, true = narrow_inputs_and_truth(name, torch.bfloat16 if dtype == torch.bfloat16 else torch.float16)
    return cases.cast(args, dtype), grad.to(dtype), true


@covering("name", [*ROWS], DTYPES, start="native")
def test_every_way_gives_the_same_bits_near_the_truth(implementation, every_thread, name, dtype):
    """Also the gradient of value alone, which may take another way than with the others."""
    row = ROWS[name]
    args, grad, true = inputs_and_truth(name, dtype)
    others = len(cases.DIFFERENTIABLE[row.operator]) - 1
    first: list[Tensor] = []
    for threads in THREADS:
        torch.set_num_threads(threads)
        found = [getattr(mx_driving, row.operator)(*args), *cases.gradients_of(implementation, row.operator, grad, args)]
        alone = cases.gradients_of(implementation, row.operator, grad, args, [True] + [False] * others)[0]
        assert torch.equal(alone, found[1])
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    cases.assert_near(true, row.operator, args, first)


INTO = [
    *((dtype, into) for dtype in (torch.float32, torch.float64) for into in DTYPES),
    *((dtype, into) for dtype in (torch.float16, torch.bfloat16) for into in (dtype, torch.float32)),
]


@pytest.mark.parametrize(("dtype", "into"), INTO, ids=str)
@pytest.mark.parametrize("name", ["nearest, 3 points", "window, 3 heads"])
def test_one_packed_pass_writes_a_gradient_of_any_dtype_and_layout(every_thread, name, dtype, into):
    """In C the gradient of value may be of another dtype than value, and have gaps. It is rounded once."""
    args, grad, _ = inputs_and_truth(name, dtype)
    operator, place = ROWS[name].operator, 1 + len(args)  # behind the gradient of the output and the inputs
    bs, keys, heads, channels = args[0].shape
    memory = torch.full((bs, channels, keys, heads + 1), 7.0, dtype=into)
    gradient = memory.permute(0, 2, 3, 1)[:, :, :heads]

    def into_gradient(name, tensors, numbers):
        given = [*tensors[:place], _backends.native._pack(gradient), *tensors[place + 1 :]]
        return _backends.native._run(name, given, numbers)

    torch.set_num_threads(2)
    mask = [True] * len(cases.DIFFERENTIABLE[operator])
    plain = _backends.native.kernel(operator, True)(grad, *args, mask)
    others = _backends.native.kernel(operator, True, into_gradient)(grad, *args, mask)
    if dtype in (torch.float32, torch.float64):
        assert torch.equal(gradient, plain[0].to(into))
    else:
        assert torch.equal(gradient.to(dtype), plain[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1:], others[1:], strict=True))
    assert (memory[..., heads] == 7).all()


@pytest.mark.parametrize(
    ("name", "status"),
    [(b"multi_scale_deformable_attn", 0), (b"multi_scale", 5), (b"deformable_aggregation_forward", 5), (b"", 5)],
)
def test_a_name_that_no_function_has(name, status):
    args = cases.cast(ROWS["few queries"].make(), torch.float32)
    packed = [*map(_backends.native._pack, args), _backends.native._pack(torch.empty(1, 30, 8, 16))]
    pointers = (ctypes.c_char_p * len(packed))(*packed)
    text = ctypes.create_string_buffer(b"?" * 16)
    assert _backends.native.loaded().mxd_describe_plan(name, pointers, 1, text, 9) == status
    assert text.raw[:10] == (b"threads:\0?" if status == 0 else b"?" * 10)


def test_a_plan_of_levels_that_do_not_fit(every_thread):
    value, shapes, starts, *rest = cases.cast(ROWS["few queries"].make(), torch.float32)
    with pytest.raises(ValueError, match="must leave room for 216 x 288 rows among 1008"):
        _backends.native.describe_plan(MULTI_SCALE, (value, shapes * 9, starts, *rest))
