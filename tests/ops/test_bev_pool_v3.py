"""bev_pool_v3: values and gradients beside float64 truth, memory, threads, transforms, and the public function."""

import re
from typing import Any, NamedTuple

import cases
import numpy as np
import pytest
import torch
import values
from cases import POOL
from refusals import said
from small_cases import inputs_of
from torch import Tensor
from torch.testing import assert_close
from torch.utils.flop_counter import FlopCounterMode
from values import DTYPES, NATIVE, covering, natively, skip_unless_every_kernel

import mx_driving
from mx_driving import _backends
from mx_driving._dispatch.registered import REGISTERED

TRITON = ["triton"] if cases.EVERY_KERNEL and _backends.triton.why_not() is None else []
everywhere = pytest.mark.parametrize("implementation", ["reference", *NATIVE, *TRITON], indirect=True)
on_the_cpu = pytest.mark.parametrize("implementation", ["reference", *NATIVE], indirect=True)
# Limits relative to the largest sum. A sum has some hundred products in float32.
NEAR = {torch.float64: 1e-14, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


class Points(NamedTuple):
    """The operator's arguments."""

    feat: Tensor
    depth: Tensor
    ranks_feat: Tensor
    ranks_depth: Tensor
    ranks_bev: Tensor
    sizes: tuple[int, int, int, int]

    @property
    def args(self) -> tuple[Any, ...]:
        return (*self[:5], *self.sizes)

    def cast(self, dtype: torch.dtype):
        return self._replace(feat=self.feat.to(dtype), depth=self.depth.to(dtype))


def points(*args: Any, **options: Any) -> Points:
    inputs = cases.pooling(*args, **options)
    return Points(*inputs[:5], inputs[5:])


def truth(p: Points, grad: Tensor) -> list[np.ndarray]:
    """Compute output and both gradients in float64, from the equation."""
    feat, depth, g = (t.detach().double().numpy() for t in (p.feat, p.depth, grad))
    of_feat, of_depth, cell = (t.numpy() for t in (p.ranks_feat, p.ranks_depth, p.ranks_bev))
    output = np.zeros((int(np.prod(p.sizes)), feat.shape[1]))
    np.add.at(output, cell, depth[of_depth, None] * feat[of_feat])
    rows = np.moveaxis(g, 1, -1).reshape(output.shape)[cell]
    grad_feat, grad_depth = np.zeros_like(feat), np.zeros_like(depth)
    np.add.at(grad_feat, of_feat, depth[of_depth, None] * rows)
    np.add.at(grad_depth, of_depth, (rows * feat[of_feat]).sum(1))
    return [np.moveaxis(output.reshape(*p.sizes, feat.shape[1]), -1, 1), grad_feat, grad_depth]


def run(implementation: str, p: Points, grad: Tensor, mask=(True, True)) -> list[Tensor]:
    return values.run(implementation, POOL, p.args, grad, list(mask))


def grad_for(p: Points) -> Tensor:
    return cases.grad_for(POOL, p.args).to(p.feat.dtype)


def assert_near(found: list[Tensor], p: Points, grad: Tensor) -> None:
    for got, true in zip(found, truth(p, grad), strict=True):
        assert got.shape == true.shape
        far = np.abs(got.double().numpy() - true).max(initial=0)
        assert far <= NEAR[got.dtype] * max(1, np.abs(true).max(initial=0)), far


SHAPES = {
    **{f"{c} channels": {"n": 300, "channels": c} for c in (1, 3, 8, 16, 37, 64, 80, 130)},
    "one cell": {"n": 1500, "channels": 8, "sizes": (1, 1, 1, 1)},
    "blocks of cells": {"n": 5000, "channels": 20, "sizes": (2, 3, 7, 19), "rows": 70, "depths": 500},
    "sorted": {"n": 4000, "channels": 64, "sizes": (1, 1, 16, 16), "order": "sorted"},
    "int64": {"n": 200, "channels": 16, "index": torch.int64},
    "no points": {"n": 0, "channels": 8},
    "no channels": {"n": 30, "channels": 0},
    "no cells": {"n": 0, "channels": 8, "sizes": (1, 1, 0, 4)},
}


@covering("shape", list(SHAPES), DTYPES)
def test_values(implementation, poisoned_allocations, shape, dtype):
    p = points(**SHAPES[shape]).cast(dtype)
    grad = grad_for(p)
    assert_near(run(implementation, p, grad), p, grad)


@pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not()))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("channels", [1, 8, 37, 130])
@pytest.mark.parametrize("deterministic", [False, True])
def test_triton(request, deterministic, channels, dtype):
    """Kernels walk over points. In deterministic mode, which the fixture enables, they sort points first."""
    if (channels == 8) == (dtype == torch.float32):
        skip_unless_every_kernel("triton")
    if deterministic:
        request.getfixturevalue("poisoned_allocations")
    p = points(40, channels, (1, 2, 2, 3)).cast(dtype)
    grad = grad_for(p)
    found = run("triton", p, grad)
    assert_near(found, p, grad)
    for mask in ((True, False), (False, True)):
        for wanted, a, b in zip(mask, run("triton", p, grad, mask)[1:], found[1:], strict=True):
            assert_close(a, b if wanted else b.new_empty(0))
    for ranks in p[2:5]:  # GPUs do not check ranks: a rank without a row adds nothing
        ranks[::7], ranks[3] = 1000, -5
    inside = (p.ranks_feat < 9) & (p.ranks_depth < 40) & (p.ranks_bev < 12)
    inside &= (p.ranks_feat >= 0) & (p.ranks_depth >= 0) & (p.ranks_bev >= 0)
    kept = p._replace(**{name: getattr(p, name)[inside] for name in ("ranks_feat", "ranks_depth", "ranks_bev")})
    assert_close(run("triton", p, grad), run("triton", kept, grad))


