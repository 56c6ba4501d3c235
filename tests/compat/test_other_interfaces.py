"""Extensions with a known name and other arguments: TrackFormer's attention, without level starts, and FlashOCC's pool."""

import pathlib
import types

import cases
import numpy as np
import pytest
import torch
from attention_modules import direction_of, library, results
from recorded_calls import replay
from torch.testing import assert_close
from values import DTYPES

import mx_driving
from mx_driving import compat
from mx_driving._foreign_functions import find_autograd_function
from mx_driving._patch._code import Reader
from mx_driving._patch._search import is_core
from mx_driving._patch.known import Known, read_table
from mx_driving_portable import record

ATTENTION = cases.multi_scale(2, 5, 8, 3, [(4, 6), (2, 3)], 2)
TRACKFORMER = ["value", "value_spatial_shapes", "sampling_locations", "attention_weights", "im2col_step"]
FLASHOCC = ["feats", "coords", "ranks", "B", "D", "H", "W", "pooling_method"]
B, D, H, W, C = SHAPE = 2, 3, 4, 6, 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_without_level_starts(extension, dtype):
    """TrackFormer and TransTrack have such an attention."""
    inputs = cases.cast(ATTENTION, dtype)
    value, shapes, _, *rest = inputs
    grad = cases.grad_for(cases.MULTI_SCALE, inputs).to(dtype)
    module = extension("MultiScaleDeformableAttention")
    output = module.ms_deform_attn_forward(value, shapes, *rest, 64)
    gradients = module.ms_deform_attn_backward(value, shapes, *rest, grad, 64)
    cases.assert_near(cases.truth_of(cases.MULTI_SCALE, inputs, grad), cases.MULTI_SCALE, inputs, [output, *gradients])


def points():
    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randint(size, (200,), generator=generator) for size in (W, H, D, B)], 1)
    places = places[(places @ torch.tensor([H * D * B, D * B, B, 1])).argsort()]
    lengths = torch.unique_consecutive(places, dim=0, return_counts=True)[1]
    return places.int(), lengths.int(), (lengths.cumsum(0) - lengths).int(), *SHAPE[:4]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_pool_with_x_innermost(extension, dtype):
    """FlashOCC has such a pool. The truth is a loop over points in float64."""
    places, *rest = points()
    feat, grad = torch.randn(len(places), C).to(dtype), torch.randn(SHAPE).to(dtype)
    module, true = extension("bev_pool_ext"), np.zeros(SHAPE)
    for row, (x, y, z, b) in zip(feat.double().numpy(), places.tolist(), strict=True):
        true[b, z, y, x] += row
    output = module.bev_sum_pool_forward(feat, places, *rest)
    assert output.dtype == dtype
    close = 8 * torch.finfo(dtype).eps  # sums of up to five rows, rounded once to the dtype
    assert_close(output.double(), torch.from_numpy(true), rtol=close, atol=close)
    x, y, z, b = places.long().unbind(1)
    assert torch.equal(module.bev_sum_pool_backward(grad, places, *rest), grad[b, z, y, x])
    with pytest.raises(ValueError, match=r"^geom_xyzb must have shape \(n, 4\); got \(200, 3\)$"):
        module.bev_sum_pool_forward(feat, places[:, :3], *rest)


SOURCE = """
class {name}(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {parameters}):
        return {called}({parameters})

    @staticmethod
    def backward(ctx, grad):
        raise AssertionError
"""


