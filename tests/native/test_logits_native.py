"""The native kernels of operators with logits: exp, softmax, and windows around ties.

test_plan.py has each way to a gradient; ops/test_with_logits.py tests all implementations.
"""

import cases
import logits_cases
import numpy as np
import pytest
import torch
from cases import GEOMETRIC_LOGITS
from torch import Tensor
from values import DTYPES, compare, natively

import mx_driving

pytestmark = [natively, pytest.mark.usefixtures("implementation")]
PYRAMID = [(23, 31), (11, 17), (6, 7)]


def weights_of(logits: Tensor) -> Tensor:
    """Return the softmax of rows of logits [rows, samples] as outputs: the value of sample i is 1 in channel i."""
    rows, samples = logits.shape
    assert samples & samples - 1 == 0
    like = logits.dtype
    reference_points = torch.tensor([0.0, 0.5], dtype=like).expand(1, rows, 1, 2)
    offsets = torch.zeros(1, rows, 1, 1, samples, 2, dtype=like)
    offsets[..., 0] = torch.arange(samples) + 0.5
    value, tables = torch.eye(samples, dtype=like)[None, :, None], (torch.tensor([[1, samples]]), torch.tensor([0]))
    given = (value, *tables, reference_points, offsets, logits.view(1, rows, 1, 1, samples))
    return mx_driving.multi_scale_deformable_attn_with_logits(*given)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_is_right_to_a_few_ulps(dtype):
    """Compare with numpy's long double, from 0 down to where the result underflows to 0."""
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


ONE, TWO = [(20, 10)], [(5, 7), (3, 4)]
WINDOWS = [(ONE, (3, 5), 40, 4), (ONE, (4, 4), 600, 4), (PYRAMID, (2, 2), 60, 4)]
WINDOWS += [(TWO, (1, 3), 100, 8), (TWO, (3, 3), 70, 3), ([(3, 3)], (1, 1), 9, 1)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shapes", "window", "queries", "heads"), WINDOWS)
def test_windows_around_ties(dtype, shapes, window, queries, heads):
    """Reference points lie on a grid of 1 / 8 of a map: many pixels are ties, and another pixel would be another row. Some
    reference points lie beyond the map or are NaN."""
    *_, references, points, logits = logits_cases.geometric(2, queries, 16, heads, [(7, 9)] * len(shapes), window)
    shapes, starts = cases.levels_of(*shapes)
    generator = torch.Generator().manual_seed(2)
    value = torch.randn(2, int(shapes.prod(-1).sum()), heads, 16, dtype=torch.float64, generator=generator)
    references = torch.randint(-2, 11, references.shape, generator=generator).double() / 8
    references[0, :3, 0, 0] = torch.tensor([float("nan"), float("inf"), -float("inf")], dtype=torch.float64)
    compare("native", GEOMETRIC_LOGITS, cases.cast((value, shapes, starts, references, points, logits), dtype))
