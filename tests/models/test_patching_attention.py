"""patch: whole attention modules, as libraries write them. The module's own code, in float64, is the truth."""

from __future__ import annotations

import functools
import types

import pytest
import torch
import torch.utils.checkpoint
from test_patching import plain_core
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import mx_driving

SIZES = [(4, 5), (3, 2)]
KEYS = 26


def attention_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    return plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)


class Layers(nn.Module):
    """The linear layers that all of these modules have, and what becomes of their outputs."""

    def __init__(self, width, heads, levels, points, reads=1, queue=1, output=True):
        super().__init__()
        self.sides, samples = (heads, levels, points), queue * heads * levels * points
        self.sampling_offsets = nn.Linear(width * reads, samples * 2)
        self.attention_weights = nn.Linear(width * reads, samples)
        self.value_proj = nn.Linear(width, width)
        self.output_proj = nn.Linear(width, width) if output else None

    def rows(self, value, hidden=None):
        value = self.value_proj(value)
        value = value if hidden is None else value.masked_fill(hidden[..., None], 0.0)
        return value.unflatten(-1, (self.sides[0], -1))

    def split(self, offsets, logits):
        heads, levels, points = self.sides
        weights = logits.unflatten(-1, (heads, -1)).softmax(-1).unflatten(-1, (levels, points))
        return offsets.unflatten(-1, (heads, levels, points, 2)), weights


def locations_of(reference, offsets, shapes, points):
    if reference.shape[-1] == 2:
        return reference[:, :, None, :, None] + offsets / shapes.flip(-1)[:, None]
    return reference[:, :, None, :, None, :2] + offsets / points * reference[:, :, None, :, None, 2:] * 0.5


# A forward names the layers itself: a form is known by that, and by the names of its parameters.


class HuggingFace(Layers):
    """transformers: attention_mask is True where a key counts."""

    keeps, sharper = True, 1

    def __init__(self, config, num_heads, n_points):
        super().__init__(config.d_model, num_heads, config.num_feature_levels, n_points)
        self.n_heads, self.n_levels, self.n_points = self.sides

    def forward(
        self, hidden_states, attention_mask=None, encoder_hidden_states=None, encoder_attention_mask=None,
        position_embeddings=None, reference_points=None, spatial_shapes=None, spatial_shapes_list=None, level_start_index=None,
    ):  # fmt: skip
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.rows(encoder_hidden_states, None if attention_mask is None else attention_mask != self.keeps)
        offsets, weights = self.split(self.sampling_offsets(query), self.sharper * self.attention_weights(query))
        locations = locations_of(reference_points, offsets, spatial_shapes, self.n_points)
        return self.output_proj(attention_core(value, spatial_shapes_list, locations, weights)), weights


def with_a_forward_of_its_own(kind):
    """As a library repeats its code: a class whose forward is inherited is replaced with its parent."""
    own = HuggingFace.forward
    kind.forward = types.FunctionType(own.__code__, globals(), "forward", own.__defaults__)
    return kind


@with_a_forward_of_its_own
class Mask2Former(HuggingFace):
    """transformers' other masks: True where a key is padding."""

    keeps = False


@with_a_forward_of_its_own
class Sharper(HuggingFace):
    """Other arithmetic: the weights are the softmax of doubled logits."""

    sharper = 2


@with_a_forward_of_its_own
class Unbuildable(HuggingFace):
    """Its constructor wants what nobody can guess."""

    def __init__(self, secret):
        super().__init__(secret, 2, 2)


