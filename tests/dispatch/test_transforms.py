"""torch.func, forward mode, vmap, checkpointing, saved-tensor hooks, profiler, FLOP counter, pytrees."""

import collections
import functools

import cases
import pytest
import torch
from attention_modules import results
from cases import AGGREGATION, AGGREGATION_LOGITS, GEOMETRIC, GEOMETRIC_LOGITS, MULTI_SCALE, MULTI_SCALE_LOGITS
from small_cases import GROWING, SMALL, chosen, inputs_of, loss_of
from torch.autograd import gradcheck
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import mx_driving


def floating(operator):
    """Return the operator as a function of its differentiable inputs, and these inputs."""
    args = SMALL[operator]()
    places = cases.DIFFERENTIABLE[operator]

    def function(*chosen):
        filled = list(args)
        for i, t in zip(places, chosen, strict=True):
            filled[i] = t
        return getattr(mx_driving, operator)(*filled)

    return function, tuple(args[i] for i in places)


@pytest.mark.parametrize("operator", [*cases.EVERY, cases.POOL])
def test_forward_mode_and_batched_gradients(operator):
    """torch's own checks with finite differences: tangents, and vmap over gradients and tangents, along a random direction.
    test_autograd.py checks all entries of gradients."""
    flags = {"check_forward_ad": True, "check_batched_grad": True, "check_batched_forward_grad": True, "fast_mode": True}
    assert gradcheck(cases.forward_of("native", operator), inputs_of(operator), **flags)


def stacked(operator, in_dims):
    """Stack three variants of each vmapped input along its dimension. Tables are the same three times."""
    generator = torch.Generator().manual_seed(7)
    args = list(SMALL[operator]())
    for i, dim in enumerate(in_dims):
        if dim is not None and cases.is_floating(args[i]):
            noise = torch.randn((3, *args[i].shape), dtype=args[i].dtype, generator=generator)
            args[i] = torch.stack([args[i] + (0.1 if i == 3 else 1) * each for each in noise], dim)
        elif dim is not None:
            args[i] = torch.stack([args[i], *(args[i].flip(axis) if i > 2 else args[i] for axis in (0, 1))], dim)
    return tuple(args)


def in_dims_of(operator):
    """Return sets of in_dims: all inputs but tables and window, all inputs, all but value, each input alone."""
    args = SMALL[operator]()
    tensors = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor)]
    value, *samples = [i for i in tensors if i not in (1, 2) and (operator, i) != (GEOMETRIC_LOGITS, 4)]
    several = {i: (0, -1, 1)[number % 3] for number, i in enumerate((value, *samples))}
    rows = [dict.fromkeys((value, *samples), 0), dict.fromkeys(tensors, 0), dict.fromkeys(samples, 0), several, {value: 2}]
    rows += [{i: (1, -1)[number % 2]} for number, i in enumerate(samples)]
    return [tuple(row.get(i) for i in range(len(args))) for row in rows]


IN_DIMS = {operator: in_dims_of(operator) for operator in cases.EVERY}
VMAPPED = [(operator, dims) for operator, each in IN_DIMS.items() for dims in each]


@pytest.mark.parametrize(("operator", "in_dims"), VMAPPED, ids=str)
def test_vmap(operator, in_dims):
    function, args = getattr(mx_driving, operator), stacked(operator, in_dims)
    expected = torch.stack([function(*chosen(args, in_dims, k)) for k in range(3)])
    found = torch.vmap(function, in_dims=in_dims)(*args)
    if operator in cases.OPERATORS:
        assert torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)
    assert torch.equal(torch.vmap(function, in_dims=in_dims, out_dims=1)(*args), found.movedim(0, 1))


@pytest.mark.parametrize(("operator", "in_dims"), VMAPPED, ids=str)
def test_gradients_per_sample(operator, in_dims):
    args = stacked(operator, in_dims)
    for argnums in (cases.DIFFERENTIABLE[operator], (cases.WEIGHTS[operator],)):  # vmap has another path without value's
        gradient = torch.func.grad(loss_of(getattr(mx_driving, operator)), argnums=argnums)
        found = torch.vmap(gradient, in_dims=in_dims)(*args)
        expected = [gradient(*chosen(args, in_dims, k)) for k in range(3)]
        torch.testing.assert_close(found, tuple(map(torch.stack, zip(*expected, strict=True))))


@pytest.mark.parametrize("operator", cases.EVERY)
def test_vmap_is_one_call(operator, kernel_calls):
    """vmap does not loop over the vmapped axis. An operator with logits may call its bare operator."""
    in_dims = IN_DIMS[operator][0]
    torch.vmap(getattr(mx_driving, operator), in_dims=in_dims)(*stacked(operator, in_dims))
    functions = {operator, operator.removesuffix("_with_logits")}
    assert len([name for name in kernel_calls if name in functions]) == 1


@pytest.mark.parametrize("operator", cases.EVERY)
def test_inputs_without_gradients_add_no_tangents(operator):
    """image_size has no gradient, for example."""
    args, function = SMALL[operator](), getattr(mx_driving, operator)
    for i, a in enumerate(args):
        if cases.is_floating(a) and i not in cases.DIFFERENTIABLE[operator]:
            output, tangent = torch.func.jvp(lambda a, i=i: function(*args[:i], a, *args[i + 1 :]), (a,), (torch.ones_like(a),))
            assert torch.equal(tangent, torch.zeros_like(output))


