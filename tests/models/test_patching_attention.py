"""patch: attention modules, and what models do with them: weights that are read, hooks, compilation, several patches."""

from __future__ import annotations

import functools
import types

import attention_modules as libraries
import pytest
import torch
from attention_modules import (
    BARE,
    KEYS,
    MMCV,
    WITH_LOGITS,
    HuggingFace,
    arguments_for,
    build,
    close,
    library,
    make_forward,
    operators,
    patched,
    plain_core,
    recorded,
)
from torch import nn

import mx_driving

CORE = plain_core.__module__ + ".plain_core"


@pytest.mark.parametrize("kind", [HuggingFace, libraries.Mask2Former])
def test_the_output_has_a_gradient_for_returned_weights_where_modules_stay(kind):
    """It needs an output that is made from the weights. The operator with logits never makes them: torch refuses."""
    module = build(kind)
    arguments = arguments_for(module)

    def gradients():
        out, weights = module(**arguments)
        weights.retain_grad()
        out.square().sum().backward(retain_graph=True)
        return [weights.grad, *torch.autograd.grad(out.sum(), weights)]

    expected = gradients()
    with patched(kind, modules=False):
        assert recorded(module, **arguments) == [BARE]
        close(gradients(), expected)
    with patched(kind):
        assert recorded(module, **arguments) == [WITH_LOGITS]
        with pytest.raises(RuntimeError, match="not have been used in the graph"):
            gradients()


class Sharper(HuggingFace):
    """Other arithmetic: the weights are the softmax of doubled logits."""

    forward = make_forward(libraries.HUGGING_FACE)

    def logits(self, query):
        return 2 * self.attention_weights(query)


class Unbuildable(HuggingFace):
    """Its constructor wants what nobody can guess."""

    forward = make_forward(libraries.HUGGING_FACE)

    def __init__(self, secret):
        super().__init__(secret, 2, 2)


class OtherNames(libraries.Layers):
    """Parameters of no known form."""

    def forward(self, queries, keys):
        return self.sampling_offsets(queries), self.attention_weights(keys)


class OfPoints(libraries.Mmcv):
    """StreamMapNet's references have an axis of points, which no form has."""

    forward = make_forward(MMCV + "**kwargs")

    def samples(self, reference, shapes, offsets, logits):
        assert reference.shape[2] == self.sides[2], "a reference for each point"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Sharper, "its result on a small example differs from the operator's by"),
        (Unbuildable, "it does not run on a small example: TypeError: .*missing 1 required positional argument: 'secret'"),
        (OtherNames, r"no known form of an attention module has the parameters \(queries, keys\)"),
        (OfPoints, "it does not run on a small example: AssertionError: a reference for each point"),
    ],
)
def test_a_module_with_other_arithmetic_keeps_its_code_around_the_core(kind, reason):
    own, name = vars(kind)["forward"], f"{kind.__module__}.{kind.__name__}"
    with pytest.warns(UserWarning, match=f"left {name} alone: {reason}"):
        done = mx_driving.patch(library(kind, plain_core))
    try:
        assert (done.replaced, list(done.skipped)) == ((CORE,), [name])
        assert vars(kind)["forward"] is own
        if kind is Sharper:
            module = build(kind)
            assert operators(module, **arguments_for(module)) == [BARE]
    finally:
        done.restore()


LIMITS = {  # width, heads, points -> the limit that they pass
    (256, 8, 4): "",
    (256, 16, 4): "value must have num_heads <= 8 (Atlas A2 limit of 26.2); got 16",
    (256, 8, 40): "sampling_locations must have num_points * num_levels <= 64 (Atlas A2 limit of 26.2); got 80",
    (48, 4, 4): "value must have embed_dims a multiple of 8 (Atlas A2 limit of 26.2); got 12",
}


def test_a_model_that_the_vendors_device_would_refuse_is_remarked_on():
    model = nn.ModuleDict({"first": nn.Linear(2, 2)})
    for width, heads, points in LIMITS:
        config = types.SimpleNamespace(d_model=width, num_feature_levels=2)
        model[f"{width} {heads} {points}"] = HuggingFace(config, heads, points)
    with mx_driving.patched(model) as done:
        limits = {" ".join(map(str, sizes)): words for sizes, words in LIMITS.items() if words}
        assert done.limits == limits
        for name, words in limits.items():
            assert f"the vendor's device would refuse {name}: {words}" in repr(done)
    with mx_driving.patched(model["256 16 4"]) as done:  # a layer has its class's name
        assert "the vendor's device would refuse HuggingFace: value must have num_heads <= 8" in repr(done)


@pytest.mark.parametrize("first", [0, 1])
def test_two_patches_share_a_module(first):
    """Whichever ends first, the module and its core stay replaced for the other."""
    module, own = build(HuggingFace), HuggingFace.forward
    arguments, both = arguments_for(module), library(HuggingFace, plain_core)
    patches = [mx_driving.patch(both, modules=modules) for modules in (True, False, True)]
    assert patches[2].replaced == patches[0].replaced
    patches.pop(first).restore()
    assert operators(module, **arguments) == [WITH_LOGITS]
    for patch in patches:
        patch.restore()
    assert HuggingFace.forward is own
    assert operators(module, **arguments) == []