class Mmcv(Layers):
    """mmcv: batches second unless told otherwise, dropout, and a residual."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, dropout=0.1, batch_first=False):
        super().__init__(embed_dims, num_heads, num_levels, num_points)
        self.num_heads, self.num_levels, self.num_points = self.sides
        self.batch_first, self.dropout = batch_first, nn.Dropout(dropout)

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, reference_points=None,
        spatial_shapes=None, level_start_index=None, **kwargs,
    ):  # fmt: skip
        identity = kwargs.get("residual", identity)  # as mmcv's decorator translates it
        value = query if value is None else value
        identity = query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.permute(1, 0, 2), value.permute(1, 0, 2)
        value = self.rows(value, key_padding_mask)
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        locations = locations_of(reference_points, offsets, spatial_shapes, self.num_points)
        out = self.output_proj(attention_core(value, spatial_shapes, locations, weights))
        return self.dropout(out if self.batch_first else out.permute(1, 0, 2)) + identity


class Pillars(Layers):
    """BEVFormer's MSDeformableAttention3D: point p belongs to reference p mod Z of a pillar."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=8, batch_first=True):
        super().__init__(embed_dims, num_heads, num_levels, num_points, output=False)
        self.num_heads, self.num_levels, self.num_points = self.sides
        self.batch_first = batch_first

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, reference_points=None,
        spatial_shapes=None, level_start_index=None, **kwargs,
    ):  # fmt: skip
        value = self.rows(query if value is None else value, key_padding_mask)
        query = query if query_pos is None else query + query_pos
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        steps = offsets / spatial_shapes.flip(-1)[:, None]
        steps = steps.unflatten(4, (-1, reference_points.shape[2]))
        locations = (reference_points[:, :, None, None, None] + steps).flatten(4, 5)
        return attention_core(value, spatial_shapes, locations, weights)


class Temporal(Layers):
    """BEVFormer's TemporalSelfAttention: two maps, and the mean of what a query reads in both."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, num_bev_queue=2, dropout=0.1, batch_first=True):
        super().__init__(embed_dims, num_heads, num_levels, num_points, reads=2, queue=num_bev_queue)
        self.num_heads, self.num_levels, self.num_points = self.sides
        self.batch_first, self.num_bev_queue, self.dropout = batch_first, num_bev_queue, nn.Dropout(dropout)

    def forward(
        self, query, key=None, value=None, identity=None, query_pos=None, key_padding_mask=None, reference_points=None,
        spatial_shapes=None, level_start_index=None, flag="decoder", **kwargs,
    ):  # fmt: skip
        bs, queries, width = query.shape
        if value is None:
            value = torch.stack([query, query], 1).reshape(bs * 2, queries, width)
        identity = query if identity is None else identity
        query = query if query_pos is None else query + query_pos
        query = torch.cat([value[:bs], query], -1)
        value = self.rows(value, key_padding_mask)
        sides = self.num_heads, 2, self.num_levels, self.num_points
        offsets = self.sampling_offsets(query).view(bs, queries, *sides, 2)
        weights = self.attention_weights(query).view(bs, queries, self.num_heads, 2, -1).softmax(-1).view(bs, queries, *sides)
        offsets = offsets.permute(0, 3, 1, 2, 4, 5, 6).reshape(bs * 2, queries, self.num_heads, *sides[2:], 2)
        weights = weights.permute(0, 3, 1, 2, 4, 5).reshape(bs * 2, queries, self.num_heads, *sides[2:])
        locations = locations_of(reference_points, offsets, spatial_shapes, self.num_points)
        out = attention_core(value, spatial_shapes, locations, weights).permute(1, 2, 0).reshape(queries, width, bs, 2)
        return self.dropout(self.output_proj(out.mean(-1).permute(2, 0, 1))) + identity


class Paper(Layers):
    """MSDeformAttn of Deformable-DETR's repository."""

    def __init__(self, d_model=256, n_levels=4, n_heads=8, n_points=4):
        super().__init__(d_model, n_heads, n_levels, n_points)
        self.n_heads, self.n_levels, self.n_points = self.sides

    def forward(
        self, query, reference_points, input_flatten, input_spatial_shapes, input_level_start_index, input_padding_mask=None
    ):
        value = self.rows(input_flatten, input_padding_mask)
        offsets, weights = self.split(self.sampling_offsets(query), self.attention_weights(query))
        locations = locations_of(reference_points, offsets, input_spatial_shapes, self.n_points)
        return self.output_proj(attention_core(value, input_spatial_shapes, locations, weights))


