"""geometric_kernel_attention: the pixel is clamp(trunc(location), 0, size - 1) for locations of any dtype, also on maps of more
pixels than float32 can count. Locations have no gradient."""

import cases
import pytest
import torch
from cases import GEOMETRIC
from small_cases import inputs_of
from values import covering, everywhere, run, skip_unless_every_kernel

import mx_driving
from mx_driving import _backends

NAN, INF = float("nan"), float("inf")

SIZE = (1 << 24) + 8  # size - 1 rounds up to size in float32
GUARD = 7777.0
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int32, torch.int64]
# float32 holds every second whole number above 2^24. PLACES has both neighbours of an odd number.
PLACES = [float("inf"), 1e38, 2.0**31, SIZE, SIZE - 1, SIZE - 2, SIZE - 3, 2**24 + 1, 2**24, 40000.75, 3, -1, float("nan")]


@pytest.fixture(scope="module")
def value():
    """One map of SIZE pixels that differ from their neighbours, and a row behind it that must not be read."""
    padded = torch.full((1, SIZE + 1, 1, 1), GUARD)
    padded[0, :-1, 0, 0] = torch.arange(SIZE) % 4096
    return padded[:, :-1]


def locations_of(dtype, axis, points):
    places = torch.tensor(PLACES, dtype=torch.float64)
    if not dtype.is_floating_point:
        bounds = torch.iinfo(dtype)
        places = torch.tensor([bounds.max, SIZE, SIZE - 1, SIZE - 2, 2**24 + 1, 2**24 + 3, 2**24, 3, -1, bounds.min])
    xy = torch.zeros(1, len(places), 1, 1, points, 2, dtype=dtype)
    xy[..., axis] = places.to(dtype).view(1, -1, 1, 1, 1)
    return xy


def pixels_of(locations, axis):
    """Return the expected pixels, computed with Python's integers, which do not overflow."""
    numbers = locations[0, :, 0, 0, 0, axis].tolist()
    return [int(min(max(x, 0), SIZE - 1)) if x == x else 0 for x in numbers]


def tables_of(axis):
    return torch.tensor([[1, SIZE] if axis == 0 else [SIZE, 1]]), torch.tensor([0])


@covering("axis", [0, 1], DTYPES)
def test_every_pixel_is_found(implementation, value, dtype, axis):
    """Numbers of points that fill vectors, and that do not; locations with strides of 1 and 2."""
    forward = cases.forward_of(implementation, GEOMETRIC)
    for points, apart in [(1, False), (3, True), (4, False), (8, True), (9, False)]:
        locations = locations_of(dtype, axis, points)
        expected = points * value[0, pixels_of(locations, axis), 0, 0]
        given = torch.stack([locations] * 2, -1)[..., 0] if apart else locations
        found = forward(value, *tables_of(axis), given, torch.ones(locations.shape[:-1]))
        assert torch.equal(found.flatten(), expected), (points, apart)


def last_pixels(size):
    """Return a map of one row, whose last four pixels are 1 to 4, with locations at its end and beyond."""
    value = torch.zeros(1, size, 1, 1, dtype=torch.float16)
    value[0, -4:] = torch.arange(1, 5).half().view(4, 1, 1)
    locations = torch.zeros(1, 4, 1, 1, 1, 2)
    locations[..., 0] = torch.tensor([float("inf"), 2.0**30, size + 100, size]).view(1, 4, 1, 1, 1)
    return value, torch.tensor([[1, size]]), torch.tensor([0]), locations, torch.ones(1, 4, 1, 1, 1)


@everywhere
@pytest.mark.parametrize("size", [2**26 + 3, 2**26 + 5], ids=["rounds down", "rounds up"])
def test_what_lies_beyond_the_map_goes_to_its_last_pixel(implementation, size):
    args = last_pixels(size)
    expected = torch.tensor([4, 4, 4, 4 if size % 8 == 5 else 2]).half()  # size is 2^26 in float32, or 2^26 + 8
    assert torch.equal(cases.forward_of(implementation, GEOMETRIC)(*args).flatten(), expected)


@covering("axis", [0, 1], DTYPES)
def test_gradients_reach_the_same_pixels(implementation, value, dtype, axis):
    locations = locations_of(dtype, axis, 3)
    expected = torch.zeros(SIZE)
    expected.index_add_(0, torch.tensor(pixels_of(locations, axis)), torch.full((locations.shape[1],), 3.0))
    grad, weights = torch.ones(1, locations.shape[1], 1), torch.ones(locations.shape[:-1])
    args = (value, *tables_of(axis), locations, weights)
    of_value, of_weights = cases.gradients_of(implementation, GEOMETRIC, grad, args)
    assert torch.equal(of_value.flatten(), expected)
    assert torch.equal(of_weights[0, :, 0, 0, 0], value[0, pixels_of(locations, axis), 0, 0])


