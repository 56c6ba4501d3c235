"""patch proves itself on the caller's calls: a layer or a core that computes something else there keeps its own code.

Each class differs from a library's in one thing that a small example does not show.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import pickle
import threading
import types
import warnings

import attention_modules as libraries
import pytest
import torch
from attention_modules import (
    BARE,
    MMCV,
    PAPER,
    SIZES,
    WITH_LOGITS,
    arguments_for,
    build,
    close,
    library,
    make_forward,
    operators,
    patched,
    plain_core,
    recorded,
    results,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

import mx_driving

PAPERS = PAPER + ", input_level_start_index, input_padding_mask=None"
GLOBAL = {"factor": 1.0}
pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch")


class Varied(libraries.Paper):
    """Offsets and output by factors that `change` may make others."""

    forward = make_forward(PAPERS)
    change, times, table, config = None, 1.0, {"factor": 1.0}, types.SimpleNamespace(factor=1.0)

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.register_buffer("gain", torch.ones(()))
        self.factors, self.scale, self.after = [1.0], functools.partial(torch.mul, 1.0), nn.Identity()

    def samples(self, reference, shapes, offsets, logits):
        offsets = self.scale(offsets) * self.factors[0] * self.gain * self.config.factor
        return super().samples(reference, shapes, offsets, logits)

    def attend(self, query, **named):
        out = self.after(super().attend(query=query, **named)) * self.times * GLOBAL["factor"] * self.table["factor"]
        return out if self.change is None else self.change(out, query)


def by_batch(out, query):
    return out * (2 if len(query) > 4 else 1)


def by_number_of_queries(out, query):
    return out * (2 if query.shape[1] > 200 else 1)


def by_dtype(out, query):
    return out * (2 if query.dtype == torch.float32 else 1)


def by_recording(out, query):
    return out * (2 if torch.is_grad_enabled() and query.requires_grad else 1)


def by_detaching(out, query):
    return out.detach() + 0 * query.sum()


def set_to(name, value):
    return lambda module: setattr(module, name, value)


CHANGES = {
    "a partial function": set_to("scale", functools.partial(torch.mul, 2.0)),
    "a function": set_to("scale", torch.sigmoid),
    "a list": lambda module: module.factors.__setitem__(0, 2.0),
    "a number": set_to("times", 2),
    "a dict of the class": set_to("table", {"factor": 2.0}),
    "a configuration": set_to("config", types.SimpleNamespace(factor=2.0)),
    "a buffer": lambda module: module.gain.fill_(2.0),
    "a layer": set_to("after", nn.Tanh()),
    "a hook": lambda module: module.after.register_forward_hook(lambda layer, inputs, out: 2 * out),
    "a limit": set_to("change", lambda out, query: out.clamp(-0.5, 0.5)),
    "an output without a gradient": set_to("change", by_detaching),
    **{change.__name__: set_to("change", change) for change in (by_batch, by_number_of_queries, by_dtype, by_recording)},
}


def inputs_of(batches=2, queries=26, dtype=torch.float64):
    generator = torch.Generator().manual_seed(queries)
    rand = functools.partial(torch.rand, generator=generator, dtype=dtype)
    shapes, starts = torch.tensor(SIZES), torch.tensor([0, 20])
    return [rand(batches, queries, 16) - 0.5, rand(batches, queries, 2, 2), rand(batches, 26, 16) - 0.5, shapes, starts, None]


CALLS = [{}, {"batches": 6}, {"queries": 201}, {"dtype": torch.float32}, {}]


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_with_another_state_keeps_its_code(name):
    """It is changed before its first call. Another layer of the class calls the operator."""
    plain, changed = build(Varied), build(Varied)
    CHANGES[name](changed)
    expected = [results(changed.to(c.get("dtype", torch.float64)), *inputs_of(**c)) for c in CALLS]
    with patched(Varied) as done:
        for _ in range(2):
            for call, right in zip(CALLS, expected, strict=True):
                ours = results(changed.to(call.get("dtype", torch.float64)), *inputs_of(**call))
                close(ours, right) if "dtype" not in call else torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-3)
        assert operators(plain, *inputs_of()) == [WITH_LOGITS]
        reason = "its code runs the hooks of after; the operator does not" if name == "a hook" else "differ"
        assert reason in done.kept[f"{__name__}.Varied"]


def test_an_attribute_that_changes_after_the_proof_is_proven_again():
    module = build(Varied)
    with patched(Varied), torch.no_grad():
        assert operators(module, *inputs_of()) == [WITH_LOGITS]
        module.times = 2.0
        assert operators(module, *inputs_of()) == [BARE]


def test_a_fresh_layer_is_proven_again_when_it_has_learned():
    """Logits of zero hide a temperature."""
    module = build(Varied)
    module.logits = lambda query: 3 * module.attention_weights(query)
    weight = module.attention_weights.weight
    with patched(Varied), torch.no_grad():
        weight.zero_(), module.attention_weights.bias.zero_()
        assert operators(module, *inputs_of()) == [WITH_LOGITS]
        weight.normal_()
        assert operators(module, *inputs_of()) == [BARE]


def test_a_layer_that_keeps_its_code_says_so_once():
    model = nn.ModuleDict({"first": build(Varied), "second": build(Varied), "third": build(Varied)})
    set_to("times", 2.0)(model["second"])
    with mx_driving.patched(model) as done, torch.no_grad():
        assert set(done.uncalled) >= {"first", "second", "third"}
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for layer in 3 * [model["first"], model["second"]]:
                layer(*inputs_of())
        (words,) = [str(w.message) for w in seen]
        assert seen[0].filename == __file__  # where the layer is called
        assert words.startswith("mx_driving.patch: second keeps its own code in evaluation, without gradients, float64 on cpu")
        assert "its result differs from the operator's by 5.0e-01 of its size" in words
        assert (done.proven[-1], list(done.kept), done.uncalled) == ("first", ["second"], ("third",))
        for words in ("second keeps its own code in evaluation", "first", "not called yet: third"):
            assert words in repr(done)
    assert not any("verdict" in name for layer in model.values() for name in vars(layer))


class Writes(libraries.Mmcv):
    forward = make_forward(MMCV + "**kwargs")

    def attend(self, **named):
        out = super().attend(**named)
        if getattr(self, "keeps", False):
            self.last = out.detach()
        return out


def test_a_layer_that_writes_keeps_its_code():
    module = build(Writes)
    arguments = arguments_for(module)
    with patched(Writes) as done:
        assert operators(module, **arguments) == [WITH_LOGITS]
        module.keeps = True
        assert operators(module, **arguments) == [BARE]
        assert module.last is not None
        assert "its code writes last, which outlives the call" in done.kept[f"{__name__}.Writes"]


def test_the_first_call_is_the_callers_own():
    """Buffers, random numbers and hooks of gradients see one call."""
    module = build(libraries.Mmcv).train()
    module.output_proj = nn.Sequential(module.output_proj, Normed().double())
    twin, grads = copy.deepcopy(module), []
    for layer in (module, twin):
        for p in layer.parameters():
            p.register_post_accumulate_grad_hook(lambda p: grads.append(p))
    runs = []
    for layer, wrap in ((twin, contextlib.nullcontext()), (module, patched(libraries.Mmcv))):
        with wrap:
            torch.manual_seed(3)
            out = [layer(**arguments_for(layer)) for _ in range(2)]
            out[0].sum().backward()
            runs.append([*out, *(p.grad for p in layer.parameters()), *layer.buffers(), torch.rand(3)])
    close(runs[1], runs[0])
    assert len(grads) == 2 * len(list(module.parameters()))


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant):
    module = build(libraries.Paper)

    def run():
        inputs = [t.clone().requires_grad_() if t is not None and t.is_floating_point() else t for t in inputs_of()]
        module.zero_grad()
        out = checkpoint(module, *inputs, use_reentrant=reentrant)
        out.square().sum().backward()
        return [out, inputs[0].grad, *(p.grad for p in module.parameters())]

    expected = run()
    with patched(libraries.Paper) as done:
        for _ in range(3):
            close(run(), expected)
        assert done.kept == {}
        assert len(done.proven) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_in_16_bits_the_layer_is_compared_in_float32(dtype, autocast):
    """Plain PyTorch gives NaN where grid_sample reads maps of 16 bits that are not contiguous."""
    module = build(libraries.Paper).float()
    inputs = inputs_of(dtype=torch.float32)
    expected = module(*inputs)
    if not autocast:
        module, inputs = module.to(dtype), [t.to(dtype) if t is not None and t.is_floating_point() else t for t in inputs]
    with patched(libraries.Paper) as done, torch.autocast("cpu", dtype, enabled=autocast):
        for _ in range(2):
            out = module(*inputs)
            assert out.dtype == dtype
            torch.testing.assert_close(out.float(), expected, rtol=0.1, atol=0.1)
        assert recorded(module, *inputs)[0].startswith(WITH_LOGITS)
        module.core = staticmethod(lambda *args: 2 * plain_core(*args))
        assert not any(name.startswith(WITH_LOGITS) for name in recorded(module, *inputs))
        assert list(done.kept) == ["attention_modules.Paper"]


def test_in_16_bits_a_layer_is_compared_that_deepcopy_refuses():
    """Its weight is a view, as weight_norm and FSDP make it, and its class forbids copies, as that of fully_shard does."""

    def refuse(*_):
        raise AssertionError("no copies")

    module = build(libraries.Paper).float()
    module.__class__ = type("Sharded", (libraries.Paper,), {"__deepcopy__": refuse})
    projection = module.value_proj
    projection._parameters["weight"] = projection.weight * 1
    inputs = inputs_of(dtype=torch.float32)
    with patched(libraries.Paper) as done, torch.autocast("cpu", torch.bfloat16):
        module(*inputs)
        assert recorded(module, *inputs)[0].startswith(WITH_LOGITS)
        assert done.kept == {}


def test_a_core_that_returns_float32_for_16_bits_keeps_that():
    module = library(plain_core, source="""
        def core(value, value_spatial_shapes, sampling_locations, attention_weights):
            tensors = (t.float() for t in (value, sampling_locations, attention_weights))
            value, locations, weights = tensors
            return plain_core(value, value_spatial_shapes, locations, weights)
    """)  # fmt: skip
    arguments = [torch.rand(1, 26, 2, 8), SIZES, torch.rand(1, 7, 2, 2, 3, 2), torch.rand(1, 7, 2, 2, 3)]
    arguments = [a.bfloat16() if isinstance(a, torch.Tensor) else a for a in arguments]
    expected = module.core(*arguments)
    with mx_driving.patched(module):
        for _ in range(2):
            torch.testing.assert_close(module.core(*arguments), expected, rtol=1e-6, atol=1e-6)


def test_a_call_that_cannot_be_compared_runs_the_operator_where_it_is_proven():
    """torch.compile reads one branch. A layer that was not called runs its own code, and says so."""
    module, other = build(libraries.Paper), build(Varied)
    inputs = inputs_of()
    expected = results(module, *inputs)
    with patched(libraries.Paper, Varied):
        results(module, *inputs)
        for dynamic in (False, True):
            torch._dynamo.reset()
            graphs = []
            compiled = torch.compile(
                module, fullgraph=True, dynamic=dynamic, backend=lambda g, _, kept=graphs: kept.append(g) or g
            )
            close(results(compiled, *inputs), expected)
            assert [WITH_LOGITS in str(g.code) for g in graphs] == [True]
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="runs its own code.*call the model once, as it will be used, before compiling"):
            close(results(torch.compile(other, backend="eager"), *inputs), results(copy.deepcopy(other), *inputs))


def test_a_layer_like_the_tried_one_is_trusted_where_nothing_can_be_compared():
    """Under vmap, for example. A layer with one more attribute is not."""
    rows = torch.stack([inputs_of()[0], inputs_of()[0] + 1])
    for change, called in ((None, WITH_LOGITS), ("note", BARE)):
        module = build(Trusted)
        if change:
            module.note = 1
        with patched(Trusted):
            with libraries.Operators() as seen, torch.no_grad():
                module(*inputs_of())
            assert seen.names == [called]
            run = functools.partial(lambda layer, rest, query: layer(query, *rest), module, inputs_of()[1:])
            close(torch.vmap(run)(rows), torch.stack([run(row) for row in rows]))


class Trusted(libraries.Paper):
    forward = make_forward(PAPERS)

    @property
    def sides(self):
        """Sizes under names that every library has."""
        return self.n_heads, self.n_levels, self.n_points

    @sides.setter
    def sides(self, value):
        pass


def missing_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    if value.shape[0] > 2:
        raise ImportError("no compiled file")
    return plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)


def test_an_original_that_cannot_run_leaves_the_call_to_a_trusted_operator():
    arguments = torch.rand(3, 26, 2, 8), SIZES, torch.rand(3, 7, 2, 2, 3, 2), torch.rand(3, 7, 2, 2, 3)
    expected = plain_core(*arguments)
    with mx_driving.patched(library(missing_core)) as done:
        torch.testing.assert_close(missing_core(*arguments), expected)
        assert (done.kept, done.proven) == ({}, ())
        with pytest.raises(RuntimeError, match="size"):  # the original's own words
            missing_core(arguments[0][:2], SIZES, *arguments[2:])


@pytest.mark.parametrize("like_the_tried_one", [True, False])
def test_too_little_memory_for_a_comparison(like_the_tried_one, monkeypatch):
    """The original's run for the caller fits; a second one beside it does not."""
    module, runs = build(Trusted), []
    if not like_the_tried_one:
        module.note = 1
    with patched(Trusted) as done:
        samples = Trusted.samples

        def run_once(*args):
            runs.append(1)
            if len(runs) > 1:
                raise torch.OutOfMemoryError
            return samples(*args)

        monkeypatch.setattr(Trusted, "samples", run_once)
        results(module, *inputs_of())
        assert list(done.kept) == ([] if like_the_tried_one else ["test_patching_proof.Trusted"])
        assert "there is too little memory to compare it" in repr(done) or like_the_tried_one