class OtherNames(Layers):
    """Parameters of no known form."""

    def forward(self, queries, keys):
        return self.sampling_offsets(queries), self.attention_weights(keys)


KINDS = (HuggingFace, Mask2Former, Mmcv, Pillars, Temporal, Paper)


def library(*kinds: type) -> types.ModuleType:
    """A Python module that has these classes and their core."""
    module = types.ModuleType("a_library")
    vars(module).update({kind.__name__: kind for kind in kinds}, attention_core=attention_core)
    return module


class Operators(TorchDispatchMode):
    """Names of our operators in the order of their calls."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "mx_driving":
            self.names.append(func._opname)
        return func(*args, **(kwargs or {}))


WITH_LOGITS, BARE = "multi_scale_deformable_attn_with_logits", "multi_scale_deformable_attn"


def build(kind, **more):
    torch.manual_seed(0)
    if issubclass(kind, HuggingFace):
        module = kind(types.SimpleNamespace(d_model=16, num_feature_levels=2), 2, 3, **more)
    elif kind is Paper:
        module = kind(16, 2, 2, 3)
    else:
        module = kind(16, 2, 2, 4, **more)
    for p in module.parameters():
        nn.init.normal_(p, std=0.4)
    return module.double().eval()


def arguments(module, numbers=2, masked=True, queries=KEYS):
    """By the names of the module's parameters."""
    generator = torch.Generator().manual_seed(1)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    batches = 4 if isinstance(module, Temporal) else 2
    memory, mask = rand(batches, KEYS, 16), rand(batches, KEYS) < 0.4
    query, position, identity = (rand(2, queries, 16) for _ in range(3))
    reference, shapes, starts = rand(batches, queries, 2, numbers), torch.tensor(SIZES), torch.tensor([0, 20])
    if isinstance(module, HuggingFace):
        names = ("hidden_states", "encoder_hidden_states", "position_embeddings", "reference_points")
        given = dict(zip(names, (query, memory, position, reference), strict=True))
        given |= {"spatial_shapes": shapes, "spatial_shapes_list": SIZES, "level_start_index": starts}
        return given | ({"attention_mask": mask} if masked else {})
    if isinstance(module, Paper):
        names = ("query", "reference_points", "input_flatten", "input_spatial_shapes", "input_level_start_index")
        given = dict(zip(names, (query, reference, memory, shapes, starts), strict=True))
        return given | ({"input_padding_mask": mask} if masked else {})
    rows = {"query": query, "value": memory, "query_pos": position}
    rows |= {} if isinstance(module, Pillars) else {"identity": identity}
    if not module.batch_first:
        rows = {name: t.transpose(0, 1) for name, t in rows.items()}
    given = {**rows, "reference_points": reference, "spatial_shapes": shapes, "level_start_index": starts}
    return given | ({"key_padding_mask": mask} if masked else {})


def each_floating(given, change):
    return {n: change(t) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in given.items()}


def results(module, given):
    """Outputs, and gradients of all inputs and parameters."""
    given = {
        n: t.detach().requires_grad_() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in given.items()
    }
    outputs = module(**given)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    leaves = [t for t in given.values() if isinstance(t, torch.Tensor) and t.requires_grad] + list(module.parameters())
    directions = [torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape) for out in outputs]
    return outputs + list(torch.autograd.grad(outputs, leaves, directions))


def operators(module, given):
    """Where no gradient is recorded."""
    with Operators() as seen, torch.no_grad():
        module(**given)
    return seen.names


