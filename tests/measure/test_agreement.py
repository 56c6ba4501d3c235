"""How far apart two results are: entries that are not finite, empty tensors, scales, dtypes, ties; and the limits."""

import math

import cases
import numpy as np
import pytest
import torch
import values
from small_cases import TINY

from mx_driving import _agreement
from mx_driving._agreement import difference_beside_ties, model_difference, output_difference
from mx_driving.onnx._outputs import _difference

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(
    ("ours", "theirs", "difference"),
    [
        ([NAN, 4.0], [NAN, 4.0], 0.0),
        ([NAN, 4.0], [1.0, 4.0], INF),
        ([1.0, 4.0], [NAN, 4.0], INF),
        ([INF, -INF, 3.0], [INF, -INF, 4.0], 0.25),
        ([INF, 4.0], [-INF, 4.0], INF),
        ([INF, 4.0], [1.0, 4.0], INF),
        ([], [], 0.0),
        ([0.0], [0.0], 0.0),
        ([1e-3], [0.0], INF),
        ([-60000.0], [60000.0], 2.0),  # the difference is no number of float16
    ],
)
def test_largest_difference(ours, theirs, difference, dtype):
    ours, theirs = torch.tensor(ours, dtype=dtype), torch.tensor(theirs, dtype=dtype)
    assert output_difference(ours, theirs) == difference
    assert model_difference({"output": ours}, {"output": theirs}) == difference


def test_shapes_that_broadcast_differ():
    assert output_difference(torch.ones(1, 2), torch.ones(3, 2)) == INF
    assert model_difference({"output": torch.ones(1, 2)}, {"output": torch.ones(3, 2)}) == INF
    wide, narrow = np.ones((1, 3, 4), np.float32), np.ones((1, 1, 4), np.float32)
    assert _difference([wide], [narrow]) == (INF, 0)
    assert _difference([wide], [wide[:, :0]]) == (INF, 0)


def test_the_largest_difference_is_that_of_all_outputs():
    theirs = {"a": torch.ones(2), "b": torch.tensor([1.0, -4.0])}
    assert model_difference({"a": torch.ones(2), "b": torch.tensor([1.0, -5.0])}, theirs) == 0.25
    assert model_difference({"a": torch.tensor([1.0, 0.5]), "b": theirs["b"]}, theirs) == 0.5


def test_least_scale():
    assert output_difference(torch.tensor([0.5]), torch.tensor([0.0]), least_scale=2.0) == 0.25
    assert output_difference(torch.tensor([0.0]), torch.tensor([8.0]), least_scale=2.0) == 1.0


def test_ties():
    theirs = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(1, 3, 2)
    ours = theirs[:, [0, 2, 1]]
    assert difference_beside_ties({"boxes": ours}, {"boxes": theirs}) == (0.0, 2)
    found, left_out = difference_beside_ties({"boxes": ours * (1 + 1e-6)}, {"boxes": theirs})
    assert (found, left_out) == (pytest.approx(1e-6), 2)
    assert difference_beside_ties({"boxes": theirs + 12}, {"boxes": theirs}) == (2.0, 0)
    both = {"boxes": torch.cat([ours, theirs])}
    assert difference_beside_ties(both, {"boxes": torch.cat([theirs, ours.flip(1)])}) == (pytest.approx(4 / 6), 2)


