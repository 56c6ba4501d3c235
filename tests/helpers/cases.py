"""Inputs by name, and implementations by name. A test tries all implementations on all inputs, or says why not.

`made(case)` makes the inputs of a case of `CASES`. The fixture `implementation` enters an implementation, `forward_of` and
`gradients_of` run it, `truth_of` computes in float64, and `assert_near` compares. values.py has these steps in one function.
"""

import contextlib
import functools
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tolerance
import torch
import truth
from torch import Tensor

import mx_driving
from mx_driving import _backends, reference

MULTI_SCALE, AGGREGATION, GEOMETRIC = "multi_scale_deformable_attn", "deformable_aggregation", "geometric_kernel_attention"
OPERATORS = (MULTI_SCALE, AGGREGATION, GEOMETRIC)
MULTI_SCALE_LOGITS = "multi_scale_deformable_attn_with_logits"
GEOMETRIC_LOGITS = "geometric_kernel_attention_with_logits"
AGGREGATION_LOGITS = "deformable_aggregation_with_logits"
WITH_LOGITS = (MULTI_SCALE_LOGITS, AGGREGATION_LOGITS, GEOMETRIC_LOGITS)
EVERY = OPERATORS + WITH_LOGITS
POOL = "bev_pool_v3"  # which samples nothing
ON_GPU = torch.cuda.is_available()  # else the PTX of the Triton kernels is executed: tests/gpu/ptx.py
EVERY_KERNEL = ON_GPU or "triton" in os.environ.get("MX_DRIVING_TEST_BACKENDS", "").split(",")
DIFFERENTIABLE = {MULTI_SCALE: (0, 3, 4), AGGREGATION: (0, 3, 4), GEOMETRIC: (0, 4), POOL: (0, 1)}
DIFFERENTIABLE |= {MULTI_SCALE_LOGITS: (0, 3, 4, 5), AGGREGATION_LOGITS: (0, 3, 4, 5), GEOMETRIC_LOGITS: (0, 5)}
WEIGHTS = dict.fromkeys(OPERATORS, 4) | dict.fromkeys(WITH_LOGITS, 5)  # the index of weights or logits


class Case(NamedTuple):
    operator: str
    name: str
    make: Callable[[], tuple[Tensor, ...]]