@everywhere
def test_mixed_dtypes_compute_in_the_widest(implementation):
    p = points(100, 16)
    for feat, depth in ((torch.float32, torch.float64), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)):
        mixed = p._replace(feat=p.feat.to(feat), depth=p.depth.to(depth))
        grad = grad_for(mixed)
        found = run(implementation, mixed, grad)
        assert [t.dtype for t in found] == [feat, feat, depth]
        assert_near(found, mixed, grad)


@pytest.mark.skipif(_backends.triton.why_not() is not None, reason=str(_backends.triton.why_not()))
@pytest.mark.parametrize("deterministic", [False, True])
def test_triton_sums_runs_of_equal_ranks(deterministic):
    """Runs span several walks and programs; a walk ends early; torch has another default dtype."""
    p = points(1300, 64, (2, 1, 3, 5), rows=12, depths=900).cast(torch.float32)
    p.ranks_bev[130:700] = 3
    p.ranks_feat[140:220] = 5
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(deterministic)
    assert_near(run("triton", p, grad_for(p)), p, grad_for(p))


@everywhere
def test_any_strides(implementation, same_bits):
    p = points(700, 24, (2, 2, 5, 33)).cast(torch.float32 if implementation == "triton" else torch.float64)
    grad = grad_for(p)
    expected = run(implementation, p, grad)
    every_other = [torch.stack([t, t + 1], -1).flatten(-2)[::2] for t in p[1:5]]
    ranks_last = torch.stack([p.ranks_bev, p.ranks_bev], -1)[:, 0]
    strided = Points(p.feat.t().contiguous().t(), *every_other[:3], ranks_last, p.sizes)
    channels_last = grad.movedim(1, -1).contiguous().movedim(-1, 1)
    padded = torch.stack([grad, grad], -1)[..., 0]
    for given in (channels_last, padded):
        assert all(torch.equal(a, b) for a, b in zip(run(implementation, strided, given), expected, strict=True))


@natively
def test_the_same_bits_for_any_threads_and_any_order_between_cells(implementation, every_thread):
    p = points(9000, 40, (1, 1, 24, 24), rows=200, depths=2000).cast(torch.float32)
    order = p.ranks_bev.sort(stable=True).indices
    by_cell = Points(p.feat, p.depth, *(t[order] for t in p[2:5]), p.sizes)
    grad, first = grad_for(p), None
    for threads in (1, 2, 3, 8, 24):
        torch.set_num_threads(threads)
        found = run(implementation, p, grad)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(first, found, strict=True))
        assert torch.equal(torch.ops.mx_driving.bev_pool_v3(*by_cell.args), first[0])


