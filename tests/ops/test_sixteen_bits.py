"""Under autocast, kernels read 16-bit inputs in place. Results have the bits of inputs converted to float32."""

import cases
import logits_cases
import pytest
import torch
from attention_modules import results
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS, POOL
from small_cases import GROWING, TINY
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from values import B16, F16, F32, F64, Through, natively

import mx_driving
from mx_driving._dispatch.registered import REGISTERED
from mx_driving._operator.description import OPERATORS

MAPS = [(12, 17), (6, 9)]
under_autocast = torch.autocast("cpu", torch.bfloat16)  # a decorator of functions


# The channels of a head fill pairs of vectors, or do not. Dot products must add channels in the order of float32 in both cases.
CASES = {
    "32 channels": (MULTI_SCALE, lambda: cases.multi_scale(2, 40, 32, 2, MAPS, 4)),
    "37 channels": (MULTI_SCALE, lambda: cases.multi_scale(1, 9, 37, 1, MAPS, 3)),
    "nearest": (GEOMETRIC, lambda: cases.geometric(2, 40, 32, 2, MAPS, 4)),
    "packed levels": (MULTI_SCALE, lambda: cases.multi_scale(1, 1100, 32, 2, [(4, 5)], 2)),
    "a near level and a far level": (MULTI_SCALE, lambda: cases.multi_scale(1, 600, 64, 2, [(33, 32), (5, 6)], 4)),
    "the same, 3 points": (MULTI_SCALE, lambda: cases.multi_scale(1, 800, 64, 2, [(33, 32), (5, 6)], 3)),
    "packed as float32": (GEOMETRIC, lambda: cases.geometric(1, 1100, 32, 2, [(4, 5)], 4)),
    "groups of 32 channels": (AGGREGATION, lambda: cases.aggregation(2, 9, 5, 64, 2, [MAPS, MAPS])),
    "groups of 5 channels": (AGGREGATION, lambda: cases.aggregation(1, 9, 5, 15, 3, [MAPS, MAPS])),
    "offsets": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(2, 40, 32, 2, MAPS, 4)),
    "boxes": (MULTI_SCALE_LOGITS, lambda: logits_cases.multi_scale(1, 40, 64, 2, MAPS, 4, box=True)),
    "window": (GEOMETRIC_LOGITS, lambda: logits_cases.geometric(2, 90, 32, 2, MAPS, (2, 2))),
    "heads together": (GEOMETRIC_LOGITS, lambda: logits_cases.geometric(1, 300, 32, 8, [(4, 5)], (3, 5))),
    "projected": (AGGREGATION_LOGITS, lambda: logits_cases.aggregation(2, 9, 5, 64, 2, [MAPS, MAPS])),
    "cells": (POOL, lambda: cases.pooling(900, 16, (1, 1, 6, 10), 20, 400)),
    "few channels": (POOL, lambda: cases.pooling(900, 3, (1, 1, 6, 10), 20, 400, index=torch.int64)),
}


@pytest.fixture(params=[1, 2, 8])
def threads(request):
    torch.set_num_threads(request.param)


def convert_first(op, dtypes=(torch.float16, torch.bfloat16)):
    """Return a function that converts inputs to float32 by torch, which converts gradients back, and calls the operator."""
    return lambda *args: op(*(a.float() if isinstance(a, Tensor) and a.dtype in dtypes else a for a in args))


def op_of(operator):
    return getattr(torch.ops.mx_driving, operator).default


@natively
@pytest.mark.usefixtures("implementation", "threads")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_autocast_has_the_bits_of_converting_first(name, dtype):
    """The output, and the gradients, which have the dtypes of their inputs."""
    operator, make = CASES[name]
    args, op = cases.cast(make(), dtype), op_of(operator)
    found = results(under_autocast(op), *args)
    assert found[0].dtype == torch.float32
    for a, b in zip(found, results(convert_first(op), *args), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.mark.parametrize("device", ["cuda", "other"])
@pytest.mark.parametrize("operator", [*cases.EVERY, POOL])
def test_other_devices_have_the_bits_of_converting_first(operator, device):
    """The executed PTX of Triton kernels, and the reference. Pooling has its own kernels for 16 bits, forward and backward."""
    args = cases.cast(TINY[operator](), torch.bfloat16)
    wide = cases.cast(args, torch.float32)
    output = REGISTERED[f"{operator}_autocast"].run(device, *args)
    assert output.any()
    assert torch.equal(output, REGISTERED[operator].run(device, *wide))
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    mask = [True] * len(OPERATORS[operator].differentiable)
    gradients = (REGISTERED[f"{operator}_backward"].run(device, grad, *a, mask) for a in (args, wide))
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(*gradients, strict=True))