def test_two_threads_call_a_layer_for_the_first_time_together():
    module = build(Varied)
    expected = module(*inputs_of())
    barrier, outs = threading.Barrier(4), []

    def run():
        barrier.wait()
        for _ in range(3):
            outs.append(module(*inputs_of()))

    with patched(Varied) as done:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        close(outs, [expected] * 12)
        assert operators(module, *inputs_of()) == [WITH_LOGITS]
        assert done.kept == {}


def test_copies_of_a_patched_layer_are_proven_anew():
    module = build(libraries.Paper)
    expected = module(*inputs_of())
    with patched(libraries.Paper):
        module(*inputs_of())
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            twin.scale = 2.0
            close(twin(*inputs_of()), expected)
            assert operators(twin, *inputs_of()) == [WITH_LOGITS]
    close(pickle.loads(pickle.dumps(module))(*inputs_of()), expected)


def test_without_a_proof_the_trial_is_trusted():
    module = build(Varied)
    module.times = 2.0
    expected = module(*inputs_of())
    with patched(Varied, prove=False), libraries.Operators() as seen:
        close(2 * module(*inputs_of()), expected)
    assert seen.names == [WITH_LOGITS]


AUTOGRAD = """
def sample(value, shapes, locations, weights):
    return plain_core(value, [tuple(s) for s in shapes.tolist()], locations{edit}, weights)

class MSDeformAttnFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value, value_spatial_shapes, value_level_start_index, sampling_locations, attention_weights, im2col_step):
        ctx.save_for_backward(value, value_spatial_shapes, sampling_locations, attention_weights)
        return sample(value, value_spatial_shapes, sampling_locations, attention_weights)

    @staticmethod
    def backward(ctx, grad):
        value, shapes, *others = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in (value, *others)]
            grads = torch.autograd.grad(sample(leaves[0], shapes, *leaves[1:]), leaves, grad)
        return grads[0], None, None, grads[1], grads[2], None
"""