@pytest.mark.skipif(_backends.native.why_not() is not None, reason=str(_backends.native.why_not()))
@pytest.mark.parametrize("axis", [0, 1], ids=["W", "H"])
@pytest.mark.parametrize("threads", [1, 64])
def test_the_c_interface_writes_no_row_behind_the_gradient(value, axis, threads):
    """One thread owns a head, 64 threads own bands. Calls by torch make the gradient themselves, so the test calls C."""
    locations = locations_of(torch.float32, axis, 3)
    weights = torch.ones(locations.shape[:-1])
    room = torch.full((1, SIZE + 2, 1, 1), GUARD)
    tensors = (torch.ones(1, locations.shape[1], 1, 1), value, *tables_of(axis), locations, weights, room[:, 1:-1])
    library = _backends.native.loaded()
    assert library.mxd_geometric_kernel_attention_backward(*map(_backends.native._pack, tensors), None, threads) == 0
    assert room[0, 0].item() == room[0, -1].item() == GUARD
    assert room[0, 1:-1].sum() == 3 * locations.shape[1]


# x on a map of four columns, and the expected column
FAR = [(NAN, 0), (-INF, 0), (INF, 3), (1e30, 3), (-1e30, 0), (2.9, 2), (-0.9, 0)]
COLUMNS = {
    torch.int64: [(2**62, 3), (-(2**62), 0), (2**31, 3), (-(2**31), 0), (3, 3), (-5, 0)],
    torch.uint8: [(0, 0), (1, 1), (3, 3), (200, 3), (255, 3)],
    **dict.fromkeys((torch.int32, torch.int16, torch.int8), ((1, 1), (3, 3), (127, 3), (-5, 0), (-128, 0))),
    torch.float16: [(NAN, 0), (-INF, 0), (INF, 3), (6e4, 3), (-6e4, 0), (2.9, 2), (-0.9, 0)],
    torch.float32: FAR,
    torch.float64: FAR,
    torch.bfloat16: FAR,
}


@everywhere
@pytest.mark.parametrize("dtype", COLUMNS, ids=str)
def test_geometric_clamps_before_it_converts(implementation, dtype):
    if dtype in (torch.int16, torch.int8, torch.float16):
        skip_unless_every_kernel(implementation)
    xs, columns = zip(*COLUMNS[dtype], strict=True)
    x = torch.tensor(xs, dtype=dtype)
    locations = torch.stack([x, torch.zeros_like(x)], -1).view(1, -1, 1, 1, 1, 2)
    weights, grad = torch.ones(1, len(xs), 1, 1, 1), torch.ones(1, len(xs), 1)
    args = (torch.arange(4.0).view(1, 4, 1, 1), torch.tensor([[1, 4]]), torch.tensor([0]), locations, weights)
    output, grad_value, grad_weight = run(implementation, GEOMETRIC, args, grad)
    assert output.flatten().tolist() == grad_weight.flatten().tolist() == [*columns]
    assert grad_value.flatten().tolist() == [columns.count(i) for i in range(4)]


@everywhere
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
def test_whole_pixels_of_any_integer_dtype(implementation, dtype):
    if dtype in (torch.int16, torch.int8):
        skip_unless_every_kernel(implementation)
    args = list(cases.cast(cases.geometric(2, 5, 8, 2, [(9, 11), (5, 7)], 4), torch.float32))
    args[3] = torch.randint(0, 12, args[3].shape, generator=torch.Generator().manual_seed(0))
    forward = cases.forward_of(implementation, GEOMETRIC)
    expected = forward(*args)
    args[3] = args[3].to(dtype)
    assert torch.equal(forward(*args), expected)


def test_geometric_locations_have_no_gradient():
    args = list(inputs_of(GEOMETRIC))
    args[3] = args[3].double().requires_grad_()
    mx_driving.geometric_kernel_attention(*args).sum().backward()
    assert args[3].grad is None


@pytest.mark.skipif(_backends.native.why_not() is not None, reason=str(_backends.native.why_not()))
@pytest.mark.parametrize(("dtype", "sum_of_ones"), [(torch.float32, 2**24), (torch.float64, 2**24 + 100)], ids=str)
def test_sums_of_more_than_2_to_the_24_ones(dtype, sum_of_ones):
    """As the docstrings say, a sum of ones in float32 stops at 2^24; in float64 it does not."""
    count, one = 2**24 + 100, torch.ones(1, dtype=dtype)
    tables = torch.tensor([[1, 1]]), torch.tensor([0])
    args = (one.view(1, 1, 1, 1), *tables, torch.zeros(1, dtype=dtype).expand(1, count, 1, 1, 1, 2))
    backward = torch.ops.mx_driving.geometric_kernel_attention_backward
    found = backward(one.expand(1, count, 1), *args, one.expand(1, count, 1, 1, 1), [True, False])
    assert found[0].item() == sum_of_ones