class DropsWeights(nn.Module):
    """A layer that drops the weights of its attention, as most layers of transformers do."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, **given):
        hidden, _ = self.attention(**given)
        return hidden


class Reads(DropsWeights):
    """A layer that keeps the weights under a name."""

    def forward(self, **given):
        hidden, weights = self.attention(**given)
        self.seen = weights
        return hidden


class ReadsLate(DropsWeights):
    """The name says that they are dropped, but they are not."""

    def forward(self, **given):
        for _ in range(2):
            hidden, _ = self.attention(**given)
        return hidden, _


class ReadsBoth(DropsWeights):
    def forward(self, **given):
        return self.attention(**given)


def recorded(run, given):
    """Names of our operators while gradients are recorded."""
    with Operators() as seen:
        run(**given)
    return seen.names


def agrees(module, given, operator=WITH_LOGITS):
    """The module's own outputs and gradients, by this operator."""
    kind, expected = type(module), results(module, given)
    with mx_driving.patched(library(kind)) as done:
        assert done.replaced == (f"{__name__}.attention_core", f"{__name__}.{kind.__name__}")
        assert operators(module, given) == [operator]
        torch.testing.assert_close(results(module, given), expected, rtol=1e-10, atol=1e-10)
    assert operators(module, given) == []


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize(("kind", "numbers"), [(kind, n) for kind in KINDS for n in (2, 4) if (kind, n) != (Pillars, 4)])
def test_outputs_weights_and_gradients(kind, numbers, masked):
    module = build(kind)
    agrees(module, arguments(module, numbers, masked))


@pytest.mark.parametrize("kind", [HuggingFace, Mask2Former])
def test_weights_that_somebody_has_are_those_of_the_operator(kind):
    """The gradient of the output for the weights themselves, which only exists if the output is made from them."""
    module = build(kind)
    given = arguments(module)

    def gradients():
        out, weights = module(**given)
        weights.retain_grad()
        out.square().sum().backward(retain_graph=True)
        return [weights.grad, *torch.autograd.grad(out.sum(), weights)]

    expected = gradients()
    with mx_driving.patched(library(kind)):
        assert recorded(module, given) == [BARE]
        torch.testing.assert_close(gradients(), expected, rtol=1e-10, atol=1e-10)


def test_weights_that_the_caller_drops_are_not_made():
    layer = DropsWeights(build(HuggingFace))
    given = arguments(layer.attention)
    expected = results(layer, given)
    with mx_driving.patched(library(HuggingFace)):
        assert recorded(layer, given) == [WITH_LOGITS]
        torch.testing.assert_close(results(layer, given), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [Reads, ReadsLate, ReadsBoth])
def test_weights_that_the_caller_reads_are_those_of_the_operator(kind):
    layer = kind(build(HuggingFace))
    given = arguments(layer.attention)
    with mx_driving.patched(library(HuggingFace)):
        assert set(recorded(layer, given)) == {BARE}
        assert set(operators(layer, given)) == {WITH_LOGITS}


@pytest.mark.parametrize("everywhere", [False, True])
def test_weights_that_a_hook_sees_are_those_of_the_operator(everywhere):
    layer, seen = DropsWeights(build(HuggingFace)), []
    given = arguments(layer.attention)

    def keep(module, args, output):
        if module is layer.attention:
            seen.append(output[1])

    hook = nn.modules.module.register_module_forward_hook(keep) if everywhere else layer.attention.register_forward_hook(keep)
    with mx_driving.patched(library(HuggingFace)):
        try:
            assert recorded(layer, given) == [BARE]
            (gradient,) = torch.autograd.grad(layer(**given).sum(), seen[-1])
        finally:
            hook.remove()
        assert gradient.abs().max() > 0
        assert recorded(layer, given) == [WITH_LOGITS]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_takes_the_same_operator_again(reentrant):
    layer = DropsWeights(build(HuggingFace))
    given = arguments(layer.attention)
    given["hidden_states"].requires_grad_()

    expected = torch.autograd.grad(layer(**given).sum(), list(layer.parameters()))
    again = functools.partial(torch.utils.checkpoint.checkpoint, lambda hidden: layer(**{**given, "hidden_states": hidden}))
    with mx_driving.patched(library(HuggingFace)), Operators() as seen:
        again(given["hidden_states"], use_reentrant=reentrant).sum().backward()
    found = [p.grad for p in layer.parameters()]
    torch.testing.assert_close(found, list(expected), rtol=1e-10, atol=1e-10)
    assert seen.names[:2] == [WITH_LOGITS, WITH_LOGITS]