def test_a_wrapper_that_others_put_over_a_replaced_forward_stays():
    """It calls the operator until the patch ends, and the original afterwards, also where another patch comes later."""
    kind, own, calls = libraries.Paper, libraries.Paper.forward, []
    module = build(kind)
    arguments = arguments_for(module)
    expected = module(**arguments)
    done = mx_driving.patch(library(kind, plain_core))
    ours = kind.forward

    def wrapper(*args, **kwargs):
        calls.append(len(args))
        return ours(*args, **kwargs)

    kind.forward = wrapper
    try:
        assert operators(module, **arguments) == [WITH_LOGITS]
        done.restore()
        assert kind.forward is wrapper
        assert operators(module, **arguments) == []
        close(module(**arguments), expected)
        assert len(calls) == 5
    finally:
        kind.forward = own


class Layer(nn.Module):
    """A layer around an attention."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, **arguments):
        hidden, _ = self.attention(**arguments)
        return hidden


class ByAnAttribute(libraries.Layers):
    """D-FINE's layers hold their core; LibreYOLO's hold a partial one."""

    def __init__(self):
        super().__init__()
        self.core = functools.partial(plain_core)

    def forward(self, arguments):
        return self.core(*arguments)


class BySuper(libraries.Paper):
    """The method that it overrides calls the core."""

    def attend(self, **named):
        return super().attend(**named)


class OfAnotherKind(libraries.Layers):
    """Its layers have the names of attention's. Nothing of it is known."""

    def forward(self, arguments):
        return arguments


@pytest.mark.filterwarnings("ignore:mx_driving.patch left test_patching")
@pytest.mark.parametrize(("modules", "operator"), [(True, WITH_LOGITS), (False, BARE)])
def test_a_patch_counts_the_layers_of_a_model_that_call_an_operator(modules, operator):
    """By the module that is replaced, or by the core in its code. A layer inside another one is not counted beside it."""
    attention = build(HuggingFace)
    layers = {"first": nn.Linear(2, 2), "layer": Layer(attention), "again": build(HuggingFace), "super": build(BySuper)}
    with mx_driving.patched(nn.ModuleDict(layers), modules=modules) as done:
        assert modules or done.skipped == {}
        assert done.layers == ("layer.attention", "again", "super")
        assert repr(done).splitlines()[-1] == "3 of 3 layers of ModuleDict that sample call an operator"
        assert operators(attention, **arguments_for(attention)) == [operator]
    with patched(HuggingFace) as done:
        assert done.layers == ()


@pytest.mark.filterwarnings("ignore:mx_driving.patch left test_patching")
def test_an_attention_layer_that_calls_nothing_that_was_replaced_is_named():
    model = nn.Sequential(build(libraries.Mmcv), ByAnAttribute(), OfAnotherKind())
    with pytest.warns(UserWarning, match="left 2 alone: the code of its class OfAnotherKind names nothing"):
        done = mx_driving.patch(model)
    done.restore()
    assert done.layers == ("0", "1")
    assert "2 of 3 layers of Sequential that sample call an operator" in repr(done)


def test_hooks_of_linear_layers_are_called():
    module, called = build(libraries.Mmcv), []
    for name, layer in module.named_children():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    with patched(libraries.Mmcv):
        module(**arguments_for(module))
        called.clear()  # the first call is compared
        module(**arguments_for(module))
    assert sorted(called) == sorted(dict(module.named_children()))


@torch.no_grad()
@pytest.mark.parametrize("left_out", [(), ("spatial_shapes_list",)])
def test_levels_that_do_not_fill_the_keys_are_refused(left_out):
    """By the module itself, or by the operator where nothing is compared."""
    module, sizes = build(HuggingFace), [(4, 5), (2, 2)]
    arguments = arguments_for(module) | {"spatial_shapes": torch.tensor(sizes), "spatial_shapes_list": sizes}
    arguments = {n: a for n, a in arguments.items() if n not in left_out}
    rule = rf"^spatial_shapes must hold the num_keys={KEYS} rows of value; got 24 in all levels$"
    with patched(HuggingFace), pytest.raises(RuntimeError, match="split_with_sizes"):
        module(**arguments)
    with patched(HuggingFace, prove=False), pytest.raises(ValueError, match=rule):
        module(**arguments)


def test_compiles_whole():
    """A graph that was compiled before patching is not used after it, nor the other way round."""
    module = build(HuggingFace)
    arguments = arguments_for(module)
    expected = libraries.results(module, **arguments)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    close(libraries.results(compiled, **arguments), expected)
    with patched(HuggingFace), mx_driving.viz.recording() as looks:
        close(libraries.results(compiled, **arguments), expected)
    with mx_driving.viz.recording() as after:
        close(libraries.results(compiled, **arguments), expected)
    assert (len(looks), len(after)) == (1, 0)


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning")
def test_traced():
    module = build(HuggingFace).requires_grad_(False)
    arguments = arguments_for(module, masked=False)
    hidden = arguments.pop("hidden_states")
    with patched(HuggingFace), torch.no_grad():
        module(hidden, **arguments)
        traced = torch.jit.trace(lambda hidden: module(hidden, **arguments), hidden)
    assert WITH_LOGITS in str(traced.graph)
    close(traced(hidden), module(hidden, **arguments))


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, functools.partial(torch.autocast, "cpu")])
def test_the_trial_leaves_no_trace(mode):
    """In whatever mode it runs, it replaces the same, and changes nothing of the process."""
    kinds = HuggingFace, libraries.Mask2Former, libraries.Mmcv, libraries.Pillars, libraries.Temporal, libraries.Paper
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    modes = torch.is_inference_mode_enabled, torch.is_grad_enabled, torch.is_autocast_cpu_enabled
    try:
        with torch.device("meta"), mode():
            before = [enabled() for enabled in modes]
            with patched(*kinds) as done:
                assert len(done.replaced) == 1 + len(kinds)
                assert [enabled() for enabled in modes] == before
        assert torch.get_num_threads() == 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), state)
