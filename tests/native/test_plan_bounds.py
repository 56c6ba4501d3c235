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


def of_value(operator: str, args: tuple[Tensor, ...]) -> dict[str, str]:
    return plan_of(operator, args, [True] + [False] * (len(cases.DIFFERENTIABLE[operator]) - 1))


def of_all(operator: str, args: tuple[Tensor, ...]) -> dict[str, str]:
    return plan_of(operator, args, [True] * len(cases.DIFFERENTIABLE[operator]))


# 248 x 256 rows of 256 bytes are 15.5 MB.
@pytest.mark.parametrize(
    ("size", "queries", "packed"), [((248, 256), 31744, 1), ((248, 256), 31743, 0), ((255, 249), 99999, 0)]
)
def test_a_level_is_packed_up_to_a_size_and_where_its_rows_are_read_eight_times(size, queries, packed):
    args = attention(queries, 2, 64, [size], 4)
    assert plan_of(MULTI_SCALE, args)["packed_value"].startswith("1 of 1" if packed else "none")


@pytest.mark.parametrize(("queries", "packed"), [(3200, True), (3199, False), (1000, False)])
def test_a_nearest_sample_reads_one_row(queries, packed):
    args = attention(queries, 2, 16, [(20, 20)], 1)
    assert plan_of(GEOMETRIC, args)["packed_value"] == ("1 of 1 levels, 25 KB" if packed else "none")


@pytest.mark.parametrize(("height", "prefetched"), [(32, "none"), (33, "1 of 1 levels")])
def test_rows_are_near_up_to_256_kilobytes(height, prefetched):
    assert plan_of(MULTI_SCALE, attention(4096, 2, 64, [(height, 32)], 4))["prefetched_rows"] == prefetched


@pytest.mark.parametrize(("height", "kilobytes"), [(32, 256), (33, 132)])
def test_rows_are_packed_as_computed_up_to_256_kilobytes(height, kilobytes):
    args = attention(16384, 2, 64, [(height, 32)], 4, torch.bfloat16)
    assert plan_of(GEOMETRIC, args)["packed_value"] == f"1 of 1 levels, {kilobytes} KB"


def test_rows_that_lie_side_by_side_are_not_packed():
    """Those of one head."""
    assert plan_of(MULTI_SCALE, attention(4096, 1, 16, [(8, 8)], 4))["packed_value"] == "none"
    assert of_value(MULTI_SCALE, attention(4096, 1, 16, [(8, 8)], 4))["packed_gradient"] == "none"
    assert plan_of(MULTI_SCALE, attention(4096, 2, 16, [(8, 8)], 4))["packed_value"] == "1 of 1 levels, 4 KB"


@pytest.mark.parametrize("threads", [1, 3])
def test_each_thread_has_512_queries_where_levels_are_packed(threads):
    torch.set_num_threads(threads)
    for queries, packed in ((512 * threads, "1 of 1 levels, 4 KB"), (512 * threads - 1, "none")):
        assert plan_of(MULTI_SCALE, attention(queries, 2, 16, [(8, 8)], 4))["packed_value"] == packed


def test_packed_levels_begin_at_64_bytes():
    """90 levels of 9 rows of 20 bytes, 192 in place of 180: 16.9 KB."""
    args = attention(4096, 2, 5, [(3, 3)] * 90, 1)
    assert plan_of(MULTI_SCALE, args)["packed_value"] == "90 of 90 levels, 16 KB"


def test_overlapping_levels_are_not_packed_in_the_gradient():
    value, shapes, starts, *others = attention(4096, 2, 16, [(8, 8), (4, 4)], 4)
    assert of_value(MULTI_SCALE, (value, shapes, starts, *others))["packed_gradient"] == "2 of 2 levels, 5 KB"
    assert of_value(MULTI_SCALE, (value, shapes, starts - torch.tensor([0, 1]), *others))["packed_gradient"] == "none"


@pytest.mark.parametrize(("threads", "packed"), [(1, "1 of 1"), (2, "1 of 1"), (4, "none")])
def test_each_thread_has_its_own_packed_gradient(threads, packed):
    """5 MB, at most 15.5 MB together."""
    torch.set_num_threads(threads)
    plan = of_value(MULTI_SCALE, attention(24576, 8, 64, [(128, 160)], 4))
    assert plan["value_gradient"] == "BY_HEADS"
    assert plan["packed_gradient"].startswith(packed)


