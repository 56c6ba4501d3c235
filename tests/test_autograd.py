"""First and second derivatives, only what is asked for, and inputs left as they were."""

from __future__ import annotations

import cases
import logits_cases
import pytest
import torch
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from torch.autograd import gradcheck, gradgradcheck

import mx_driving

SMALL = {
    MULTI_SCALE: lambda: cases.multi_scale(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    AGGREGATION: lambda: cases.aggregation(2, 2, 2, 4, 2, [[(3, 4), (1, 1)], [(2, 2), (1, 3)]]),
    GEOMETRIC: lambda: cases.geometric(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    MULTI_SCALE_LOGITS: lambda: logits_cases.multi_scale(2, 2, 3, 2, [(3, 4), (2, 1)], 2),
    AGGREGATION_LOGITS: lambda: logits_cases.aggregation(2, 2, 3, 4, 2, [[(3, 4), (1, 1)], [(2, 2), (1, 3)]]),
    GEOMETRIC_LOGITS: lambda: logits_cases.geometric(2, 2, 3, 2, [(3, 4), (2, 1)], (1, 2)),
}


def inputs_of(operator, wanted=None):
    wanted = cases.DIFFERENTIABLE[operator] if wanted is None else wanted
    return tuple(a.requires_grad_(i in wanted) if cases.is_floating(a) else a for i, a in enumerate(SMALL[operator]()))


@pytest.mark.parametrize("operator", cases.EVERY)
def test_gradcheck(implementation, operator):
    assert gradcheck(cases.forward_of(implementation, operator), inputs_of(operator))


@pytest.mark.parametrize("operator", cases.EVERY)
def test_gradgradcheck(operator):
    """Reverse over reverse, for one gradient and for a batch of them."""
    assert gradgradcheck(getattr(mx_driving, operator), inputs_of(operator), check_batched_grad=True)


@pytest.mark.parametrize("operator", cases.EVERY)
def test_second_derivative_of_a_penalty(operator):
    """create_graph=True, as a gradient penalty uses it, equals the reference's own."""
    found = []
    for function in (getattr(mx_driving, operator), cases.forward_of("reference", operator)):
        args = inputs_of(operator)
        leaves = [args[i] for i in cases.DIFFERENTIABLE[operator]]
        first = torch.autograd.grad(function(*args).square().sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("operator", cases.EVERY)
def test_only_the_gradients_asked_for(operator):
    function = getattr(mx_driving, operator)
    everything = inputs_of(operator)
    function(*everything).sum().backward()
    for i in cases.DIFFERENTIABLE[operator]:
        args = inputs_of(operator, wanted=(i,))
        function(*args).sum().backward()
        assert torch.equal(args[i].grad, everything[i].grad)
        assert all(args[j].grad is None for j in cases.DIFFERENTIABLE[operator] if j != i)


def test_geometric_locations_have_no_gradient():
    args = list(inputs_of(GEOMETRIC))
    args[3] = args[3].double().requires_grad_()
    mx_driving.geometric_kernel_attention(*args).sum().backward()
    assert args[3].grad is None


@pytest.mark.parametrize("operator", cases.EVERY)
def test_unwanted_gradients_are_empty(implementation, operator):
    args = SMALL[operator]()
    grad = cases.grad_for(operator, args)
    mask = [False] * len(cases.DIFFERENTIABLE[operator])
    backward = getattr(torch.ops.mx_driving, operator + "_backward").default
    assert [g.numel() for g in backward(grad, *args, mask)] == [0] * len(mask)


@pytest.mark.parametrize("operator", cases.EVERY)
def test_inputs_are_not_modified(implementation, operator):
    args = SMALL[operator]()
    grad = cases.grad_for(operator, args)
    tensors = [a for a in (*args, grad) if isinstance(a, torch.Tensor)]
    before = [a.clone() for a in tensors]
    cases.forward_of(implementation, operator)(*args)
    cases.gradients_of(implementation, operator, grad, args)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@pytest.mark.parametrize("operator", cases.EVERY)
def test_no_grad_builds_no_graph(operator):
    args = inputs_of(operator)
    with torch.no_grad():
        assert not getattr(mx_driving, operator)(*args).requires_grad
