"""No byte outside the tensors is read into a result, or written, for any index tables. Every output is written. Many calls take
no more memory than few calls."""

import itertools
import json
import subprocess
import sys

import cases
import pytest
import torch
from small_cases import GOOD
from values import DTYPES, covering, run

from mx_driving import _backends


def embedded(t):
    """Return a copy of t in the middle of a buffer of NaN, or of a large negative integer, and the buffer."""
    if not isinstance(t, torch.Tensor):
        return t, torch.empty(0)
    canary = float("nan") if t.is_floating_point() else -(2**30)
    buffer = torch.full((t.numel() + 512,), canary, dtype=t.dtype)
    inner = buffer[256 : 256 + t.numel()].view(t.shape)
    inner.copy_(t)
    return inner, buffer


@covering("case", [*itertools.product((*cases.OPERATORS, cases.POOL), (1, 3, 8, 37, 64))], DTYPES)
def test_surroundings_are_neither_read_nor_written(implementation, poisoned_allocations, case, dtype):
    operator, channels = case
    make = {
        cases.MULTI_SCALE: lambda: cases.multi_scale(2, 9, channels, 2, [(3, 4), (2, 2)], 3, margin=0.5),
        cases.AGGREGATION: lambda: cases.aggregation(2, 5, 3, channels, 1, [[(3, 4)], [(2, 2)]]),
        cases.GEOMETRIC: lambda: cases.geometric(2, 9, channels, 2, [(3, 4), (2, 2)], 3),
        cases.POOL: lambda: cases.pooling(77, channels),
    }[operator]
    plain = cases.cast(make(), dtype)
    grad = cases.grad_for(operator, plain).to(dtype)
    (*inner, inner_grad), buffers = zip(*(embedded(t) for t in (*plain, grad)), strict=True)
    before = [b.clone() for b in buffers]
    results = run(implementation, operator, inner, inner_grad)
    for a, b in zip(results, run(implementation, operator, plain, grad), strict=True):
        assert a.isfinite().all()
        assert torch.equal(a, b)
    assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(buffers, before, strict=True))


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_reference_masks_what_tables_push_outside(operator):
    """On devices where reading tables is not free, no error is raised: missing rows count as zero."""
    args = list(GOOD[operator]())
    args[2] = args[2] + 1000
    assert not cases.forward_of("reference", operator)(*args).any()
    for g in cases.gradients_of("reference", operator, cases.grad_for(operator, tuple(args)).float(), tuple(args)):
        assert not g.any()


ENDLESS = 10**12  # queries of inputs without memory of their own


def _endless(operator, sizes):
    """Return inputs of ENDLESS queries with one size of 0, and grad_output."""
    one, n = torch.ones(1), {"bs": 1, "groups": 2, "channels": 4, "maps": 1, "points": 2, **sizes}
    shapes, starts = torch.tensor([[2, 2]])[: n["maps"]], torch.tensor([0])[: n["maps"]]
    if operator == cases.AGGREGATION:
        value = torch.ones(n["bs"], 4, n["channels"])
        shapes, starts = shapes[:, None], starts[:, None]
        lead = (n["bs"], ENDLESS, n["points"], n["maps"])
        return value, shapes, starts, one.expand(*lead, 2), one.expand(*lead, 1, 2), one.expand(n["bs"], ENDLESS, n["channels"])
    value = torch.ones(n["bs"], 4, n["groups"], n["channels"])
    lead = (n["bs"], ENDLESS, n["groups"], n["maps"], n["points"])
    grad = one.expand(n["bs"], ENDLESS, n["groups"] * n["channels"])
    return value, shapes, starts, one.expand(*lead, 2), one.expand(lead), grad


NOTHING = [*itertools.product(cases.OPERATORS, ("bs", "groups", "channels", "maps", "points"))]
NOTHING.remove((cases.AGGREGATION, "groups"))  # aggregation refuses that


@pytest.mark.skipif(_backends.native.why_not() is not None, reason=str(_backends.native.why_not()))
@pytest.mark.parametrize(("operator", "nothing"), NOTHING)
def test_nothing_to_do_ends_at_once(poisoned_allocations, operator, nothing):
    """A loop over the queries would take hours. The gradient of value is still zero, if it has elements."""
    *args, grad = _endless(operator, {nothing: 0})
    if nothing in ("bs", "groups", "channels"):
        assert getattr(torch.ops.mx_driving, operator)(*args).numel() == 0
    samples = nothing != "channels"  # their gradients would be 10^12 elements
    mask = [True] + [samples] * (len(cases.DIFFERENTIABLE[operator]) - 1)
    of_value, *others = getattr(torch.ops.mx_driving, operator + "_backward")(grad, *args, mask)
    assert of_value.shape == args[0].shape
    assert not of_value.any()
    assert all(g.numel() == 0 for g in others)


