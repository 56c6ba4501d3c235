"""The native kernel that begins where the linear layers end, through the C interface, against its composition in float64."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import pytest
import torch
from cases import wanted_implementations
from torch import Tensor

from mx_driving import _kernels, reference

NATIVE = [name for name in wanted_implementations() if name.startswith("native")]
THREADS = (1, 2, 3, 8, 24)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAME = "mxd_multi_scale_deformable_attn_with_logits"
WANT_ALL = (True,) * 4


@pytest.fixture(autouse=True, params=NATIVE)
def isa(request) -> Iterator[None]:
    with _kernels.native.use_isa(request.param.removeprefix("native-")):
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
    """The six inputs, and the gradient of the output, in float64."""
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
    return None if t is None else _kernels.native._pack(t)


def forward(case: Case, tensors: Sequence[Tensor], threads: int = 1, status: int = 0) -> Tensor:
    grad = tensors[6]
    out = torch.full_like(grad, 7, dtype=tensors[0].dtype)
    function = getattr(_kernels.native._library(), NAME)
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
    function = getattr(_kernels.native._library(), NAME + "_backward")
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["encoder", "boxes of 3 levels and 3 points", "pillars"])
def test_references_that_lie_at_one_place(name, dtype):
    """A model's levels often have one reference point, which is expanded, not copied. Each still has its own gradient."""
    case, tensors = CASES[name], drawn(name, dtype)
    alike = tensors[3][:, :, :1].expand(-1, -1, case.references, -1)
    assert case.references > 1
    assert alike.stride(2) == 0
    copied = run(case, [*tensors[:3], alike.contiguous(), *tensors[4:]])
    found = run(case, [*tensors[:3], alike, *tensors[4:]])
    assert all(torch.equal(a, b) for a, b in zip(found, copied, strict=True))


MIXED = {
    "16-bit value": (torch.float16, torch.float32, torch.float32, torch.float32, torch.float32),
    "16-bit layers": (torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float32),
    "wide references": (torch.float32, torch.float64, torch.float32, torch.float32, torch.float32),
    "wide logits": (torch.bfloat16, torch.float32, torch.float32, torch.float64, torch.float32),
    "16-bit references": (torch.float32, torch.float16, torch.float32, torch.float32, torch.bfloat16),
}


@pytest.mark.parametrize("mixed", MIXED)
@pytest.mark.parametrize("name", ["encoder", "12 samples", "boxes of 3 levels and 3 points"])
def test_mixed_dtypes(name, mixed):
    case, tensors = CASES[name], drawn(name, *MIXED[mixed])
    assert_near(case, run(case, tensors), truth(case, tensors), computed_in(tensors))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_strides_do_not_change_a_bit(name, dtype):
    case, tensors = CASES[name], drawn(name, dtype)
    strided = [apart(t) for t in tensors]
    assert torch.equal(forward(case, tensors), forward(case, strided))
    for a, b in zip(backward(case, tensors), backward(case, strided, strided=True), strict=True):
        assert a is not None
        assert b is not None
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_threads_do_not_change_a_bit(name, dtype):
    """Nor does the way to the gradient of value, which depends on them: see test_every_way."""
    case, tensors = CASES[name], drawn(name, dtype)
    first = run(case, tensors)
    for threads in THREADS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, run(case, tensors, threads), strict=True))


def plan(case: Case, tensors: Sequence[Tensor], threads: int, mask: Sequence[bool] | None = None) -> dict[str, str]:
    gradients = [torch.empty_like(tensors[i]) for i in (0, 3, 4, 5)]
    results = [tensors[6]] if mask is None else [t if wanted else None for t, wanted in zip(gradients, mask, strict=True)]
    arguments = [pack(t) for t in (*([tensors[6]] if mask else []), *tensors[:6], *results)]
    text = ctypes.create_string_buffer(1024)
    pointers = (ctypes.c_char_p * len(arguments))(*arguments)
    name = NAME.removeprefix("mxd_") + ("_backward" if mask else "")
    assert _kernels.native._library().mxd_describe_plan(name.encode(), pointers, threads, text, len(text)) == 0
    return dict(line.split(": ", 1) for line in text.value.decode().splitlines())


