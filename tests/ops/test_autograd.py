"""First and second derivatives; only the needed gradients are computed; inputs are not changed."""

import itertools

import cases
import pytest
import torch
from small_cases import SMALL, inputs_of
from torch.autograd import gradcheck, gradgradcheck
from values import assert_same_sums, everywhere_each, first

WITH_POOL = [*cases.EVERY, cases.POOL]


@pytest.mark.parametrize("operator", WITH_POOL)
def test_gradcheck(implementation, operator):
    """All entries of gradients; of the reference one direction, because test_values.py compares it with truth in float64."""
    function, is_slow = cases.forward_of(implementation, operator), implementation == "reference"
    assert gradcheck(function, inputs_of(operator), fast_mode=is_slow)


@pytest.mark.parametrize("operator", WITH_POOL)
def test_gradgradcheck(operator):
    """Reverse over reverse, for one gradient and for a batch of them, and forward over reverse, along a random direction, as
    torch's own tests do it."""
    flags = {"check_batched_grad": True, "check_fwd_over_rev": True, "fast_mode": True}
    assert gradgradcheck(cases.forward_of("native", operator), inputs_of(operator), **flags)


@pytest.mark.parametrize("operator", WITH_POOL)
def test_only_the_gradients_asked_for(operator):
    function = cases.forward_of("native", operator)
    everything = inputs_of(operator)
    with torch.no_grad():
        assert not function(*everything).requires_grad
    function(*everything).sum().backward()
    for i in cases.DIFFERENTIABLE[operator]:
        args = inputs_of(operator, wanted=(i,))
        function(*args).sum().backward()
        assert torch.equal(args[i].grad, everything[i].grad)
        assert all(args[j].grad is None for j in cases.DIFFERENTIABLE[operator] if j != i)


@everywhere_each(WITH_POOL)
def test_only_wanted_gradients_are_computed(implementation, operator):
    """Each mask gives the gradients of the full mask, and empty tensors for the other inputs. Without a GPU, only
    `make test-ptx` compiles the kernels of all masks."""
    args = first(operator, implementation)
    grad = cases.grad_for(operator, args).float()
    full = cases.gradients_of(implementation, operator, grad, args)
    masks = list(itertools.product([False, True], repeat=len(full)))
    if implementation == "triton" and not cases.EVERY_KERNEL:  # each mask makes another kernel
        masks = [mask for mask in masks if sum(mask) == 1]
    for mask in masks:
        found = cases.gradients_of(implementation, operator, grad, args, list(mask))
        for wanted, a, b in zip(mask, found, full, strict=True):
            assert_same_sums(implementation, a, b if wanted else b.new_empty(0))


@pytest.mark.parametrize("operator", WITH_POOL)
def test_inputs_are_not_modified(implementation, operator):
    args = SMALL[operator]()
    grad = cases.grad_for(operator, args)
    tensors = [a for a in (*args, grad) if isinstance(a, torch.Tensor)]
    before = [a.clone() for a in tensors]
    cases.forward_of(implementation, operator)(*args)
    cases.gradients_of(implementation, operator, grad, args)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