@pytest.mark.skipif(_backends.native.why_not() is not None, reason=str(_backends.native.why_not()))
@pytest.mark.parametrize("operator", cases.OPERATORS)
@pytest.mark.parametrize(("places", "expected"), [(2**34, "not enough memory"), (2**56, r"2\*\*48 elements")])
def test_inputs_that_count_beyond_memory_are_refused(operator, places, expected):
    """A query has more points than scratch memory can hold, or than bytes can be counted. They are one expanded element."""
    args = GOOD[operator]()
    axis = 2 if operator == cases.AGGREGATION else 4
    args = [t[:1, :1] if i > 2 else t[:1] if i == 0 else t for i, t in enumerate(args)]
    sizes = [list(args[i].shape) for i in (3, 4)]
    for size in sizes:
        size[axis] = places
    locations, weights = (args[i].select(axis, 0).unsqueeze(axis).expand(size) for i, size in zip((3, 4), sizes, strict=True))
    args = [*args[:3], locations, weights]
    with pytest.raises(RuntimeError, match=expected):
        getattr(torch.ops.mx_driving, operator)(*args)


# Each number has new sizes. It makes four calls of one of four operators, by torch.ops and by the public function. A tenth of
# numbers adds autograd, and kernels by ctypes, whose checks in Python are cached. A hundredth adds a call that is refused.
SOAK = """
import gc, json, math, os, sys
import torch
import mx_driving
from mx_driving._dispatch.registered import REGISTERED

torch.set_num_threads(1)
MEMORY, RANKS, SHAPES, STARTS = torch.rand(1_100), torch.zeros(7).long(), torch.tensor([[2, 2]]), torch.tensor([0])

def part(*shape):
    return MEMORY[: math.prod(shape)].view(shape)

def attention(queries, points, channels, rows):
    samples = 1, queries, 1, 1, points
    return part(1, rows, 1, channels), SHAPES, STARTS, part(*samples, 2), part(*samples)

def aggregation(anchors, points, channels, rows):
    samples = 1, anchors, points, 1
    return part(1, rows, channels), SHAPES[None], STARTS[None], part(*samples, 2), part(*samples, 1, 1)

def pool(rows, count, channels, cells):
    ranks = RANKS[:count]
    return part(rows, channels), part(5), ranks, ranks, ranks, 1, 1, 1, cells

def bev_pool_v3(feat, depth, ranks_feat, ranks_depth, ranks_bev, *sizes):
    return mx_driving.bev_pool_v3(depth, feat, ranks_depth, ranks_feat, ranks_bev, (*sizes, feat.shape[1]))

OPERATORS = [
    ("multi_scale_deformable_attn", attention, mx_driving.multi_scale_deformable_attn, [True] * 3),
    ("deformable_aggregation", aggregation, mx_driving.deformable_aggregation, [True] * 3),
    ("geometric_kernel_attention", attention, mx_driving.geometric_kernel_attention, [True] * 2),
    ("bev_pool_v3", pool, bev_pool_v3, [True] * 2),
]

def inputs_of(number):
    place = number * 7919 % (73 * 7 * 8 * 12)  # 7919 is prime: no sizes repeat, and large and small ones alternate
    return OPERATORS[number % 4][1](1 + place % 73, 1 + place // 73 % 7, 1 + place // 511 % 8, 4 + place // 4088)

def fill_caches_of_checks(number):
    name, _, public, mask = OPERATORS[number % 4]
    args = inputs_of(number)
    REGISTERED[name].check(*args)
    REGISTERED[name + "_backward"].check(public(*args), *args, mask)

def call(number):
    name, _, public, mask = OPERATORS[number % 4]
    args, op = inputs_of(number), REGISTERED[name].op
    for function in (public, op, public, op):
        output = function(*args)
    if number % 40 < 4:
        op(args[0].detach().requires_grad_(), *args[1:]).backward(output)
        REGISTERED[name].run("cpu", *args)
        REGISTERED[name + "_backward"].run("cpu", output, *args, mask)
    if number % 100 == 0:
        try:
            op(*args[:2], MEMORY, *args[3:])
        except (RuntimeError, TypeError, ValueError):  # ValueError by torch before 2.10
            pass

def measure():
    \"\"\"Return the resident memory, and the size of every cache and container of the package's modules.\"\"\"
    gc.collect()
    sizes = {}
    for module in [m for name, m in sys.modules.items() if name.partition(".")[0] == "mx_driving"]:
        for name, kept in vars(module).items():
            if hasattr(kept, "cache_info"):
                sizes[f"{module.__name__}.{name}"] = kept.cache_info().currsize
            elif isinstance(kept, (dict, list, set)):
                sizes[f"{module.__name__}.{name}"] = len(kept)
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"), sizes

results = []
for number in range(4_200):
    fill_caches_of_checks(number)
for first, last in ((0, 5_000), (5_000, 23_000)):
    for number in range(first, last):
        call(number)
    results.append(measure())
print(json.dumps(results))
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_100_000_calls_of_changing_sizes_hold_their_memory():
    """The first calls fill all caches. 79,000 other calls add no entry to a cache, and less than 27 bytes each. Without a leak
    they add up to 1 MB: Python allocates arenas of 1 MB."""
    done = subprocess.run([sys.executable, "-c", SOAK], capture_output=True, text=True, check=True)
    (before, caches_before), (after, caches_after) = json.loads(done.stdout)
    assert caches_before["mx_driving._operator.checks._fit"] == 4096
    assert caches_before == caches_after
    assert after - before < 2**21
