"""The native kernels that begin where the linear layers end, through the C interface, against softmax and locations in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pytest
import torch
from conftest import wanted_implementations
from torch import Tensor

from mx_driving import _native, reference

NATIVE = [name for name in wanted_implementations() if name.startswith("native")]
THREADS = (1, 2, 3, 8, 24)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAME = "mxd_multi_scale_deformable_attn_with_logits"
WANT_ALL = (True,) * 4


@pytest.fixture(autouse=True, params=NATIVE)
def isa(request) -> Iterator[None]:
    with _native.use_isa(request.param.removeprefix("native-")):
        yield


class Case(NamedTuple):
    heads: int
    channels: int
    shapes: list[tuple[int, int]]
    points: int
    queries: int
    references: int  # for each query
    coordinates: int  # of a reference point
    by_point: bool = False
    batch: int = 2


PYRAMID = [(24, 32), (12, 16), (6, 8), (3, 4)]
CASES = {
    "encoder": Case(8, 32, PYRAMID, 4, 40, 4, 2),
    "one reference": Case(4, 16, PYRAMID[:3], 4, 30, 1, 2),
    "12 samples": Case(2, 24, PYRAMID[:3], 4, 33, 3, 2),
    "3 points": Case(3, 8, PYRAMID, 3, 30, 4, 2),
    "boxes": Case(8, 32, PYRAMID, 4, 30, 4, 4),
    "boxes of 3 levels and 3 points": Case(2, 10, PYRAMID[:3], 3, 30, 3, 4),
    "pillars": Case(8, 32, PYRAMID[:1], 8, 40, 4, 2, by_point=True),
    "pillars on levels": Case(2, 16, PYRAMID[:3], 6, 30, 3, 2, by_point=True),
    "boxes of points": Case(2, 16, PYRAMID[:2], 4, 30, 2, 4, by_point=True),
    "one sample": Case(2, 8, PYRAMID[:1], 1, 20, 1, 2),
    "many samples": Case(1, 8, PYRAMID, 17, 20, 4, 2, batch=1),
}


def make(case: Case, seed: int = 0) -> list[Tensor]:
    """value, spatial_shapes, level_start_index, reference_points, sampling_offsets, attention_logits, grad_output in float64."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    shapes = torch.tensor(case.shapes)
    sizes = shapes.prod(-1)
    levels, b, q, h = len(case.shapes), case.batch, case.queries, case.heads
    references = torch.rand((b, q, case.references, case.coordinates), generator=generator, dtype=torch.float64)
    return [
        random(b, int(sizes.sum()), h, case.channels),
        shapes,
        torch.cat([sizes.new_zeros(1), sizes.cumsum(0)[:-1]]),
        references,
        random(b, q, h, levels, case.points, 2) * 2,
        random(b, q, h, levels, case.points) * 3,
        random(b, q, h, case.channels),
    ]


def cast(tensors: Sequence[Tensor], *dtypes: torch.dtype) -> list[Tensor]:
    """All floating tensors in one dtype, or each in its own."""
    wanted = iter(dtypes * 5 if len(dtypes) == 1 else dtypes)
    return [t.to(next(wanted)) if t.is_floating_point() else t for t in tensors]