@pytest.mark.parametrize(("edit", "called"), [("", [BARE]), (".clamp(0, 1)", []), (".clamp(-1, 2)", [])])
def test_an_autograd_function_in_plain_torch_is_tried_and_proven(edit, called):
    """The first edit shows in the trial, the second on the caller's data."""
    module = library(plain_core, source=AUTOGRAD.format(edit=edit))
    apply = module.MSDeformAttnFunction.apply
    tensors = torch.rand(1, 26, 2, 8), torch.tensor(SIZES), torch.tensor([0, 20]), 8 * torch.rand(1, 7, 2, 2, 3, 2) - 3
    arguments = *(t.double() if t.is_floating_point() else t for t in tensors), torch.rand(1, 7, 2, 2, 3).double(), 64
    expected = results(apply, *arguments)
    with mx_driving.patched(module, modules=False) as done:
        assert ("a_library.MSDeformAttnFunction" in done.skipped) == (edit == ".clamp(0, 1)")
        run = lambda *args: module.MSDeformAttnFunction.apply(*args)  # noqa: E731
        for _ in range(2):
            close(results(run, *arguments), expected)
        assert operators(run, *arguments) == called or (edit and BARE in operators(run, *arguments))
    close(results(apply, *arguments), expected)


def test_the_trial_names_no_constructor_call_that_nobody_made():
    """StreamMapNet's references have an axis of points, which no form has."""

    class OfPoints(libraries.Mmcv):
        forward = make_forward(MMCV + "**kwargs")

        def samples(self, reference, shapes, offsets, logits):
            assert reference.shape[2] == self.sides[2], "a reference for each point"

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        mx_driving.patch(library(OfPoints, plain_core)).restore()
    assert any("a reference for each point" in str(w.message) for w in seen)