@pytest.mark.parametrize("operator", cases.EVERY)
def test_forward_mode_over_expanded_inputs(operator):
    """torch refuses to make a dual tensor of an expanded tensor, whatever function follows. A function may expand inside."""
    function, args = floating(operator)
    rows = tuple(t.reshape(-1)[0] for t in args)
    tangents = tuple(torch.linspace(0.5, 1, len(rows), dtype=torch.float64).unbind())

    def call(*rows, copies):
        expanded = (row.expand(t.shape) for row, t in zip(rows, args, strict=True))
        return function(*(t.clone() if copies else t for t in expanded))

    for transform in (torch.func.jvp, lambda f, at, along: torch.func.jvp(torch.func.jacrev(f), at, along)):
        found, expected = (transform(functools.partial(call, copies=copies), rows, tangents) for copies in (False, True))
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operator", cases.EVERY)
def test_vmap_over_nothing(operator):
    """An empty vmap returns an empty output. jacrev of no queries maps over an empty output, too."""
    args = GROWING[operator](2, 0)
    function, in_dims = getattr(mx_driving, operator), IN_DIMS[operator][0]
    given = tuple(a if d is None else a.new_empty(0, *a.shape) for a, d in zip(args, in_dims, strict=True))
    output = torch.vmap(function, in_dims=in_dims)(*given)
    assert output.shape == (0, *function(*args).shape)
    for place in cases.DIFFERENTIABLE[operator]:
        assert torch.func.jacrev(function, argnums=place)(*args).shape == (*output.shape[1:], *args[place].shape)


def test_vmap_over_no_tables_is_refused():
    """vmap over tables calls the operator for each entry. Without an entry the shape of the output is unknown."""
    rule = "^in_dims must name axes with entries where vmap calls multi_scale_deformable_attn for each; got size 0$"
    with pytest.raises(ValueError, match=rule):
        torch.vmap(mx_driving.multi_scale_deformable_attn)(*(a[None][:0] for a in SMALL[MULTI_SCALE]()))


def counts(profile):
    return collections.Counter(event.name for event in profile.events())


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("operator", cases.EVERY)
def test_activation_checkpointing(operator, reentrant):
    function, tensors = floating(operator)
    gradients = []
    for wrapped in (function, functools.partial(checkpoint, function, use_reentrant=reentrant)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        with torch.profiler.profile() as profile:
            wrapped(*leaves).square().sum().backward()
        gradients.append([t.grad for t in leaves])
    assert counts(profile)[f"mx_driving::{operator}"] == 2  # the backward runs it again
    assert counts(profile)[f"mx_driving::{operator}_backward"] == 1
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("operator", cases.OPERATORS)
def test_selective_checkpointing_keeps_the_operator(operator, kernel_calls):
    function, tensors = floating(operator)
    keep = functools.partial(create_selective_checkpoint_contexts, [getattr(torch.ops.mx_driving, operator).default])
    found = []
    for context in ({"context_fn": keep}, {}):
        kernel_calls.clear()
        call = functools.partial(checkpoint, lambda *t: function(*t).cos(), use_reentrant=False, **context)
        found.append(results(call, *tensors))
        assert kernel_calls.count(operator) == (1 if context else 2)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("operator", cases.EVERY)
def test_saved_tensor_hooks(operator):
    """The graph saves the inputs alone: no locations and no weights. Hooks may move them elsewhere."""
    args = inputs_of(operator)
    packed = []

    def pack(t):
        packed.append(t.shape)
        return t.numpy(force=True).copy()

    with torch.autograd.graph.saved_tensors_hooks(pack, torch.from_numpy):
        output = getattr(mx_driving, operator)(*args)
    assert packed == [a.shape for a in args if isinstance(a, torch.Tensor)]
    output.sum().backward()
    expected = inputs_of(operator)
    getattr(mx_driving, operator)(*expected).sum().backward()
    assert all(torch.equal(args[i].grad, expected[i].grad) for i in cases.DIFFERENTIABLE[operator])


ROWS = {MULTI_SCALE: 4, AGGREGATION: 4, GEOMETRIC: 1, MULTI_SCALE_LOGITS: 4, AGGREGATION_LOGITS: 4, GEOMETRIC_LOGITS: 1}


@pytest.mark.parametrize(("operator", "rows"), ROWS.items())
def test_flops(operator, rows):
    args = inputs_of(operator)
    weights = args[cases.WEIGHTS[operator]]
    samples = weights.numel() // (weights.shape[-1] if args[0].dim() == 3 else 1)
    once = 2 * rows * samples * args[0].shape[-1]
    with FlopCounterMode(display=False) as counter:
        getattr(mx_driving, operator)(*args).sum().backward()
    found = counter.get_flop_counts()["Global"]
    assert found[getattr(torch.ops.mx_driving, operator)] == once
    assert found[getattr(torch.ops.mx_driving, operator + "_backward")] == 2 * once
    args = inputs_of(operator, wanted=(cases.WEIGHTS[operator],))
    with FlopCounterMode(display=False) as counter:
        getattr(mx_driving, operator)(*args).sum().backward()
    assert counter.get_total_flops() == 2 * once