def levels_of(*sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    shapes = torch.tensor(sizes)
    ends = shapes.prod(-1).flatten().cumsum(0)
    starts = torch.cat([ends.new_zeros(1), ends[:-1]])
    return shapes, starts


def off_lattice(pixels: Tensor) -> Tensor:
    """Move pixel coordinates at least 0.1 away from pixel centres, where the gradient of a location jumps."""
    whole = pixels.floor()
    return whole + 0.1 + 0.8 * (pixels - whole)


def _locations(generator: torch.Generator, shapes: Tensor, lead: tuple[int, ...], points: int, margin: float) -> Tensor:
    """Return locations [*lead, levels, points, 2], in fractions of a map and up to `margin` beyond it, off the lattice."""
    uniform = torch.rand(*lead, len(shapes), points, 2, dtype=torch.float64, generator=generator)
    size = shapes.flip(-1).double()[:, None]
    pixels = off_lattice((uniform * (1 + 2 * margin) - margin) * size - 0.5)
    return (pixels + 0.5) / size


Sizes = list[tuple[int, int]]


def multi_scale(bs, queries, channels, heads, sizes: Sizes, points, seed=0, margin=0.15) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    shapes, starts = levels_of(*sizes)
    value = torch.randn(bs, int(shapes.prod(-1).sum()), heads, channels, dtype=torch.float64, generator=generator)
    locations = _locations(generator, shapes, (bs, queries, heads), points, margin)
    weights = torch.rand(bs, queries, heads, len(sizes), points, dtype=torch.float64, generator=generator) + 1e-5
    return value, shapes, starts, locations, weights


def geometric(bs, queries, channels, heads, sizes: Sizes, points, seed=0, integral=True) -> tuple[Tensor, ...]:
    value, shapes, starts, locations, weights = multi_scale(bs, queries, channels, heads, sizes, points, seed, margin=0.3)
    pixels = locations * shapes.flip(-1).double()[:, None]
    return value, shapes, starts, pixels.floor().long() if integral else pixels, weights


def aggregation(bs, anchors, points, channels, groups, sizes: list[Sizes], seed=0) -> tuple[Tensor, ...]:
    """Maps have sizes[cam][scale]. A point is inside some images, outside others, and off the lattice of every scale."""
    generator = torch.Generator().manual_seed(seed)
    cams, scales = len(sizes), len(sizes[0])
    shapes = torch.tensor(sizes)
    starts = levels_of(*[size for cam in sizes for size in cam])[1].view(cams, scales)
    features = torch.randn(bs, int(shapes.prod(-1).sum()), channels, dtype=torch.float64, generator=generator)
    uniform = torch.rand(bs, anchors, points, cams, 2, dtype=torch.float64, generator=generator) * 1.4 - 0.2
    for cam in range(cams):
        for height, width in sizes[cam]:
            size = torch.tensor([width, height], dtype=torch.float64)
            fraction = (uniform[:, :, :, cam] * size - 0.5) % 1
            near = ((fraction < 0.02) | (fraction > 0.98)).any(-1, keepdim=True)
            uniform[:, :, :, cam] = torch.where(near, torch.full_like(size, 1.7), uniform[:, :, :, cam])
    weight = torch.rand(bs, anchors, points, cams, scales, groups, dtype=torch.float64, generator=generator)
    return features, shapes, starts, uniform, weight


def pooling(n, channels, sizes=(2, 1, 5, 7), rows=9, depths=40, seed=0, order="any", index=torch.int32) -> tuple[Any, ...]:
    """Return inputs of torch.ops.mx_driving.bev_pool_v3: n points in cells of `sizes` (B, D, H, W)."""
    random = torch.Generator().manual_seed(seed)
    ranks = [torch.randint(max(1, count), (n,), generator=random, dtype=index) for count in (rows, depths, int(np.prod(sizes)))]
    if order == "sorted":
        ranks[2] = ranks[2].sort().values
    feat = torch.randn(rows, channels, dtype=torch.float64, generator=random)
    return feat, torch.rand(depths, dtype=torch.float64, generator=random), *ranks, *sizes


def _edge_locations(args: tuple[Tensor, ...], xs: list[float]) -> tuple[Tensor, ...]:
    """Replace locations: x and y run through all pairs of xs."""
    numbers = torch.tensor(xs, dtype=torch.float64)
    count = args[3].numel() // 2
    index = torch.arange(count)
    pairs = torch.stack([numbers[index % len(xs)], numbers[index // len(xs) % len(xs)]], -1)
    return (*args[:3], pairs.view(args[3].shape), args[4])


def overlapping(points: int = 3) -> tuple[Tensor, ...]:
    args = multi_scale(2, 30, 8, 2, [(6, 7), (5, 4), (3, 3)], points)
    return args[0], args[1], torch.tensor([2, 20, 61]), *args[3:]  # levels 0 and 1 share rows; gaps at both ends


PYRAMID = [(12, 17), (6, 9), (3, 5), (1, 1)]
VENDOR_LEVEL = (60, 40)
DETR = [(100, 134), (50, 67), (25, 34), (13, 17)]
CASES = [
    Case(MULTI_SCALE, "pyramid", lambda: multi_scale(2, 70, 32, 4, PYRAMID, 4)),
    *(
        Case(MULTI_SCALE, f"channels {c}", lambda c=c: multi_scale(1, 20, c, 2, [(5, 7), (3, 2)], 3))
        for c in (1, 3, 8, 24, 37, 64, 147, 256)
    ),
    Case(MULTI_SCALE, "1 x 1 levels", lambda: multi_scale(2, 9, 16, 2, [(1, 1), (1, 1)], 5)),
    Case(MULTI_SCALE, "one row, one column", lambda: multi_scale(1, 9, 16, 2, [(1, 9), (9, 1)], 5)),
    Case(MULTI_SCALE, "overlapping levels and gaps", overlapping),
    Case(MULTI_SCALE, "mostly outside", lambda: multi_scale(1, 20, 8, 2, [(4, 4)], 4, margin=4)),
    Case(MULTI_SCALE, "vendor 37 x 4 x 5 x 3", lambda: multi_scale(2, 60, 37, 4, [VENDOR_LEVEL] * 5, 3)),
    Case(MULTI_SCALE, "vendor 16 x 5 x 3 x 1", lambda: multi_scale(1, 150, 16, 5, [VENDOR_LEVEL] * 3, 1)),
    Case(MULTI_SCALE, "vendor 64 x 6 x 1 x 2", lambda: multi_scale(1, 150, 64, 6, [VENDOR_LEVEL], 2)),
    Case(MULTI_SCALE, "vendor 128 x 8 x 8 x 8", lambda: multi_scale(1, 10, 128, 8, [VENDOR_LEVEL] * 8, 8)),
    Case(MULTI_SCALE, "vendor 147 x 7 x 3 x 21", lambda: multi_scale(1, 10, 147, 7, [VENDOR_LEVEL] * 3, 21)),
    Case(MULTI_SCALE, "vendor 32 x 7 x 4 x 16", lambda: multi_scale(1, 20, 32, 7, [VENDOR_LEVEL] * 4, 16)),
    Case(MULTI_SCALE, "Deformable-DETR decoder", lambda: multi_scale(1, 40, 32, 8, DETR, 4)),
    Case(MULTI_SCALE, "BEVFormer temporal", lambda: multi_scale(2, 100, 32, 8, [(50, 50)], 4)),
    Case(MULTI_SCALE, "BEVFormer spatial", lambda: multi_scale(3, 30, 32, 8, [(29, 50), (15, 25), (8, 13), (4, 7)], 8)),
    Case(AGGREGATION, "two cameras", lambda: aggregation(2, 9, 7, 32, 8, [[(6, 7), (3, 4)], [(5, 5), (1, 1)]])),
    Case(AGGREGATION, "vendor forward 64 / 16", lambda: aggregation(2, 13, 31, 64, 16, [[(32, 88)]])),
    Case(AGGREGATION, "vendor backward 128 / 8", lambda: aggregation(1, 10, 21, 128, 8, [[(16, 22)]])),
    Case(AGGREGATION, "one group of 37", lambda: aggregation(1, 5, 6, 37, 1, [[(6, 7)]])),
    Case(AGGREGATION, "groups of one", lambda: aggregation(1, 5, 6, 6, 6, [[(6, 7)]])),
    Case(AGGREGATION, "ten scales", lambda: aggregation(1, 4, 3, 8, 2, [[(4, 5)] * 10])),
    Case(AGGREGATION, "Sparse4D", lambda: aggregation(1, 30, 13, 256, 8, [[(16, 44), (8, 22), (4, 11), (2, 5)]] * 6)),
    Case(GEOMETRIC, "pyramid", lambda: geometric(2, 70, 32, 4, PYRAMID, 4)),
    Case(GEOMETRIC, "fractional", lambda: geometric(2, 70, 24, 4, PYRAMID, 3, integral=False)),
    Case(GEOMETRIC, "vendor 15 points", lambda: geometric(4, 120, 64, 4, [(15, 25)], 15)),
    Case(GEOMETRIC, "vendor 2 x 4", lambda: geometric(2, 4, 16, 4, [(6, 10), (6, 10)], 15)),
    *(Case(GEOMETRIC, f"channels {c}", lambda c=c: geometric(1, 20, c, 2, [(5, 7)], 3)) for c in (1, 3, 37, 147, 256)),
]
# Maps of some million numbers take seconds in each dtype. test_plan.py has every way that sizes lead to, in all dtypes and on
# all instruction sets: the best one in float32 will do for these.
OF_MILLIONS = ("vendor 128 x 8 x 8 x 8", "vendor 147 x 7 x 3 x 21", "Deformable-DETR decoder")
# On pixel centres and on the border. The output is continuous there; location gradients are not, and are compared apart.
LATTICE = [
    Case(MULTI_SCALE, "lattice and border", lambda: _edge_locations(multi_scale(1, 64, 8, 1, [(4, 4)], 2), BILINEAR_EDGES)),
    Case(AGGREGATION, "lattice and border", lambda: _edge_locations(aggregation(1, 9, 10, 8, 2, [[(4, 4)]]), OPEN_EDGES)),
    Case(GEOMETRIC, "lattice and border",
         lambda: _edge_locations(geometric(1, 64, 8, 1, [(4, 4)], 2, integral=False), NEAREST_EDGES)),
]  # fmt: skip
BILINEAR_EDGES = [-0.25, -0.125, 0.0, 0.125, 0.375, 0.875, 1.0, 1.125, 1.5]
OPEN_EDGES = [-0.125, 0.0, 0.125, 0.25, 0.625, 0.875, 1.0, 1.25]
NEAREST_EDGES = [-1e30, -1.0, -0.5, 0.0, 0.5, 2.5, 3.0, 3.5, 4.0, 1e30]


# Enough work for several threads.
LARGE = [
    Case(MULTI_SCALE, "3 points", lambda: multi_scale(1, 700, 40, 3, PYRAMID, 3)),
    Case(MULTI_SCALE, "4 points", lambda: multi_scale(1, 300, 64, 2, PYRAMID, 4)),
    Case(MULTI_SCALE, "4 points, one level", lambda: multi_scale(1, 300, 64, 2, PYRAMID[:1], 4)),
    Case(AGGREGATION, "three cameras", lambda: aggregation(2, 60, 13, 64, 8, [[(16, 22), (8, 11)]] * 3)),
    Case(GEOMETRIC, "3 points", lambda: geometric(1, 700, 40, 3, PYRAMID[:2], 3)),
    Case(GEOMETRIC, "4 points", lambda: geometric(1, 300, 64, 2, PYRAMID, 4)),
]


@functools.lru_cache(maxsize=1)
def made(case: Case) -> tuple[Tensor, ...]:
    """Return a case's inputs. The next implementation gets the same tensors, so a test must not change them."""
    return case.make()


def case_id(case: Case) -> str:
    return f"{case.operator}: {case.name}"


@contextlib.contextmanager
def _on_isa(name: str) -> Iterator[None]:
    """Inside the block, all threads of the process run with this instruction set."""
    before, use = _backends.native.isa(), _backends.native.loaded().mxd_use_isa
    assert use(name.encode()) == 0
    try:
        yield
    finally:
        use(before.encode())


def implementations() -> dict[str, Callable[[], contextlib.AbstractContextManager[None]]]:
    """Return (name -> context). Inside the context, calls run on this implementation."""
    found: dict[str, Any] = {"reference": contextlib.nullcontext}
    if _backends.native.why_not() is None:
        before, use = _backends.native.isa(), _backends.native.loaded().mxd_use_isa
        for isa in ("baseline", "avx2", "avx512"):
            if use(isa.encode()) == 0:  # this build and this machine support the instruction set
                found[f"native-{isa}"] = functools.partial(_on_isa, isa)
        use(before.encode())
    if _backends.triton.why_not() is None:
        found["triton"] = contextlib.nullcontext
    return found


EXPECTED = ["reference", "native-baseline"] + (["native-avx2"] if platform.machine() in ("x86_64", "AMD64") else [])


def wanted_implementations(small: bool = False) -> list[str]:
    """Return the names of the implementations to test. Without a GPU, `triton` is among them if inputs are `small` or if it is
    named. MX_DRIVING_TEST_BACKENDS names some of them; `native` is the native kernels on the best instruction set."""
    found = dict.fromkeys([*EXPECTED, *implementations()])
    if named := os.environ.get("MX_DRIVING_TEST_BACKENDS"):
        best = next(name for name in reversed(found) if name.startswith("native"))
        return [best if name == "native" else name for name in named.split(",")]
    if not ON_GPU and not small:
        found.pop("triton", None)
    return list(found)


def on_the_cpu() -> list[str]:
    """Return the names of implementations whose bits are the same for each call. A GPU adds gradients of value by atomics."""
    return [name for name in wanted_implementations() if name != "triton"]


def on_gpu(t: Any) -> Any:
    """Return a copy on the GPU with the same strides, offset and surroundings. Autograd records a differentiable copy."""
    if not isinstance(t, Tensor):
        return t
    if t.requires_grad:
        return t.cuda()
    whole = torch.empty(0, dtype=t.dtype).set_(t.untyped_storage())
    return whole.cuda().as_strided(t.shape, t.stride(), t.storage_offset())


def _triton_kernel(operator: str, backward: bool) -> Callable[..., Any]:
    """Return the operator with its tensors on the GPU. Without a GPU, the kernel's PTX is executed on the CPU."""
    name = operator + "_backward" if backward else operator

    def executed(*args: Any) -> Any:
        served = _backends.triton.serves(*filter(is_floating, args[backward:]))
        return (_backends.triton.kernel(operator, backward) if served else getattr(reference, name))(*args)

    def dispatched(*args: Any) -> Any:
        found = getattr(torch.ops.mx_driving, name).default(*map(on_gpu, args))
        return tuple(t.cpu() for t in found) if backward else found.cpu()

    return dispatched if ON_GPU else executed


def forward_of(implementation: str, operator: str) -> Callable[..., Tensor]:
    if implementation == "triton":
        return _triton_kernel(operator, False)
    ours = torch.ops.mx_driving if operator == POOL else mx_driving  # the public function has the vendor's parameters
    return getattr(reference if implementation == "reference" else ours, operator)


def gradients_of(implementation, operator, grad: Tensor, args, mask: list[bool] | None = None) -> tuple[Tensor, ...]:
    mask = mask or [True] * len(DIFFERENTIABLE[operator])
    if implementation == "triton":
        return _triton_kernel(operator, True)(grad, *args, mask)
    if implementation == "reference":
        return getattr(reference, operator + "_backward")(grad, *args, mask)
    return getattr(torch.ops.mx_driving, operator + "_backward").default(grad, *args, mask)


def is_floating(a: Any) -> bool:
    return isinstance(a, Tensor) and a.is_floating_point()


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    return tuple(a.to(dtype) if is_floating(a) else a for a in args)


def grad_for(operator: str, args: tuple[Any, ...], seed: int = 1) -> Tensor:
    if operator == POOL:
        shape = args[5], args[0].shape[1], *args[6:]
    else:
        shape = args[0].shape[0], args[3].shape[1], args[0].shape[2:].numel()
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def truth_of(operator: str, args: tuple[Tensor, ...], grad: Tensor) -> truth.Truth:
    def array(i: int, a: Any) -> Any:
        if not isinstance(a, Tensor):
            return a
        return a.detach().double().numpy() if a.is_floating_point() or i == 3 else a.numpy()

    return _truth(operator, _Numbers([*map(array, range(len(args)), args), grad.double().numpy()]))


class _Numbers:
    """Inputs that compare equal if their numbers are equal."""

    def __init__(self, inputs: list[Any]) -> None:
        self.inputs = inputs
        self.numbers = [(a.shape, a.dtype, a.tobytes()) if isinstance(a, np.ndarray) else a for a in inputs]

    def __hash__(self) -> int:
        return 0  # `_truth` caches one entry

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Numbers) and self.numbers == other.numbers


@functools.lru_cache(maxsize=1)
def _truth(operator: str, numbers: _Numbers) -> truth.Truth:
    """Compute truth, or return that of the last call, because the next implementation gets the same inputs."""
    return getattr(truth, operator)(*numbers.inputs)


def assert_near(true: truth.Truth, operator: str, args: tuple[Tensor, ...], found: Sequence[Tensor]):
    """Check that an output and its gradients are as near the truth as their dtypes allow."""
    wide = any(a.dtype == torch.float64 for a in args if isinstance(a, Tensor))
    compute = torch.float64 if wide else torch.float32
    extent = int(args[1].max()) if args[1].numel() else 1
    weights = args[WEIGHTS[operator]]
    samples = weights.numel() if operator in WITH_LOGITS else args[3].numel() // 2
    terms = max(1, weights[0, 0].numel() * 4, args[0].shape[-1] * 4, samples)
    inputs = [args[0], *(args[i] for i in DIFFERENTIABLE[operator])]
    for place, (got, like) in enumerate(zip(found, inputs, strict=True)):
        expected, scale = true.results[place], true.scales[place]
        assert got.dtype == like.dtype
        assert tuple(got.shape) == expected.shape
        touched = got.detach().ne(0).numpy() | (expected != 0)  # most of a large map is zero in both
        error = np.abs(got.detach()[torch.from_numpy(touched)].double().numpy() - expected[touched])
        limit = tolerance.allowed(got.dtype, compute, expected[touched], scale, terms, extent)
        worst = (error / np.maximum(limit, 1e-300)).max(initial=0.0)
        assert worst <= 1, f"result {place}: {worst:.3g} times the allowed error"
