"""patch proves itself on the caller's calls: a layer or a core that computes something else there keeps its own code.

Each layer differs from a library's in one thing that a small example does not show.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import types
import warnings

import attention_modules as libraries
import pytest
import torch
from attention_modules import (
    BARE,
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
    """Offsets, mask, logits and output may be changed."""

    forward = make_forward(PAPERS)
    change = change_offsets = change_mask = change_logits = None
    times, table, config = 1.0, {"factor": 1.0}, types.SimpleNamespace(factor=1.0)
    tensor = torch.ones(())

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.register_buffer("gain", torch.ones(()))
        self.factors, self.scale, self.after = [1.0], functools.partial(torch.mul, 1.0), nn.Identity()

    def samples(self, reference, shapes, offsets, logits):
        offsets = self.scale(offsets) * self.factors[0] * self.gain * self.tensor * self.config.factor
        offsets = offsets if self.change_offsets is None else self.change_offsets(offsets, shapes)
        return super().samples(reference, shapes, offsets, logits if self.change_logits is None else self.change_logits(logits))

    def rows(self, value, mask=None):
        return super().rows(value, mask if self.change_mask is None else self.change_mask(mask))

    def attend(self, query, **named):
        out = self.after(super().attend(query=query, **named)) * self.times * GLOBAL["factor"] * self.table["factor"]
        return out if self.change is None else self.change(out, query)


def set_to(name, value):
    return lambda module: setattr(module, name, value)


def double_if(condition):
    return set_to("change", lambda out, query: out * (2 if condition(query) else 1))


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
    "an output without a gradient": set_to("change", lambda out, query: out.detach() + 0 * query.sum()),
    "the batch": double_if(lambda query: len(query) > 4),
    "the number of queries": double_if(lambda query: query.shape[1] > 200),
    "the dtype": double_if(lambda query: query.dtype == torch.float32),
    "recording": double_if(lambda query: torch.is_grad_enabled() and query.requires_grad),
}


def inputs_of(batches=2, queries=26, dtype=torch.float64, sizes=SIZES, hidden=None):
    generator, keys = torch.Generator().manual_seed(queries), sum(h * w for h, w in sizes)
    rand = functools.partial(torch.rand, generator=generator, dtype=dtype)
    shapes, starts = torch.tensor(sizes), torch.tensor([0, sizes[0][0] * sizes[0][1]])
    mask = None if hidden is None else torch.tensor([key in hidden for key in range(keys)]).repeat(batches, 1)
    rows = rand(batches, queries, 16) - 0.5, rand(batches, queries, 2, 2), rand(batches, keys, 16) - 0.5
    return [*rows, shapes, starts, mask]


CALLS = [{}, {"batches": 6}, {"queries": 201}, {"dtype": torch.float32}, {}]


@pytest.mark.parametrize("name", CHANGES)
def test_a_layer_with_another_state_keeps_its_code(name):
    """It is changed before its first call. Another layer of the class calls the operator."""
    plain, changed = build(Varied), build(Varied)
    CHANGES[name](changed)
    expected = [results(changed.to(c.get("dtype", torch.float64)), *inputs_of(**c)) for c in CALLS]
    with patched(Varied) as done:
        for call, right in 2 * list(zip(CALLS, expected, strict=True)):
            ours = results(changed.to(call.get("dtype", torch.float64)), *inputs_of(**call))
            close(ours, right) if "dtype" not in call else torch.testing.assert_close(ours, right, rtol=1e-3, atol=1e-3)
        assert operators(plain, *inputs_of()) == [WITH_LOGITS]
        reason = "its code runs the hooks of after; the operator does not" if name == "a hook" else "differ"
        assert reason in done.kept[f"{__name__}.Varied"]


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


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x):
        return self.norm(x.transpose(1, 2)).transpose(1, 2)


def test_the_first_call_is_the_callers_own():
    """Buffers, random numbers, dropout and hooks of gradients see one call. The second call draws the same numbers."""
    module = build(libraries.Mmcv).train()
    module.output_proj = nn.Sequential(module.output_proj, Normed().double())
    twin, grads = copy.deepcopy(module), []
    for p in [*module.parameters(), *twin.parameters()]:
        p.register_post_accumulate_grad_hook(lambda p: grads.append(p))
    runs = []
    for layer, wrap in ((twin, contextlib.nullcontext()), (module, patched(libraries.Mmcv))):
        with wrap as done:
            torch.manual_seed(3)
            out = [layer(**arguments_for(layer)) for _ in range(2)]
            out[0].sum().backward()
            runs.append([*out, *(p.grad for p in layer.parameters()), *layer.buffers(), torch.rand(3)])
            assert done is None or not done.kept
    close(runs[1], runs[0])
    assert not torch.equal(*runs[0][:2])
    assert len(grads) == 2 * len(list(module.parameters()))


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


@pytest.mark.parametrize("kind", [libraries.Paper, libraries.HuggingFace])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_in_16_bits_the_layer_is_compared_in_float32(kind, dtype, autocast):
    """Plain PyTorch gives NaN where grid_sample reads maps of 16 bits that are not contiguous. Each output keeps its dtype."""
    module = build(kind).float()
    arguments = {n: _cast(a, torch.float32) for n, a in arguments_for(module).items()}
    expected = libraries.floating(module(**arguments))
    if not autocast:
        module, arguments = module.to(dtype), {n: _cast(a, dtype) for n, a in arguments.items()}
    with torch.autocast("cpu", dtype, enabled=autocast):
        dtypes = [out.dtype for out in libraries.floating(module(**arguments))]
        with patched(kind) as done:
            for _ in range(2):
                outputs = libraries.floating(module(**arguments))
                assert [out.dtype for out in outputs] == dtypes
                torch.testing.assert_close([out.float() for out in outputs], expected, rtol=0.1, atol=0.1)
            assert recorded(module, **arguments)[0].startswith(WITH_LOGITS)
            module.core = staticmethod(lambda *args: 2 * plain_core(*args))
            assert not any(name.startswith(WITH_LOGITS) for name in recorded(module, **arguments))
            assert list(done.kept) == [f"attention_modules.{kind.__name__}"]


def _cast(argument, dtype):
    return argument.to(dtype) if libraries.floating(argument) else argument


def test_in_16_bits_a_layer_is_compared_that_deepcopy_refuses():
    """Its weight is a view, as weight_norm and FSDP make it, and its class forbids copies, as that of fully_shard does."""

    def refuse(*_):
        raise AssertionError("no copies")

    module = build(libraries.Paper).float()
    module.__class__ = type("Sharded", (libraries.Paper,), {"__deepcopy__": refuse})
    projection = module.value_proj
    projection._parameters["weight"] = projection.weight * 1
    with patched(libraries.Paper) as done, torch.autocast("cpu", torch.bfloat16):
        assert recorded(module, *inputs_of(dtype=torch.float32))[0].startswith(WITH_LOGITS)
        assert done.kept == {}


def core_inputs(batches=3):
    rand = functools.partial(torch.rand, generator=torch.Generator().manual_seed(0))
    return rand(batches, 26, 2, 8), SIZES, rand(batches, 7, 2, 2, 3, 2), rand(batches, 7, 2, 2, 3)


def test_a_core_that_returns_float32_for_16_bits_keeps_that():
    module = library(plain_core, source="""
        def core(value, value_spatial_shapes, sampling_locations, attention_weights):
            value, locations, weights = (t.float() for t in (value, sampling_locations, attention_weights))
            return plain_core(value, value_spatial_shapes, locations, weights)
    """)  # fmt: skip
    arguments = [_cast(a, torch.bfloat16) for a in core_inputs()]
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
        third = build(Varied)
        results(third, *inputs)
        third.times = 2.0
        close(results(torch.compile(third, backend="eager"), *inputs), results(copy.deepcopy(third), *inputs))


class Trusted(libraries.Paper):
    forward = make_forward(PAPERS)

    @property
    def sides(self):
        """Sizes under names that every library has."""
        return self.n_heads, self.n_levels, self.n_points

    @sides.setter
    def sides(self, value):
        pass


@pytest.mark.parametrize(("note", "called"), [(False, WITH_LOGITS), (True, BARE)])
def test_a_layer_like_the_tried_one_is_trusted_where_nothing_can_be_compared(note, called):
    """Under vmap over masks, whose numbers Python cannot see, for example. A layer with one more attribute is not."""
    module, (*inputs, mask) = build(Trusted), inputs_of(hidden=[1, 5])
    vars(module).update({"note": 1} if note else {})
    masks = torch.stack([mask, ~mask])
    expected = torch.stack([module(*inputs, mask) for mask in masks])
    with patched(Trusted):
        with libraries.Operators() as seen, torch.no_grad():
            module(*inputs, mask)
        assert seen.names == [called]
        close(torch.vmap(lambda mask: module(*inputs, mask))(masks), expected)


def missing_core(value, value_spatial_shapes, sampling_locations, attention_weights):
    if value.shape[0] > 2:
        raise ImportError("no compiled file")
    return plain_core(value, value_spatial_shapes, sampling_locations, attention_weights)


def test_an_original_that_cannot_run_leaves_the_call_to_a_trusted_operator():
    arguments = core_inputs()
    expected = plain_core(*arguments)
    with mx_driving.patched(library(missing_core)) as done:
        torch.testing.assert_close(missing_core(*arguments), expected)
        assert (done.kept, done.proven) == ({}, ())
        with pytest.raises(RuntimeError, match="size"):  # the original's own words
            missing_core(arguments[0][:2], *arguments[1:])


@pytest.mark.parametrize("like_the_tried_one", [True, False])
def test_too_little_memory_for_a_comparison(like_the_tried_one, monkeypatch):
    """The original's run for the caller fits; a second one beside it does not."""
    module, runs = build(Trusted), []
    vars(module).update({} if like_the_tried_one else {"note": 1})
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
        outs.extend(module(*inputs_of()) for _ in range(3))

    with patched(Varied) as done:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
        close(outs, [expected] * 12)
        assert operators(module, *inputs_of()) == [WITH_LOGITS]
        assert done.kept == {}


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
    value, _, locations, weights = (_cast(a, torch.float64) for a in core_inputs())
    arguments = value, torch.tensor(SIZES), torch.tensor([0, 20]), 8 * locations - 3, weights, 64
    run = lambda *args: module.MSDeformAttnFunction.apply(*args)  # noqa: E731
    expected = results(run, *arguments)
    with mx_driving.patched(module, modules=False) as done:
        assert ("a_library.MSDeformAttnFunction" in done.skipped) == (edit == ".clamp(0, 1)")
        for _ in range(2):
            close(results(run, *arguments), expected)
        assert operators(run, *arguments) == called or (edit and BARE in operators(run, *arguments))
    close(results(run, *arguments), expected)