def test_patch_serves_both(monkeypatch):
    """Without the extensions, `apply` has the operators' results, also if torch.compile reads forward and backward."""
    value, shapes, starts, *rest = ATTENTION
    places, _, _, *sizes = points()
    feat, ranks = torch.randn(len(places), C, dtype=torch.float64), torch.arange(len(places))
    compiled = "MultiScaleDeformableAttention.ms_deform_attn_forward", "bev_pool_ext.bev_sum_pool_forward"
    classes = {"MSDeformAttnFunction": TRACKFORMER, "QuickBevPoolingCuda": FLASHOCC}
    pairs = zip(classes.items(), compiled, strict=True)
    source = "".join(SOURCE.format(name=name, parameters=", ".join(words), called=called) for (name, words), called in pairs)
    module = library(*(types.ModuleType(called.partition(".")[0]) for called in compiled), source=source)
    sampled = results(mx_driving.multi_scale_deformable_attn, value, shapes, starts, *rest)
    pooled = results(mx_driving.bev_pool, feat, places[:, [1, 0, 2, 3]], *sizes)
    for name, form in {"MSDeformAttnFunction": "attention_without_starts", "QuickBevPoolingCuda": "sorted_xyzb"}.items():
        monkeypatch.setitem(read_table(), Reader(is_core).read(getattr(module, name)).key, Known(form, "a test it"))
    with mx_driving.patched(module) as done:
        assert done.replaced == tuple(f"a_library.{name}" for name in classes)
        apply, pool = module.MSDeformAttnFunction.apply, module.QuickBevPoolingCuda.apply
        for attention in (apply, torch.compile(lambda *args: apply(*args), backend="eager", fullgraph=True)):
            assert all(map(torch.equal, results(attention, value, shapes, *rest, 64), sampled))
        output, gradient = results(pool, feat, places, ranks, *sizes, "sum")
        assert torch.equal(output.permute(0, 4, 1, 2, 3), pooled[0])
        x, y, z, b = places.long().unbind(1)
        assert torch.equal(gradient, direction_of(output)[b, z, y, x])
        with pytest.raises(NotImplementedError, match="the maximum of points is not compiled"):
            pool(feat, places, ranks, *sizes, "max")
    assert find_autograd_function("Other", FLASHOCC) is find_autograd_function("QuickCumsum", ["x"]) is None


def maps_apart():
    """The older interface of an aggregation, whose output has a row for each point: Sparse4D before v3, GaussianFormer."""
    shapes, starts = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])
    return torch.randn(2, 3, 30, 8), shapes, starts, torch.rand(2, 7, 3, 2), torch.rand(2, 7, 3, 2, 4)


def test_each_is_recorded_and_judged(extension, tmp_path):
    value, shapes, _, *weighted = cases.cast(ATTENTION, torch.float32)
    places, *rest = points()
    attention, pool = extension("MultiScaleDeformableAttention"), extension("bev_pool_ext")
    with record.recording(tmp_path / "calls", every=1):
        output = attention.ms_deform_attn_forward(value, shapes, *weighted, 64)
        attention.ms_deform_attn_backward(value, shapes, *weighted, torch.randn_like(output), 64)
        pool.bev_sum_pool_forward(torch.randn(len(places), C), places, *rest)
        pool.bev_sum_pool_backward(torch.randn(SHAPE), places, *rest)
        aggregation, older = extension("deformable_aggregation_ext"), maps_apart()
        output = aggregation.deformable_aggregation_forward(*older)
        zeros = [torch.zeros_like(older[i]) for i in (0, 3, 4)]
        aggregation.deformable_aggregation_backward(*older, torch.randn_like(output), *zeros)
    judged = replay(tmp_path / "calls")
    assert judged.output.rstrip().endswith("all is well: 6 calls are right"), judged.output
    assert all(judged.output.count(f"│ grad_{name} ") == 2 for name in ("value", "locations", "weights"))


@pytest.mark.parametrize("name", compat.NAMES)
def test_a_function_that_is_not_ours_says_so_when_it_is_called(name):
    """This holds for every stand-in. FlashOCC's bev_pool_ext has such a function, a maximum."""
    contents = compat._first.contents(name) or compat._last.contents(name)
    assert contents is not None
    for missing in ("bev_max_pool_forward", "bev_max_pool_backward"):
        sentence = f"^{name}.{missing} is not compiled; mx_driving.compat stands in for .* only$"
        with pytest.raises(NotImplementedError, match=sentence):
            contents["__getattr__"](missing)(torch.rand(1))


def test_the_page_names_every_stand_in():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "compat.md").read_text()
    assert [name for name in compat.NAMES if f"`{name}`" not in page or f"`{name}`" not in str(compat.__doc__)] == []