# A case, and the ways it takes to the gradient of value with 1, 2, 3, 8 and 24 threads.
WAYS = {
    "few queries": (Case(8, 16, PYRAMID[:3], 4, 30, 3, 2, batch=1), ["WITH_SAMPLES"] * 4 + ["BY_PARTS, 3 a head"]),
    "many queries": (Case(8, 8, PYRAMID[:3], 1, 24 * 512, 3, 2, batch=1), ["BY_HEADS"] * 4 + ["BY_BANDS, 3"]),
    "3 points": (
        Case(2, 40, PYRAMID[:3], 3, 300, 1, 4, batch=1),
        ["WITH_SAMPLES"] * 2 + ["BY_BANDS, 3", "BY_BANDS, 3", "BY_BANDS, 12"],
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", WAYS)
def test_every_way(name, dtype):
    """Each way that a plan takes gives the same bits, near the truth."""
    case, ways = WAYS[name]
    CASES[name] = case
    tensors = drawn(name, dtype)
    first: list[Tensor] = []
    for threads, way in zip(THREADS, ways, strict=True):
        if dtype == torch.float32:
            assert plan(case, tensors, threads, WANT_ALL)["value_gradient"] == way
        found = run(case, tensors, threads)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
    assert_near(case, first, truth(case, tensors), computed_in(tensors))
    del CASES[name]


def test_a_plan_packs_as_the_bare_operator_does():
    case = WAYS["many queries"][0]
    assert plan(case, cast(make(case), torch.float32), 1)["packed_value"].startswith("3 of 3 levels")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["encoder", "12 samples", "boxes", "pillars"])
def test_only_some_gradients(name, dtype):
    case, tensors = CASES[name], drawn(name, dtype)
    everything = backward(case, tensors)
    for number in range(1, 15):
        mask = [bool(number >> i & 1) for i in range(4)]
        for one, whole, wanted in zip(backward(case, tensors, 2, mask), everything, mask, strict=True):
            assert (one is not None) == wanted
            assert one is None or (whole is not None and torch.equal(one, whole))


def weights_of(logits: Tensor) -> Tensor:
    """The softmax of rows of logits [rows, samples], read off as outputs: the value of sample i is 1 in channel i."""
    rows, samples = logits.shape
    assert samples & samples - 1 == 0
    case = Case(1, samples, [(1, samples)], samples, rows, 1, 2, batch=1)
    like = logits.dtype
    pixels = ((torch.arange(samples) + 0.5) / samples).to(like)
    reference_points = torch.tensor([0.0, 0.5], dtype=like).expand(1, rows, 1, 2)
    offsets = torch.zeros(1, rows, 1, 1, samples, 2, dtype=like)
    offsets[..., 0] = pixels * samples
    tables = [torch.tensor([[1, samples]]), torch.tensor([0])]
    value = torch.eye(samples, dtype=like)[None, :, None]
    grad = torch.zeros(1, rows, 1, samples, dtype=like)
    return forward(case, [value, *tables, reference_points, offsets, logits.view(1, rows, 1, 1, samples), grad])[0, :, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_is_right_to_a_few_ulps(dtype):
    """Against numpy with more digits, from 0 down to where the result is no number but 0."""
    least = -106 if dtype == torch.float32 else -750
    x = torch.cat([torch.linspace(0, least, 40001, dtype=dtype), torch.logspace(-30, 1, 20000, dtype=dtype).neg()])
    found = weights_of(torch.stack([torch.zeros_like(x), x], -1))
    exact = np.exp(x.numpy().astype(np.longdouble))
    total = 1 + exact
    ulps = np.abs(found.numpy() - np.stack([1 / total, exact / total], -1)) / np.spacing(found.numpy())
    assert ulps.max() < 4


@pytest.mark.parametrize("samples", [1, 2, 4, 16, 32, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_softmax_as_torch_computes_it(dtype, samples):
    inf, nan = float("inf"), float("nan")
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn((13, samples), generator=generator, dtype=dtype) * 20
    rows[1] = -inf
    rows[2, 0] = nan
    rows[3, -1] = inf
    rows[4, : samples // 2] = -inf
    rows[5] = 1e30
    rows[6, 0] = 3e38
    rows[7] = nan
    expected = rows.double().softmax(-1)
    found = weights_of(rows)
    assert torch.equal(found.isnan(), expected.isnan())
    assert (found[expected == 0] <= torch.finfo(dtype).tiny).all()
    assert (found[4, : samples // 2] == 0).all()
    lost = 4 + samples + (rows - rows.amax(-1, keepdim=True)).abs().nan_to_num().clamp(max=800)  # by the difference
    allowed = lost * torch.finfo(dtype).eps * expected + torch.finfo(dtype).tiny
    assert ((found - expected).abs() <= allowed)[~expected.isnan()].all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")], ids=str)
@pytest.mark.parametrize("name", ["encoder", "12 samples", "boxes", "boxes of 3 levels and 3 points", "pillars"])
def test_samples_that_are_not_valid_contribute_nothing(name, bad):
    """Not even where offsets or references are no numbers and value and gradient are infinite elsewhere on the map."""
    case, tensors = CASES[name], drawn(name, torch.float32)
    spoilt = [t.clone() for t in tensors]
    spoilt[3][:, 1] = bad
    spoilt[4][:, 2, :, :, 0] = bad
    out, _, reference_points, offsets, logits = run(case, spoilt)
    assert out.isfinite().all()
    assert (out[:, 1] == 0).all()
    assert all(t.isfinite().all() for t in (reference_points, offsets, logits))
    assert (reference_points[:, 1] == 0).all()
    assert (offsets[:, 1] == 0).all()
    assert (logits[:, 1] == 0).all()
    assert (offsets[:, 2, :, :, 0] == 0).all()
    inside = [t.clone() for t in tensors]
    inside[4][:, 2, :, :, 0] = 1e6
    assert torch.equal(out[:, 2], forward(case, inside)[:, 2])


def test_everything_nan_gives_zeros_but_for_the_softmax():
    case, tensors = CASES["boxes"], cast(make(CASES["boxes"]), torch.float32)
    tensors = [torch.full_like(t, float("nan")) if t.is_floating_point() else t for t in tensors]
    value, reference_points, offsets, logits = backward(case, tensors)
    assert all(t is not None and (t == 0).all() for t in (forward(case, tensors), value, reference_points, offsets))
    assert logits is not None
    assert logits.isnan().all()


def test_no_samples():
    case = Case(2, 8, [], 4, 5, 1, 2)
    tensors = cast(make(case._replace(shapes=[(1, 1)])), torch.float32)
    for i, axis in ((1, 0), (2, 0), (4, 3), (5, 3)):
        tensors[i] = tensors[i].narrow(axis, 0, 0)
    assert (forward(case, tensors) == 0).all()
    value, reference_points, _, _ = backward(case, tensors)
    assert value is not None
    assert reference_points is not None
    assert (value == 0).all()
    assert (reference_points == 0).all()


@pytest.mark.parametrize(
    ("spoil", "status"),
    [
        (lambda case, t: (case, {3: t[3][:, :, :2]}), 1),
        (lambda case, t: (case, {3: torch.cat([t[3], t[3]], 2)}), 1),
        (lambda case, t: (case, {3: t[3][..., :1]}), 1),
        (lambda case, t: (case, {3: t[3][:, 1:]}), 1),
        (lambda case, t: (case, {5: t[5][..., 1:]}), 1),
        (lambda case, t: (case._replace(by_point=True), {3: t[3][:, :, :3]}), 1),
        (lambda case, t: (case._replace(by_point=True), {3: t[3][:, :, :0]}), 1),
        (lambda case, t: (case._replace(by_point=2), {}), 1),
        (lambda case, t: (case, {3: t[3].long()}), 2),
        (lambda case, t: (case, {4: t[4].long()}), 2),
        (lambda case, t: (case, {1: t[1] * 9}), 3),
    ],
)
def test_refused(spoil, status):
    case, tensors = CASES["encoder"], cast(make(CASES["encoder"]), torch.float32)
    case, changes = spoil(case, tensors)
    tensors = [changes.get(i, t) for i, t in enumerate(tensors)]
    assert (forward(case, tensors, status=status) == 7).all()
    assert all(t is None or (t == 7).all() for t in backward(case, tensors, status=status))


class Windowed(NamedTuple):
    """geometric_kernel_attention's: value, tables, reference_points, window, attention_logits, grad_output."""

    tensors: list[Tensor]

    def locations(self) -> Tensor:
        _, shapes, _, references, window, logits, _ = self.tensors
        wide = (
            torch.float64 if computed_in([t for t in self.tensors if t.is_floating_point()]) == torch.float64 else torch.float32
        )
        scaled = references.to(wide)[:, :, :, None] * shapes.flip(-1).to(wide)
        return (scaled[:, :, :, :, None] + window.to(wide)).round().expand(*logits.shape, 2)

    def truth(self) -> list[Tensor]:
        value, shapes, starts, _, _, logits, grad = self.tensors
        value, logits = value.double().requires_grad_(), logits.double().requires_grad_()
        weights = logits.flatten(3).softmax(-1).view_as(logits)
        out = reference.geometric_kernel_attention(value, shapes, starts, self.locations().double(), weights).reshape(
            grad.shape
        )
        return [out.detach(), *torch.autograd.grad(out, (value, logits), grad.double())]

    def run(self, threads: int = 1) -> list[Tensor]:
        name, inputs = "mxd_geometric_kernel_attention_with_logits", [pack(t) for t in self.tensors[:6]]
        value, logits, grad = (self.tensors[i] for i in (0, 5, 6))
        found = [torch.full(t.shape, 7, dtype=t.dtype) for t in (value, logits)]
        found = [a if t.is_contiguous() else apart(a) for a, t in zip(found, (value, logits), strict=True)]
        out = torch.empty(grad.shape, dtype=value.dtype)
        assert getattr(_kernels.native._library(), name)(*inputs, pack(out), threads) == 0
        assert getattr(_kernels.native._library(), name + "_backward")(pack(grad), *inputs, *map(pack, found), threads) == 0
        return [out, *found]


def windowed(shapes: list[tuple[int, int]], points: int, queries: int, dtype: torch.dtype, heads: int = 4) -> Windowed:
    """References on a grid of 1 / 8 of a map, where many pixels are ties, and some beyond the map or no number."""
    value, tables, starts, _, _, logits, grad = make(Case(heads, 16, shapes, points, queries, 1, 2))
    generator = torch.Generator().manual_seed(2)
    references = torch.randint(-2, 11, (2, queries, heads, 2), generator=generator).double() / 8
    references[0, :3, 0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float64)
    window = torch.randint(-3, 4, (points, 2), generator=generator)
    return Windowed(cast([value, tables, starts, references, window, logits, grad], dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("shapes", "points", "queries", "heads"),
    [
        ([(20, 10)], 15, 40, 4),
        ([(20, 10)], 16, 600, 4),
        (PYRAMID[:3], 4, 60, 4),
        ([(5, 7), (3, 4)], 3, 100, 8),
        ([(5, 7), (3, 4)], 9, 70, 3),
        ([(3, 3)], 1, 9, 1),
    ],
)
def test_windows(dtype, shapes, points, queries, heads):
    """The same pixels as torch finds, ties included: another pixel would be another row."""
    call = windowed(shapes, points, queries, dtype, heads)
    first, true = call.run(), call.truth()
    for one, exact in zip(first, true, strict=True):
        computed = torch.float64 if dtype == torch.float64 else torch.float32
        allowed = 64 * torch.finfo(computed).eps * exact.abs().max() + torch.finfo(dtype).eps * exact.abs()
        assert ((one.double() - exact).abs() <= allowed + (2.0**-24 if dtype == torch.float16 else 0)).all()
    for threads in THREADS[1:]:
        assert all(torch.equal(a, b) for a, b in zip(first, call.run(threads), strict=True))
    for strided in ([apart(t) for t in call.tensors], [call.tensors[0], *map(apart, call.tensors[1:])]):
        assert all(torch.equal(a, b) for a, b in zip(first, Windowed(strided).run(), strict=True))
    narrow = Windowed([t.int() if i == 4 else t for i, t in enumerate(call.tensors)])
    assert all(torch.equal(a, b) for a, b in zip(first, narrow.run(2), strict=True))
