"""torch.library's own checks, torch.compile without graph breaks, and autocast."""

import cases
import pytest
import torch
from attention_modules import results
from small_cases import GROWING, inputs_of
from torch._dynamo.testing import CompileCounterWithBackend

import mx_driving


@pytest.mark.parametrize("operator", [*cases.EVERY, cases.POOL])
def test_opcheck_forward(operator):
    result = torch.library.opcheck(getattr(torch.ops.mx_driving, operator).default, inputs_of(operator))
    assert set(result.values()) == {"SUCCESS"}


def opcheck_backward(operator, all_wanted, **options):
    args = inputs_of(operator)
    grad = cases.grad_for(operator, args).requires_grad_()
    mask = [True, *[all_wanted] * (len(cases.DIFFERENTIABLE[operator]) - 1)]
    backward = getattr(torch.ops.mx_driving, operator + "_backward").default
    assert set(torch.library.opcheck(backward, (grad, *args, mask), **options).values()) == {"SUCCESS"}


@pytest.mark.parametrize("operator", [cases.GEOMETRIC, cases.MULTI_SCALE_LOGITS, cases.POOL])
def test_opcheck_backward(operator):
    """A bare operator, one with logits and the pool suffice, because all derivatives are made by one class."""
    opcheck_backward(operator, True)


@pytest.mark.parametrize("all_wanted", [False, True])
@pytest.mark.parametrize("operator", [*cases.EVERY, cases.POOL])
def test_schema_and_fake_of_backward(operator, all_wanted):
    """A masked gradient is an empty tensor."""
    opcheck_backward(operator, all_wanted, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("operator", cases.EVERY)
def test_compile_fullgraph(operator, dynamic, monkeypatch):
    """One graph, forward and backward, for all batches and numbers of queries if these are free. Compilers do not decompose the
    operator: decompositions are for exporters."""
    function, op = getattr(mx_driving, operator), getattr(torch.ops.mx_driving, operator).default
    monkeypatch.setitem(torch._decomp.decomposition_table, op, lambda *args: pytest.fail("decomposed"))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend=counter)
    # torch gives equal sizes one symbol: a first batch of 2 would be taken for the 2 of (x, y) and cost one recompilation
    for bs, queries in ((6, 5), (8, 7), (9, 11))[: 1 + 2 * dynamic]:
        args = GROWING[operator](bs, queries)
        pairs = zip(results(compiled, *args), results(function, *args), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert counter.frame_count == 1


@pytest.mark.parametrize("operator", [*cases.OPERATORS, cases.MULTI_SCALE_LOGITS])
def test_compiled_autograd_of_an_eager_forward(operator):
    """First with gradients of all inputs, then of the first input."""
    for wanted in (cases.DIFFERENTIABLE[operator], (0,)):
        eager, compiled = inputs_of(operator, wanted), inputs_of(operator, wanted)
        losses = [getattr(mx_driving, operator)(*args).square().sum() for args in (eager, compiled)]
        losses[0].backward()
        with torch._dynamo.config.patch(compiled_autograd=True):
            torch.compile(lambda loss: loss.backward(), backend="eager")(losses[1])
        for i in wanted:
            assert eager[i].grad.any()
            torch.testing.assert_close(compiled[i].grad, eager[i].grad)