@pytest.mark.parametrize("kind", [Mmcv, Pillars, Temporal])
def test_a_module_may_look_at_its_own_queries(kind):
    module = build(kind, batch_first=True)
    agrees(module, {n: t for n, t in arguments(module).items() if n not in ("value", "identity", "query_pos")})


@pytest.mark.parametrize(
    "change",
    [
        {"attention_mask": torch.ones(2, KEYS).bool()},
        {"attention_mask": torch.zeros(2, KEYS).bool()},
        {"reference_points": torch.rand(1, 1, 1, 2, dtype=torch.float64)},
    ],
    ids=["a mask that hides nothing", "one that hides all", "one reference for all batches, queries and levels"],
)
def test_other_inputs(change):
    module = build(HuggingFace)
    agrees(module, {**arguments(module), **change})


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Sharper, "its result on a small example differs from the operator's by"),
        (Unbuildable, "it does not run on a small example: TypeError: .*missing 1 required positional argument: 'secret'"),
        (OtherNames, r"no known form of an attention module has the parameters \(queries, keys\)"),
    ],
)
def test_a_module_with_other_arithmetic_keeps_its_code_around_the_core(kind, reason):
    own = vars(kind)["forward"]
    with pytest.warns(UserWarning, match=f"left {__name__}.{kind.__name__} alone: {reason}"):
        done = mx_driving.patch(library(kind))
    try:
        assert done.replaced == (f"{__name__}.attention_core",)
        assert list(done.skipped) == [f"{__name__}.{kind.__name__}"]
        assert vars(kind)["forward"] is own
        if kind is Sharper:
            module = build(kind)
            assert operators(module, arguments(module)) == [BARE]
    finally:
        done.restore()


@pytest.mark.parametrize(
    ("width", "heads", "points", "words"),
    [
        (256, 8, 4, ""),
        (256, 16, 4, "value must have num_heads <= 8 (Atlas A2 limit); got 16"),
        (256, 8, 40, "sampling_locations must have num_points * num_levels <= 64 (Atlas A2 limit); got 80"),
        (48, 4, 4, "value must have embed_dims a multiple of 8 and <= 64 (Atlas A2 limit); got 12"),
    ],
)
def test_a_model_that_the_vendors_device_would_refuse_is_remarked_on(width, heads, points, words):
    config = types.SimpleNamespace(d_model=width, num_feature_levels=2)
    model = nn.ModuleDict({"first": nn.Linear(2, 2), "attention": HuggingFace(config, heads, points)})
    with mx_driving.patched(model) as done:
        assert done.replaced
        assert done.limits == ({"attention": words} if words else {})
        assert (f"the vendor's device would refuse attention: {words}" in repr(done)) == bool(words)


def test_cores_alone_when_asked_for():
    module = build(HuggingFace)
    with mx_driving.patched(library(HuggingFace, OtherNames), modules=False) as done:
        assert (done.replaced, done.skipped) == ((f"{__name__}.attention_core",), {})
        assert operators(module, arguments(module)) == [BARE]


