"""How far apart two results are: entries that are not finite, empty tensors, scales, dtypes and ties."""

import math

import numpy as np
import pytest
import torch

from mx_driving._agreement import difference_beside_ties, model_difference, output_difference, queries_off
from mx_driving.onnx._running import _difference

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
    for rounding in (1, 1 + 1e-6):
        assert queries_off({"boxes": ours * rounding}, {"boxes": theirs}).tolist() == [False, True, True]
    assert difference_beside_ties({"boxes": ours}, {"boxes": theirs}) == (0.0, 2)
    assert difference_beside_ties({"boxes": theirs + 10}, {"boxes": theirs}) == (INF, 3)


def test_a_query_of_nan_is_no_tie():
    theirs = torch.ones(1, 3, 2)
    ours = theirs.clone()
    ours[0, 1, 0] = NAN
    assert difference_beside_ties({"boxes": ours}, {"boxes": theirs}) == (INF, 0)


@pytest.mark.parametrize("value", [0.0, INF])
def test_outputs_without_a_finite_scale(value):
    outputs = {"boxes": torch.full((1, 3, 2), value)}
    assert difference_beside_ties(outputs, outputs) == (0.0, 0)
