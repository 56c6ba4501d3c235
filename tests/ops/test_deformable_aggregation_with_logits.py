"""The native kernel of deformable_aggregation_with_logits: groups of every size, many pairs and anchors, infinities in softmax
and in cameras, and the C interface. test_with_logits.py tests all operators with logits."""

from collections.abc import Sequence
from typing import Any

import cases
import logits_cases
import pytest
import torch
import values
from cases import AGGREGATION_LOGITS as NAME
from logits_cases import TWO_CAMERAS
from torch import Tensor
from values import compare, natively

from mx_driving import _backends

pytestmark = [natively, pytest.mark.usefixtures("implementation")]
INF, NAN = float("inf"), float("nan")
BACKWARD = f"mxd_{NAME}_backward"


def drawn(*sizes: Any, dtype: torch.dtype = torch.float32, **options: bool) -> tuple[tuple[Any, ...], Tensor]:
    """Return the inputs, and the gradient of the output."""
    args = cases.cast(logits_cases.aggregation(*sizes, **options), dtype)
    return args, cases.grad_for(NAME, args).to(dtype)


def run(args: Sequence[Any], grad: Tensor) -> list[Tensor]:
    return values.run("native", NAME, args, grad)


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_group_that_softmax_turns_to_nan(bad):
    """The group gives NaN, as softmax does, and no other group."""
    args, grad = drawn(2, 9, 7, 16, 4, TWO_CAMERAS)
    args[4][:] = 0  # every anchor sees the same place of both cameras' maps
    args[4][..., :2, 3], args[4][..., 2, 3] = torch.tensor([100.0, 60.0]), 1
    clean = run(args, grad)
    args[5][0, 5, ..., 2] = bad
    output, _, of_points, of_projection, of_logits = run(args, grad)
    inside = torch.zeros(output.shape, dtype=torch.bool)
    inside[0, 5, 8:12] = True
    assert torch.equal(output.isnan(), inside)
    assert torch.equal(output[~inside], clean[0][~inside])
    inside = torch.zeros(of_logits.shape, dtype=torch.bool)
    inside[0, 5, ..., 2] = True
    assert torch.equal(of_logits.isnan(), inside)
    assert torch.equal(of_logits[~inside], clean[4][~inside])
    assert of_projection[0].isnan().any()
    assert torch.equal(of_projection[1], clean[3][1])
    assert torch.equal(of_points[1], clean[2][1])


def test_softmax_is_nan_also_where_no_camera_sees_a_point():
    args, grad = drawn(1, 3, 4, 8, 2, TWO_CAMERAS)
    args[3][:] = NAN
    args[5][0, 1, ..., 0] = -INF
    output, *others, of_logits = run(args, grad)
    assert not any(t.any() for t in (output, *others))
    assert of_logits[0, 1, ..., 0].isnan().all()
    of_logits[0, 1, ..., 0] = 0
    assert not of_logits.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_depths_that_overflow(dtype):
    """A depth of -infinity counts as 1e-5: a camera may see the point, and its gradient has no infinite part. No camera sees a
    point whose depth is infinity or NaN."""
    args, grad = drawn(1, 2, 3, 8, 2, [[(4, 4)]] * 4, dtype=dtype, image_size=False, pair_scale=False)
    args[3][:] = torch.tensor([1.0, 1, 2], dtype=dtype)
    args[4][:] = 0
    args[4][0, :, 0, 0], args[4][0, :, 1, 1] = 0.4e-5, 0.7e-5
    args[4][0, :, 2, 2] = torch.tensor([-INF, INF, NAN, -1], dtype=dtype)
    output, of_maps, of_points, of_projection, of_logits = run(args, grad)
    assert all(t.isfinite().all() for t in (output, of_maps, of_points, of_projection, of_logits))
    assert not of_projection[:, 1:3].any()
    assert not of_projection[:, :, 2:].any()
    assert torch.equal(of_maps[:, :16] != 0, of_maps[:, 48:] != 0)
    assert of_maps[:, :16].any()
    assert not of_maps[:, 16:48].any()
    compare("native", NAME, (*args[:4], args[4].clamp(min=-1e30).nan_to_num(nan=1e30, posinf=1e30), *args[5:]), grad)


def pack(t: Tensor | None) -> bytes | None:
    return None if t is None else _backends.native._pack(t)


@pytest.mark.parametrize("place", [3, 7])
def test_what_is_refused_writes_nothing(place):
    """test_refusals.py has all refusals."""
    args, grad = drawn(2, 3, 2, 4, 2, [[(3, 4)], [(2, 2)]])
    args = [t[:1] if i == place else t for i, t in enumerate(args)]
    results = [torch.full_like(t, 7) for t in (grad, args[0], *args[3:6])]
    inputs, library = [pack(t) for t in args], _backends.native.loaded()
    assert getattr(library, f"mxd_{NAME}")(*inputs, pack(results[0]), 2) == 1
    assert getattr(library, BACKWARD)(pack(grad), *inputs, *map(pack, results[1:]), 2) == 1
    assert all((t == 7).all() for t in results)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_of_any_stride_and_dtype(dtype, reverse):
    args, grad = drawn(2, 20, 4, 16, 8, TWO_CAMERAS)
    found = []
    for like in (args[0], *args[3:6]):
        axes = list(range(like.dim()))[:: -1 if reverse else 1]
        room = torch.full([2 * like.shape[a] for a in axes], 7, dtype=dtype)
        found.append(room[(slice(None, None, 2),) * like.dim()].permute(axes))
    assert getattr(_backends.native.loaded(), BACKWARD)(pack(grad), *map(pack, args), *map(pack, found), 2) == 0
    assert all(torch.equal(a, b.to(dtype)) for a, b in zip(found, run(args, grad)[1:], strict=True))


ENDLESS = 10**12


@pytest.mark.parametrize("nothing", ["cameras", "scales", "points"])
def test_no_samples(nothing):
    """The output and gradients are zero. With 10^12 anchors the call ends at once, so that no loop runs over them."""
    sizes = {"cameras": 2, "scales": 1, "points": 3, nothing: 0}
    cams, scales, points = sizes.values()

    def inputs(anchors: int) -> tuple[Any, ...]:
        one = torch.ones(1)
        tables = (torch.ones(cams, scales, 2, dtype=torch.int64), torch.zeros(cams, scales, dtype=torch.int64))
        scale = one.expand(1, anchors, cams, points)
        logits = one.expand(1, anchors, cams, scales, points, 2)
        key_points = one.expand(1, anchors, points, 3)
        return (torch.ones(1, 4, 4), *tables, key_points, torch.ones(1, cams, 4, 4), logits, None, scale)

    assert not any(result.any() for result in run(inputs(3), torch.ones(1, 3, 4)))
    mask = [True, points == 0, True, True]  # else a gradient would be 10^12 elements
    for result in cases.gradients_of("native", NAME, torch.ones(1).expand(1, ENDLESS, 4), inputs(ENDLESS), mask):
        assert not result.any()