@pytest.mark.parametrize("first", [0, 1])
def test_two_patches_share_a_module(first):
    """Whichever ends first, the module and its core stay replaced for the other."""
    module, own = build(HuggingFace), HuggingFace.forward
    given = arguments(module)
    both = [mx_driving.patch(library(HuggingFace), modules=modules) for modules in (True, False)]
    both += [mx_driving.patch(library(HuggingFace))]
    assert both[2].replaced == both[0].replaced
    both.pop(first).restore()
    assert operators(module, given) == [WITH_LOGITS]
    for patch in both:
        patch.restore()
    assert HuggingFace.forward is own
    assert operators(module, given) == []


def test_dropout_in_training_draws_the_same_numbers():
    module = build(Mmcv).train()
    given = arguments(module)
    torch.manual_seed(3)
    expected = module(**given)
    with mx_driving.patched(library(Mmcv)):
        torch.manual_seed(3)
        torch.testing.assert_close(module(**given), expected, rtol=1e-10, atol=1e-10)
    assert not torch.equal(module.eval()(**given), expected)


def test_hooks_of_linear_layers_are_called_and_parameters_stay():
    module = build(Mmcv)
    before = {name: p.data_ptr() for name, p in module.named_parameters()}
    called = []
    for name, layer in module.named_children():
        layer.register_forward_hook(lambda *_, name=name: called.append(name))
    with mx_driving.patched(library(Mmcv)):
        module(**arguments(module))
    assert sorted(called) == sorted(dict(module.named_children()))
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == before


def test_mmcvs_former_name_of_identity_goes_to_its_own_code():
    module = build(Mmcv)
    given = arguments(module)
    given["residual"] = given.pop("identity")
    agrees(module, given, BARE)


def test_arguments_by_place():
    module = build(Paper)
    given = arguments(module)
    with mx_driving.patched(library(Paper)):
        torch.testing.assert_close(module(*given.values()), module(**given), rtol=0, atol=0)


@torch.no_grad()
@pytest.mark.parametrize("name", ["spatial_shapes_list", "spatial_shapes"])
def test_levels_that_do_not_fill_the_keys_are_refused(name):
    module = build(HuggingFace)
    given = arguments(module) | {"spatial_shapes": torch.tensor([(4, 5), (2, 2)]), "spatial_shapes_list": [(4, 5), (2, 2)]}
    if name == "spatial_shapes":
        del given["spatial_shapes_list"]
    with (
        mx_driving.patched(library(HuggingFace)),
        pytest.raises(ValueError, match=r"^spatial_shapes must hold the num_keys=26 rows of value; got 24 in all levels$"),
    ):
        module(**given)


def test_autocast_gives_the_dtypes_of_patched_cores():
    module = build(HuggingFace).float()
    given = each_floating(arguments(module), torch.Tensor.float)
    found = []
    for modules in (False, True):
        with mx_driving.patched(library(HuggingFace), modules=modules), torch.autocast("cpu", dtype=torch.bfloat16):
            found.append(module(**given))
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.05, atol=0.05)


def test_compiles_whole():
    module = build(HuggingFace)
    given = arguments(module)
    expected = results(module, given)
    torch._dynamo.reset()
    with mx_driving.patched(library(HuggingFace)):
        compiled = torch.compile(module, fullgraph=True, backend="eager")
        torch.testing.assert_close(results(compiled, given), expected, rtol=1e-10, atol=1e-10)


def test_masks_that_cannot_be_read():
    """vmap over masks, whose numbers Python cannot see."""
    module = build(HuggingFace)
    given = arguments(module)
    masks = torch.stack([given.pop("attention_mask"), torch.ones(2, KEYS).bool()])
    expected = torch.stack([module(**given, attention_mask=mask)[0] for mask in masks])
    with mx_driving.patched(library(HuggingFace)):
        found = torch.vmap(lambda mask: module(**given, attention_mask=mask)[0])(masks)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_the_trial_leaves_no_trace():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"), mx_driving.patched(library(*KINDS)) as done:
            assert len(done.replaced) == 1 + len(KINDS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_num_threads(before)
    assert torch.equal(torch.random.get_rng_state(), state)