@pytest.mark.parametrize(("height", "packed"), [(32, "1 of 1 levels, 128 KB"), (33, "none")])
def test_one_pass_packs_up_to_128_kilobytes(height, packed):
    """Because value and gradient are near together."""
    plan = of_all(GEOMETRIC, attention(8192, 2, 64, [(height, 16)], 4))
    assert (plan["value_gradient"], plan["packed_gradient"]) == ("WITH_SAMPLES", packed)


def test_one_pass_does_not_pack_where_rows_belong_to_no_level():
    value, *others = attention(8192, 2, 64, [(8, 16)], 4)
    args = torch.cat([value, value[:, :1]], 1), *others
    assert of_all(GEOMETRIC, args)["packed_gradient"] == "none"
    assert of_all(GEOMETRIC, (value, *others))["packed_gradient"] == "1 of 1 levels, 32 KB"


@pytest.mark.parametrize(
    ("threads", "levels", "points", "way"),
    [
        (4, 5, 4, "BY_PARTS, 3 a head"),  # 5 parts take two rounds, as long as 3 in one
        (5, 5, 4, "BY_PARTS, 5 a head"),
        (4, 5, 3, "BY_BANDS, 5"),
        (3, 3, 4, "BY_PARTS, 3 a head"),
    ],
)
def test_of_cuts_that_take_as_long_the_first_is_chosen(threads, levels, points, way):
    torch.set_num_threads(threads)
    assert of_all(MULTI_SCALE, attention(300, 1, 16, [(4, 4)] * levels, points))["value_gradient"] == way


def test_levels_that_touch_do_not_overlap():
    torch.set_num_threads(3)
    value, shapes, starts, *others = attention(300, 1, 16, [(4, 4)] * 3, 4)
    assert of_all(MULTI_SCALE, (value, shapes, starts, *others))["value_gradient"] == "BY_PARTS, 3 a head"
    starts = starts - torch.tensor([0, 0, 1])
    assert of_all(MULTI_SCALE, (value, shapes, starts, *others))["value_gradient"] == "BY_BANDS, 5"


# Sums in float32: a row of half of 6 MB, and of all.
@pytest.mark.parametrize(("channels", "number"), [(3 * 2**18, 3), (3 * 2**19, 5), (3 * 2**20, 5), (2**19, 2)])
def test_a_buffered_band_has_6_megabytes_or_one_row(channels, number):
    args = attention(1, 1, channels, [(5, 1)], 1, torch.bfloat16)
    assert of_value(MULTI_SCALE, args)["value_gradient"] == f"BY_BANDS, {number}, buffered"


@pytest.mark.parametrize(("rows", "number"), [(7, 1), (8, 1), (9, 2), (17, 3)])
def test_a_band_of_an_aggregation_has_16_megabytes(rows, number):
    channels = 2**19
    value, shapes, starts = torch.empty(1, rows, channels), torch.tensor([[[rows, 1]]]), torch.tensor([[0]])
    args = value, shapes, starts, torch.empty(1, 1, 1, 1, 2), torch.empty(1, 1, 1, 1, 1, 1)
    assert of_value(AGGREGATION, args)["value_gradient"] == f"BY_BANDS, {number}"


def with_window(queries: int, heads: int, channels: int, side: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    value = torch.empty(1, side * side, heads, channels, dtype=dtype)
    shapes, starts = cases.levels_of((side, side))
    window, logits = torch.zeros(4, 2, dtype=torch.int64), torch.empty(1, queries, heads, 4, dtype=dtype)
    return value, shapes, starts, torch.empty(1, queries, heads, 2, dtype=dtype), window, logits


@pytest.mark.parametrize(
    ("side", "dtype", "queries", "together"),
    [
        (32, torch.float32, 1, 4),  # 1 MB
        (33, torch.float32, 1, 0),
        (32, torch.bfloat16, 256, 4),
        (32, torch.bfloat16, 255, 0),  # fewer samples than rows
    ],
)
def test_heads_go_together_where_value_is_near(side, dtype, queries, together):
    plan = plan_of(GEOMETRIC_LOGITS, with_window(queries, 4, 64, side, dtype))
    assert plan["heads_together"] == str(together)


@pytest.mark.parametrize(("side", "together"), [(8, 4), (11, 4), (12, 2), (16, 2), (17, 1), (22, 1)])
def test_heads_of_one_pass_are_near_together(side, together):
    """4 of 32 KB and 2 of 64 KB with the gradient's."""
    plan = of_all(GEOMETRIC_LOGITS, with_window(4096, 4, 64, side, torch.float32))
    assert (plan["value_gradient"], plan["heads_together"]) == ("WITH_SAMPLES", str(together))


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