def composed(case: Case, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Locations and weights."""
    _, shapes, _, references, offsets, logits, *_ = tensors
    levels, points = logits.shape[3:]
    index = torch.arange(points) % case.references if case.by_point else torch.zeros(points, dtype=torch.long)
    r = references[:, :, None, index][:, :, :, None] if case.by_point else references[:, :, None, :, None]
    if case.coordinates == 2:
        locations = r + offsets / shapes.flip(-1)[:, None].to(offsets)
    else:
        locations = r[..., :2] + offsets * r[..., 2:] / (2 * points)
    return locations.expand(*offsets.shape), logits.flatten(3).softmax(-1).unflatten(3, (levels, points))


def truth(case: Case, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The output and the gradients of value, references, offsets and logits, in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    leaves = [wide[i].requires_grad_() for i in (0, 3, 4, 5)]
    locations, weights = composed(case, wide)
    out = reference.multi_scale_deformable_attn(wide[0], wide[1], wide[2], locations, weights)
    out = out.reshape(wide[6].shape)
    gradients = torch.autograd.grad(out, leaves, wide[6], allow_unused=True)
    return [out.detach(), *(torch.zeros_like(leaf) if g is None else g for g, leaf in zip(gradients, leaves, strict=True))]


def drawn(name: str, *dtypes: torch.dtype) -> list[Tensor]:
    """A case in these dtypes. No sample lies on a pixel's edge, where slopes jump and rounding decides."""
    case = CASES[name]
    tensors = cast(make(case), *dtypes)
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        wide = [t.double() for t in tensors]
        pixels = composed(case, wide)[0] * wide[1].flip(-1)[:, None] - 0.5
        near = (pixels - pixels.round()).abs() < 1e-3
        if not near.any():
            return tensors
        tensors[4][near] = (torch.randn(int(near.sum()), generator=generator, dtype=torch.float64) * 2).to(tensors[4].dtype)
    raise AssertionError("every draw lies on an edge")


def pack(t: Tensor | None) -> bytes | None:
    return None if t is None else _native._pack(t)


def forward(case: Case, tensors: Sequence[Tensor], threads: int = 1, status: int = 0) -> Tensor:
    grad = tensors[6]
    out = torch.full_like(grad, 7, dtype=tensors[0].dtype)
    function = getattr(_native._library(), NAME)
    assert function(*map(pack, tensors[:6]), pack(out), int(case.by_point), threads) == status
    return out


def backward(
    case: Case,
    tensors: Sequence[Tensor],
    threads: int = 1,
    mask: Sequence[bool] = WANT_ALL,
    strided: bool = False,
    status: int = 0,
) -> list[Tensor | None]:
    inputs = [tensors[i] for i in (0, 3, 4, 5)]
    found = [torch.full(t.shape, 7, dtype=t.dtype) if wanted else None for t, wanted in zip(inputs, mask, strict=True)]
    if strided:
        found = [None if t is None else apart(t) for t in found]
    function = getattr(_native._library(), NAME + "_backward")
    assert function(*map(pack, (tensors[6], *tensors[:6], *found)), int(case.by_point), threads) == status
    return found


def run(case: Case, tensors: Sequence[Tensor], threads: int = 1) -> list[Tensor]:
    return [forward(case, tensors, threads), *(t for t in backward(case, tensors, threads) if t is not None)]


def apart(t: Tensor) -> Tensor:
    """The same numbers, no two of them side by side in memory, and axes in another order."""
    axes = list(range(t.dim()))[::-1]
    room = torch.zeros([2 * t.shape[a] for a in axes], dtype=t.dtype)
    view = room[tuple(slice(None, None, 2) for _ in axes)].permute(*axes)
    return view.copy_(t)


def assert_near(case: Case, found: Sequence[Tensor], true: Sequence[Tensor], computed: torch.dtype) -> None:
    """Within some ulps of the largest result: positions lose an ulp of the map's size; a result is rounded to its own dtype."""
    extent = max(max(shape) for shape in case.shapes)
    for one, exact in zip(found, true, strict=True):
        ulp, rounding = torch.finfo(computed).eps, torch.finfo(one.dtype).eps
        scale = exact.abs().max().item()
        allowed = ulp * (32 + 8 * extent) * scale + (rounding * exact.abs() if one.dtype != computed else 0)
        allowed = allowed + (2.0**-24 if one.dtype == torch.float16 else 0)
        assert ((one.double() - exact).abs() <= allowed).all(), ((one.double() - exact).abs().max().item(), scale)


def computed_in(tensors: Sequence[Tensor]) -> torch.dtype:
    wide = any(t.dtype == torch.float64 for t in tensors[:6])
    return torch.float64 if wide else torch.float32


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values(name, dtype):
    case = CASES[name]
    tensors = drawn(name, dtype)
    assert_near(case, run(case, tensors), truth(case, tensors), computed_in(tensors))