def first_of(operator):
    return next(make for name, make in CASES.values() if name == operator)()


@pytest.mark.parametrize("dtypes", [(B16, F32), (F16, F64), (F32, B16), (F64, F16)], ids=str)
@pytest.mark.parametrize("operator", [*cases.EVERY, POOL])
def test_mixed_dtypes_under_autocast(operator, dtypes):
    """Value has one dtype, and all other floating inputs have another."""
    args, op = first_of(operator), op_of(operator)
    args = cases.cast(args[:1], dtypes[0]) + cases.cast(args[1:], dtypes[1])
    expected = results(convert_first(op), *args)
    for a, b in zip(results(under_autocast(op), *args), expected, strict=True):
        assert (a.dtype, torch.equal(a, b)) == (b.dtype, True)


@pytest.mark.parametrize("operator", [*cases.EVERY, POOL])
def test_autograd_saves_the_inputs_themselves(operator):
    """Autograd saves the 16-bit inputs, which take half of the memory of float32."""
    args = cases.cast(first_of(operator), torch.bfloat16)
    leaves = [a.requires_grad_() if i in OPERATORS[operator].differentiable else a for i, a in enumerate(args)]
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        under_autocast(op_of(operator))(*leaves)
    assert saved == [a.data_ptr() for a in args if isinstance(a, Tensor)]


@pytest.mark.parametrize("operator", cases.EVERY)
def test_second_derivatives_vmap_and_forward_mode_under_autocast(operator):
    args = cases.cast(GROWING[operator](2, 3), torch.bfloat16)
    places = OPERATORS[operator].differentiable

    def second(op):
        leaves = [a.clone().requires_grad_() if i in places else a for i, a in enumerate(args)]
        chosen = [leaves[i] for i in places]
        first = torch.autograd.grad(op(*leaves).square().sum(), chosen, create_graph=True)
        return torch.autograd.grad(sum(g.float().square().sum() for g in first), chosen)

    def mapped(op):
        return torch.vmap(lambda value: op(value, *args[1:]))(torch.stack([args[0], args[0] + 1]))

    def tangent(op):
        return torch.func.jvp(lambda value: op(value, *args[1:]), (args[0],), (args[0],))

    op = op_of(operator)
    for a, b in zip(second(under_autocast(op)), second(convert_first(op)), strict=True):
        # Some summands of a second derivative are rounded to bfloat16 one by one.
        assert (a.float() - b.float()).abs().max() <= 2**-7 * b.abs().max()
    assert torch.equal(mapped(under_autocast(op)), mapped(convert_first(op)))
    assert all(torch.equal(a, b) for a, b in zip(tangent(under_autocast(op)), tangent(convert_first(op)), strict=True))


@pytest.mark.parametrize("operator", [MULTI_SCALE, GEOMETRIC_LOGITS, AGGREGATION_LOGITS])
def test_graphs_under_autocast(operator):
    """Compiled, exported, and decomposed; and torch's own checks. Three operators suffice, because one class makes them all."""
    args = cases.cast(GROWING[operator](2, 3), torch.bfloat16)
    run, expected = under_autocast(op_of(operator)), under_autocast(op_of(operator))(*args)
    assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(*args), expected)

    program = torch.export.export(Through(run), args)
    assert torch.equal(program.module()(*args), expected)
    decomposed = program.run_decompositions({**torch._decomp.decomposition_table})
    assert not any("mx_driving" in str(node.target) for node in decomposed.graph.nodes)
    torch.testing.assert_close(decomposed.module()(*args), expected, rtol=1e-4, atol=1e-5)
    autocast = getattr(torch.ops.mx_driving, operator + "_autocast").default
    leaves = [a.requires_grad_() if i in OPERATORS[operator].differentiable else a for i, a in enumerate(args)]
    utils = ("test_schema", "test_autograd_registration", "test_faketensor")  # the graph above is traced, too
    assert set(torch.library.opcheck(autocast, tuple(leaves), test_utils=utils).values()) == {"SUCCESS"}


@pytest.mark.parametrize("operator", cases.EVERY)
def test_tools_know_the_operator_under_autocast(operator):
    """The FLOP counter, and recorded looks. test_data_checks.py has the warnings."""
    args = cases.cast(GROWING[operator](2, 3), torch.bfloat16)
    counts = []
    for function in (under_autocast(op_of(operator)), op_of(operator)):
        with FlopCounterMode(display=False) as counter, mx_driving.viz.recording() as looks:
            function(*args)
        counts.append(counter.get_total_flops())
        assert [look.operator for look in looks] == [operator.removesuffix("_with_logits")]
    assert counts[0] == counts[1] > 0