@natively
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [1, 37, 64])
def test_the_same_bits_for_sorted_points_of_any_form(implementation, every_thread, dtype, channels):
    p = points(3000, channels, (2, 1, 9, 11), rows=50, depths=400).cast(dtype)
    order = p.ranks_bev.sort(stable=True).indices
    sums = torch.ops.mx_driving.bev_pool_v3(*p.args)
    sorted_ = p._replace(**{name: getattr(p, name)[order] for name in ("ranks_feat", "ranks_depth", "ranks_bev")})
    every_other = torch.stack([p.depth, p.depth], -1)[:, 0]
    longs = {f"ranks_{name}": getattr(sorted_, f"ranks_{name}").long() for name in ("feat", "depth", "bev")}
    forms = [{}, {"depth": every_other}, *({name: ranks} for name, ranks in longs.items()), longs]
    for form in forms:
        assert torch.equal(torch.ops.mx_driving.bev_pool_v3(*sorted_._replace(**form).args), sums), form.keys()


@natively
def test_any_output_of_the_c_interface(implementation):
    p = points(300, 20, (2, 2, 5, 9)).cast(torch.float32)
    both = torch.full((2, 20, 2, 5, 9, 2), 7.0)
    packed = [_backends.native._pack(t) for t in (*p[:5], both[..., 0])]
    assert _backends.native._run(b"bev_pool_v3", packed, ()) == 0
    assert torch.equal(both[..., 0], torch.ops.mx_driving.bev_pool_v3(*p.args))
    assert bool((both[..., 1] == 7).all())


@natively
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_points_that_are_nearly_sorted(implementation, every_thread, threads):
    """Cells fall, or rise only within the part of a thread."""
    torch.set_num_threads(threads)
    p = points(900, 8, order="sorted")
    for cells in (p.ranks_bev.flip(0), p.ranks_bev.roll(450), p.ranks_bev.roll(300)):
        other = p._replace(ranks_bev=cells.contiguous(), ranks_feat=p.ranks_feat.sort(descending=True).values)
        assert_near(run(implementation, other, grad_for(p)), other, grad_for(p))


@everywhere
def test_nan_and_infinity_go_where_their_product_goes(implementation):
    for number in (float("nan"), float("inf")):
        p = points(60, 8, rows=30)
        p.feat[p.ranks_feat[0].item()] = number
        p.depth[p.ranks_depth[1].item()] = number
        output = run(implementation, p, grad_for(p))[0].movedim(1, -1).reshape(-1, 8)
        wrong = (p.ranks_feat == p.ranks_feat[0]) | (p.ranks_depth == p.ranks_depth[1])
        cells = torch.zeros(len(output), dtype=torch.bool)
        cells[p.ranks_bev[wrong].long()] = True
        assert torch.equal(~output.isfinite().all(1), cells)


# ---- as a part of PyTorch


def public(p: Points) -> tuple[Any, ...]:
    return p.depth, p.feat, p.ranks_depth, p.ranks_feat, p.ranks_bev, (*p.sizes, p.feat.shape[1])


def test_vmap():
    p = points(40, 6).cast(torch.float32)
    feats, ranks = torch.randn(3, *p.feat.shape), torch.stack([p.ranks_bev, p.ranks_bev.flip(0), p.ranks_bev.roll(1)])
    each = lambda feat, ranks: torch.ops.mx_driving.bev_pool_v3(feat, *p.args[1:4], ranks, *p.sizes)  # noqa: E731
    found = torch.vmap(each)(feats, ranks)
    assert torch.equal(found, torch.stack([each(f, r) for f, r in zip(feats, ranks, strict=True)]))


@pytest.mark.parametrize("function", [mx_driving.bev_pool_v3, mx_driving.bev_pool_v2, "bev_pool"])
def test_forward_mode_over_expanded_inputs(function):
    """torch refuses to make a dual tensor of an expanded tensor, whatever function follows. A function may expand inside."""
    p = points(40, 6)
    depth, feat, *ranks = public(p)
    more = (torch.arange(40), torch.ones(40, dtype=torch.int64)) if function is mx_driving.bev_pool_v2 else ()
    place = torch.stack([torch.randint(size, (9,)) for size in (5, 7, 1, 2)], 1)
    at, along = torch.tensor([[0.5, 2.0], [1.0, -3.0]], dtype=torch.float64).unbind()
    at, along = at.unbind(), along.unbind()

    def call(d, f, copy=torch.Tensor.view_as):
        d, f = (copy(t, t) for t in (d.expand(depth.shape), f.expand(feat.shape)))
        return mx_driving.bev_pool(f * d[0], place, 2, 1, 5, 7) if function == "bev_pool" else function(d, f, *ranks, *more)

    def clone(t, _):
        return t.clone()

    for run in (torch.func.jvp, lambda f, *rows: torch.func.jvp(torch.func.jacrev(f), *rows)):
        assert_close(run(call, at, along), run(lambda *rows: call(*rows, clone), at, along))