@pytest.mark.parametrize("number", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("query", [0, 1, 2])
def test_a_query_that_is_not_finite_is_no_tie(number, query):
    theirs = torch.ones(1, 3, 2)
    ours = theirs.clone()
    ours[0, query, 0] = number
    found, left_out = difference_beside_ties({"boxes": ours}, {"boxes": theirs})
    assert found >= 1e29
    assert left_out == 0


@pytest.mark.parametrize("value", [0.0, INF])
def test_outputs_without_a_finite_scale(value):
    outputs = {"boxes": torch.full((1, 3, 2), value)}
    assert difference_beside_ties(outputs, outputs) == (0.0, 0)


@pytest.mark.parametrize(
    ("ours", "other_output", "difference"),
    [
        (3e-3, 2000.0, 1.5e-3),  # a thousandth of 2000 is the scale
        (3e-3, 1.0, 3.0),  # 1e-3 is the scale: a thousandth of 1
        (1.5, 1000.0, 1.5),
    ],
)
def test_a_model_s_small_tensors_are_compared_with_a_thousandth_of_the_largest(ours, other_output, difference):
    theirs = {"small": torch.zeros(1), "large": torch.tensor([other_output])}
    found = model_difference({"small": torch.tensor([ours]), "large": theirs["large"]}, theirs)
    assert found == pytest.approx(difference)


@pytest.mark.parametrize(("difference", "left_out"), [(0.0099, 0), (0.0101, 1)])
def test_a_query_has_changed_beyond_a_thousandth_of_the_largest(difference, left_out):
    theirs = torch.full((1, 2, 1), 10.0, dtype=torch.float64)
    ours = theirs.clone()
    ours[0, 1] += difference
    assert difference_beside_ties({"boxes": ours}, {"boxes": theirs})[1] == left_out


@pytest.mark.parametrize(
    ("result", "compute", "magnitude", "scale", "terms", "extent", "limit"),
    [
        # 16 + 2 * sqrt(9) + 2 * 5 = 32 ulps of the scale
        (torch.float32, torch.float32, 7.0, 2.0, 9, 5, 32 * 2.0**-23 * 2),
        (torch.float64, torch.float64, 7.0, 2.0, 9, 5, 32 * 2.0**-52 * 2),
        # a product alone: 16 + 2 * sqrt(1)
        (torch.float32, torch.float32, 0.0, 1.0, 1, 0, 18 * 2.0**-23),
        # half an ulp of the result: 2.0 to 4.0 have one ulp, and a number just below 4.0 may be rounded as one above
        (torch.bfloat16, torch.float32, 3.0, 1.0, 1, 0, 18 * 2.0**-23 + 2 * 2.0**-8),
        (torch.bfloat16, torch.float32, 4.0 - 2.0**-22, 1.0, 1, 0, 18 * 2.0**-23 + 4 * 2.0**-8),
        (torch.float32, torch.float64, 3.0, 1.0, 1, 0, 18 * 2.0**-52 + 2 * 2.0**-24),
        (torch.float16, torch.float32, 3.0, 0.0, 1, 0, 2 * 2.0**-11),
        (torch.float16, torch.float32, 0.0, 0.0, 1, 0, 2.0**-25),  # of subnormal numbers
        # float64 becomes 16 bits through float32
        (torch.float16, torch.float64, 3.0, 0.0, 1, 0, 2 * 2.0**-11 + 3 * 2.0**-24),
    ],
)
def test_rounding_limit(result, compute, magnitude, scale, terms, extent, limit):
    """Computed by hand."""
    assert _agreement.rounding_limit(result, compute, magnitude, scale, terms, extent) == limit


# 1e-3 pixels in the units of locations. Locations of geometric_kernel_attention are pixels, which are cut to whole numbers: a
# location that is a whole number and moves down reads another pixel.
MOVED = {
    cases.MULTI_SCALE: lambda shapes: 1e-3 / shapes.flip(-1)[:, None],
    cases.AGGREGATION: lambda shapes: 1e-3 / shapes[:, 0].flip(-1),  # in pixels of the largest map of a camera
    cases.GEOMETRIC: lambda shapes: -1e-3,
}


def small_call(operator, dtype):
    args = TINY[operator]()
    locations = args[3].double()
    args = cases.cast((*args[:3], locations, *args[4:]) if operator in MOVED else args, dtype)
    return args, cases.grad_for(operator, args).to(dtype)


def assert_each_is_refused(operator, args, grad, results, changed):
    """The comparison of tests/helpers/cases.py with truth accepts `results`, but none of `changed` in its place."""
    true = cases.truth_of(operator, args, grad)
    cases.assert_near(true, operator, args, results)
    for place, result in enumerate(changed):
        with pytest.raises(AssertionError, match=f"^result {place}: .* times the allowed error"):
            cases.assert_near(true, operator, args, [*results[:place], result, *results[place + 1 :]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operator", cases.EVERY)
def test_a_factor_of_1_0001_is_found(operator, dtype):
    """In the output, and in each gradient."""
    args, grad = small_call(operator, dtype)
    results = values.run("native", operator, args, grad)
    assert_each_is_refused(operator, args, grad, results, [1.0001 * result for result in results])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_locations_off_by_a_thousandth_of_a_pixel_are_found(operator, dtype):
    """In the output, and in each gradient."""
    args, grad = small_call(operator, dtype)
    locations = (args[3].double() + MOVED[operator](args[1].double())).to(dtype)
    results = values.run("native", operator, args, grad)
    moved = values.run("native", operator, (*args[:3], locations, args[4]), grad)
    assert_each_is_refused(operator, args, grad, results, moved)
