"""torch.library's own checks, torch.compile without graph breaks, and autocast."""

from __future__ import annotations

import cases
import pytest
import torch
from cases import MULTI_SCALE
from small_cases import GROWING, inputs_of
from torch._dynamo.testing import CompileCounter

import mx_driving


@pytest.mark.parametrize("operator", cases.EVERY)
def test_opcheck_forward(operator):
    result = torch.library.opcheck(getattr(torch.ops.mx_driving, operator).default, inputs_of(operator))
    assert set(result.values()) == {"SUCCESS"}


def opcheck_backward(operator, all_wanted, **options):
    args = inputs_of(operator)
    grad = cases.grad_for(operator, args).requires_grad_()
    mask = [True, *[all_wanted] * (len(cases.DIFFERENTIABLE[operator]) - 1)]
    backward = getattr(torch.ops.mx_driving, operator + "_backward").default
    assert set(torch.library.opcheck(backward, (grad, *args, mask), **options).values()) == {"SUCCESS"}


@pytest.mark.parametrize("operator", [cases.GEOMETRIC, cases.MULTI_SCALE_LOGITS])
def test_opcheck_backward(operator):
    """One bare and one with logits: their derivatives are one class and one composition for all."""
    opcheck_backward(operator, True)


@pytest.mark.parametrize("all_wanted", [False, True])
@pytest.mark.parametrize("operator", cases.EVERY)
def test_schema_and_fake_of_backward(operator, all_wanted):
    """What is not wanted is an empty tensor."""
    opcheck_backward(operator, all_wanted, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operator", cases.EVERY)
def test_compile_fullgraph(operator, dynamic):
    torch._dynamo.reset()
    function = getattr(mx_driving, operator)
    eager, compiled = inputs_of(operator), inputs_of(operator)
    expected = function(*eager)
    got = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*compiled)
    assert torch.equal(got, expected)
    expected.sum().backward()
    got.sum().backward()
    for i in cases.DIFFERENTIABLE[operator]:
        assert torch.equal(compiled[i].grad, eager[i].grad)


@pytest.mark.parametrize("operator", [*cases.OPERATORS, cases.MULTI_SCALE_LOGITS])
def test_compiled_autograd_of_an_eager_forward(operator):
    """For all inputs, then for the first alone."""
    torch._dynamo.reset()
    for wanted in (cases.DIFFERENTIABLE[operator], (0,)):
        eager, compiled = inputs_of(operator, wanted), inputs_of(operator, wanted)
        losses = [getattr(mx_driving, operator)(*args).square().sum() for args in (eager, compiled)]
        losses[0].backward()
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda loss: loss.backward(), backend="eager")(losses[1])
        for i in wanted:
            torch.testing.assert_close(compiled[i].grad, eager[i].grad)


@pytest.mark.parametrize("operator", cases.EVERY)
def test_no_recompilation_when_batch_and_queries_change(operator):
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(getattr(mx_driving, operator), fullgraph=True, dynamic=True, backend=counter)
    # torch gives equal sizes one symbol: a first batch of 2 would be taken for the 2 of (x, y) and cost one recompilation
    for bs, queries in ((6, 5), (8, 7), (9, 11)):
        args = GROWING[operator](bs, queries)
        assert torch.equal(compiled(*args), getattr(mx_driving, operator)(*args))
    assert counter.frame_count == 1


def test_autocast_leaves_float64_alone():
    args = inputs_of(MULTI_SCALE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert mx_driving.multi_scale_deformable_attn(*args).dtype == torch.float64


@pytest.mark.parametrize("operator", cases.EVERY)
def test_meta_device(operator):
    args = cases.cast(GROWING[operator](2, 5), torch.float32)
    args = tuple(a.to("meta") if isinstance(a, torch.Tensor) else a for a in args)
    assert getattr(mx_driving, operator)(*args).device.type == "meta"