@pytest.mark.parametrize("wanted", [(0, 1), (0,), (1,)])
def test_flops(wanted):
    """Of the forward, and of each gradient that is needed."""
    with FlopCounterMode(display=False) as counter:
        torch.ops.mx_driving.bev_pool_v3(*inputs_of(POOL, wanted)).sum().backward()
    assert counter.get_total_flops() == (1 + len(wanted)) * 2 * 30 * 3


# ---- the public function


def test_without_depth_rows_are_summed_as_they_are():
    feat = torch.randn(2, 8, 3, 5, 4)
    place = torch.stack([torch.randint(size, (50,)) for size in (3, 5, 4, 2)], 1).int()
    h, w, d, b = place.long().unbind(1)
    expected = torch.zeros(2, 4, 3, 5, 8).index_put((b, d, h, w), feat.view(-1, 8)[:50], accumulate=True)
    found = mx_driving.bev_pool_v3(None, feat, None, None, place, [2, 4, 3, 5, 8])
    assert_close(found, expected.movedim(-1, 1))
    assert_close(mx_driving.bev_pool(feat.view(-1, 8)[:50], place, 2, 4, 3, 5), found)


def test_intervals_that_are_runs_of_cells_give_the_same():
    p = points(200, 8, order="sorted")
    runs = torch.unique_consecutive(p.ranks_bev, return_counts=True)[1]
    starts = runs.cumsum(0) - runs
    assert torch.equal(mx_driving.bev_pool_v2(*public(p), starts, runs), mx_driving.bev_pool_v3(*public(p)))
    first = mx_driving.bev_pool_v2(*public(p), starts[:1], runs[:1])
    assert_close(first.sum(), mx_driving.bev_pool_v3(*public(p)).movedim(1, -1).flatten(0, 3)[p.ranks_bev[0]].sum())


WRONG = {
    "ranks_feat[3] must be one of the 9 rows of feat; got 9": {"ranks_feat": (3, 9)},
    "ranks_depth[0] must be one of the 40 elements of depth; got -1": {"ranks_depth": (0, -1)},
    "ranks_bev[5] must be one of the 70 cells; got 70": {"ranks_bev": (5, 70)},
    "ranks_bev[1] must be one of the 70 cells; got -2147483648": {"ranks_bev": (1, -(2**31))},
}


@on_the_cpu
@pytest.mark.parametrize("sentence", WRONG)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_rank_without_a_row_is_refused(implementation, sentence, index):
    p = points(30, 8, index=index)
    for name, (place, rank) in WRONG[sentence].items():
        getattr(p, name)[place] = rank
    for backward, args in ((False, p.args), (True, (grad_for(p), *p.args, [True, True]))):
        registered = REGISTERED["bev_pool_v3" + "_backward" * backward]
        by_ctypes = _backends.native.Kernel("bev_pool_v3", backward)  # the kernel after data_checks(), and before torch 2.10
        for run in [registered.run_reference] if implementation == "reference" else [registered.op, by_ctypes]:
            with pytest.raises((RuntimeError, ValueError), match=f"^{re.escape(sentence)}$"):
                run(*args)
    if implementation != "reference":
        depth, feat, *ranks, shape = public(p)
        vmapped = torch.vmap(lambda *ranks: mx_driving.bev_pool_v3(depth, feat, *ranks, shape))
        for call in (lambda: mx_driving.bev_pool_v3(*public(p)), lambda: vmapped(*(t[None] for t in ranks))):
            assert said(call) == sentence


def test_sizes_that_the_operator_refuses():
    """Cells without channels take no memory, but counters of their points would."""
    p = points(30, 8)
    with pytest.raises((RuntimeError, ValueError), match=r"^h must not be negative; got -5$"):
        torch.ops.mx_driving.bev_pool_v3(*p[:5], 2, 1, -5, 7)
    many = torch.empty(2**30, 0, 2**20, 1, 1), p.feat[:, :0], *p[1:5], 2**30, 2**20, 1, 1, [False, True]
    by_ctypes = _backends.native.why_by_ctypes()  # then Python checks before the kernel asks for memory
    refused = (ValueError, r"fewer than 2\*\*48") if by_ctypes else (RuntimeError, "not enough memory")
    with pytest.raises(refused[0], match=refused[1]):
        torch.ops.mx_driving.bev_pool_v3_backward(*many)
