"""patch: numbers that a client keeps in its module, or writes into its code, and that the replacement does not read.

Each class differs from a library's in one thing, which has no effect at the sizes, in the mode or with the constants of a small
example. A patched module gives its own numbers all the same: it is left alone, or it runs its own code where the thing differs.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import types

import attention_modules as libraries
import pytest
import torch
from attention_modules import (
    BARE,
    KEYS,
    MMCV,
    PAPER,
    RT_DETR,
    SIZES,
    WITH_LOGITS,
    build,
    close,
    define,
    library,
    operators,
    plain_core,
)
from torch import nn

import mx_driving

PAPERS = PAPER + ", input_level_start_index, input_padding_mask=None"
WIDTH, HEADS = 16, 2


def define_scaled(scaled, name, value, base=libraries.Paper, parameters=PAPERS, store=setattr):
    """Return a class that keeps a value under a name, and multiplies its offsets or its output by it."""

    class Scaled(base):
        __signature__ = inspect.signature(base)
        forward = libraries.make_forward(parameters)

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            store(self, name, value() if callable(value) else value)

        def samples(self, reference, shapes, offsets, logits):
            factor = read_number(getattr(self, name)) if scaled == "offsets" else 1
            return super().samples(reference, shapes, offsets * factor, logits)

        def attend(self, *args, **named):
            factor = read_number(getattr(self, name)) if scaled == "output" else 1
            return super().attend(*args, **named) * factor

    return Scaled


scale_offsets, scale_output = (functools.partial(define_scaled, scaled) for scaled in ("offsets", "output"))


class Switched(libraries.Paper):
    """A switch that counts in evaluation alone, and two that count together."""

    in_evaluation = first = second = False
    forward = libraries.make_forward(PAPERS)

    def attend(self, **named):
        doubled = (self.in_evaluation and not self.training) or (self.first and self.second)
        return super().attend(**named) * (2 if doubled else 1)


def set_both(module):
    module.first = module.second = True


def read_number(value):
    """Return the number in an attribute: of a list its first, of a configuration its factor."""
    if isinstance(value, (list, tuple)):
        return value[0]
    if isinstance(value, dict):
        return value["factor"]
    return value.factor if hasattr(value, "factor") else value


def register(module, name, value):
    module.register_buffer(name, value)


def one():
    return torch.ones(1)


class Scale(nn.Module):
    def __init__(self, factor=1):
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return x * self.factor


def set_to(name, value):
    def change(module):
        setattr(module, name, value)

    return change


def fill(name, value):
    def change(module):
        getattr(module, name).fill_(value)

    return change


ATTRIBUTES = {  # what a client keeps, its value after construction -> what changes later
    "a float that another form reads": (scale_offsets("offset_scale", 1.0), set_to("offset_scale", 2.0)),
    "a whole number": (scale_offsets("times", 1), set_to("times", 2)),
    "a whole number, mmcv": (scale_output("times", 1, libraries.Mmcv, MMCV + "**kwargs"), set_to("times", 3)),
    "a whole number, transformers": (
        scale_offsets("times", 1, libraries.HuggingFace, libraries.HUGGING_FACE), set_to("times", 3),
    ),
    "a whole number that another form reads": (scale_output("num_bev_queue", 1), set_to("num_bev_queue", 2)),
    "a whole number, named as a size": (scale_output("num_steps", 1), set_to("num_steps", 2)),
    "a buffer": (scale_offsets("temperature", one, store=register), fill("temperature", 2.0)),
    "a buffer of one number": (
        scale_offsets("temperature", lambda: torch.tensor(1.0), store=register), fill("temperature", 2.0),
    ),
    "a buffer that is replaced": (
        scale_output("range_factor", one, store=register), set_to("range_factor", torch.tensor([2.0])),
    ),
    "a buffer of whole numbers": (
        scale_output("level_factor", lambda: torch.ones(1, dtype=torch.long), store=register), fill("level_factor", 2),
    ),
    "a tensor": (scale_output("range_factor", one), set_to("range_factor", torch.tensor(2.0))),
    "a list": (scale_output("ranges", lambda: [1.0, 1.0]), set_to("ranges", [2.0, 1.0])),
    "a tuple": (scale_offsets("ranges", (1, 1)), set_to("ranges", (3, 1))),
    "a dict": (scale_output("options", lambda: {"factor": 1}), set_to("options", {"factor": 2})),
    "a whole number of a configuration": (
        scale_output("config", lambda: types.SimpleNamespace(factor=1)), set_to("config", types.SimpleNamespace(factor=2)),
    ),
    "a whole number of a layer": (scale_output("inner", Scale), set_to("inner", Scale(2))),
    "a switch in evaluation": (Switched, set_to("in_evaluation", True)),
    "two switches": (Switched, set_both),
    "a method": (scale_output("times", 1), set_to("logits", lambda query: 0 * query[..., :1].expand(*query.shape[:-1], 24))),
    "a buffer of RT-DETR's": (
        scale_output("range_factor", one, libraries.RtDetrV2, RT_DETR, register), fill("range_factor", 2.0),
    ),
    "a buffer of BEVFormer's": (
        scale_output("range_factor", one, libraries.Temporal, MMCV + "**kwargs", register), fill("range_factor", 2.0),
    ),
    "a whole number of a camera's attention": (
        scale_output("times", 1, libraries.Pillars, MMCV + "**kwargs"), set_to("times", 2),
    ),
}  # fmt: skip


def inputs_of(module, batches, queries, sizes, masked, dtype=torch.float64):
    """Return arguments of one shape, with locations outside the maps and offsets across them."""
    generator = torch.Generator().manual_seed(queries)

    def rand(*shape):
        return torch.rand(*shape, generator=generator, dtype=dtype)

    keys = sum(h * w for h, w in sizes)
    one_box = isinstance(module, libraries.RtDetrV2)
    reference = rand(batches * module.queue, queries, 1 if one_box else len(sizes), 4 if one_box else 2) * 1.6 - 0.3
    rows = {
        "query": 4 * rand(batches, queries, WIDTH) - 2,
        "value": rand(batches * module.queue, keys, WIDTH) - 0.5,
        "identity": rand(batches, queries, WIDTH),
        "position": rand(batches, queries, WIDTH),
    }
    if not (module.batch_first or isinstance(module, IgnoresOrder)):
        rows = {name: t.transpose(0, 1) for name, t in rows.items()}
    starts = torch.tensor([0, *(h * w for h, w in sizes[:-1])]).cumsum(0)
    arguments = {
        **rows, "reference": reference, "table": torch.tensor(sizes), "sizes": sizes, "starts": starts,
        "mask": rand(batches * module.queue, keys) < 0.4 if masked else None,
    }  # fmt: skip
    names = inspect.signature(module.forward).parameters
    return {name: arguments[libraries.ROLE[name]] for name in names if name in libraries.ROLE}


# batches, queries, maps, whether there is a mask
STATES = [
    *((1, 5, SIZES, False), (2, 30, [(12, 20), (6, 10)], True), (3, KEYS, SIZES, True), (1, KEYS, SIZES, False)),
]


@torch.no_grad()
def run(module, training, arguments):
    torch.manual_seed(0)  # of dropout
    return module.train(training)(**arguments)


def check(kind, *modules, states=STATES):
    """Assert that patched modules have their own numbers in training and evaluation."""
    calls = []
    for module, training in itertools.product(modules, (True, False)):
        used = [state for state in states if module.queue == 1 or state[1] == KEYS]
        calls += [(module.train(training), training, inputs_of(module, *state)) for state in used]
    expected = [run(*call) for call in calls]
    with mx_driving.patched(library(kind, plain_core)):
        for call, out in zip(calls, expected, strict=True):
            close(run(*call), out)


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_a_number_that_changes_after_construction_counts(name):
    kind, change = ATTRIBUTES[name]
    module, changed = build(kind), build(kind)
    change(changed)
    check(kind, module, changed)


class Constant(libraries.Paper):
    """One number in the code stands for a size, or a limit that small numbers do not reach."""

    forward = libraries.make_forward(PAPERS)

    def factors(self, query, value):
        """Return factors of the offsets and of the output."""
        return 1, 1

    def samples(self, reference, shapes, offsets, logits):
        return super().samples(reference, shapes, offsets * self.factors(offsets, shapes)[0], logits)

    def attend(self, query, value, **named):
        return super().attend(query=query, value=value, **named) * self.factors(query, value)[1]


def with_factors(offsets="1", output="1"):
    factors = eval(f"lambda self, query, value: ({offsets}, {output})")
    return define("Factors", Constant, PAPERS, factors=factors)


def with_change(name, change, base=libraries.Paper, parameters=PAPERS):
    """Return a class that changes the arguments of `samples`."""

    def samples(self, reference, shapes, offsets, logits):
        named = {"reference": reference, "offsets": offsets, "logits": logits}
        return base.samples(self, shapes=shapes, **{**named, name: change(self, named[name])})

    return define("Changes", base, parameters, samples=samples)


class Normed(libraries.Paper):
    """A layer that the constructor chooses, by an argument that it does not keep."""

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4, norm=False):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.norm = nn.LayerNorm(d_model) if norm else nn.Identity()

    forward = libraries.make_forward(PAPERS)

    def rows(self, value, mask=None):
        return super().rows(self.norm(value), mask)


class Gated(libraries.Paper):
    """A tensor that a module has or has not."""

    gate: torch.Tensor

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4, gated=False):
        super().__init__(d_model, n_levels, n_heads, n_points)
        if gated:
            self.gate = nn.Parameter(torch.ones(1))

    forward = libraries.make_forward(PAPERS)

    def logits(self, query):
        logits = super().logits(query)
        return logits * self.gate if hasattr(self, "gate") else logits


class DropsWeights(libraries.Paper):
    """It drops out without a residual, if told to."""

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4, dropout=0.0):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.drop_rate = dropout

    forward = libraries.make_forward(PAPERS)

    def attend(self, **named):
        return torch.nn.functional.dropout(super().attend(**named), self.drop_rate, self.training)


class IgnoresOrder(libraries.Mmcv):
    """It keeps `batch_first`, and has batches first whatever it says."""

    def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=4, dropout=0.1, batch_first=True):
        super().__init__(embed_dims, num_heads, num_levels, num_points, dropout, batch_first)

    forward = libraries.make_forward(MMCV + "**kwargs")

    def attend(self, **named):
        kept, self.batch_first = self.batch_first, True
        try:
            return super().attend(**named)
        finally:
            self.batch_first = kept


CONSTANTS = {
    "levels": with_factors(output="2 / self.n_levels"),
    "levels in the offsets": with_factors("2 / self.n_levels"),
    "points": with_factors("4 / self.n_points"),
    "heads": with_factors(output="3 / self.n_heads"),
    "width": with_factors(output="12 / query.shape[-1]"),
    "batches": with_factors(output="2 / len(query)"),
    "keys": with_factors(output="query.shape[1] / value.shape[1]"),
    "evaluation": with_factors(output="1 if self.training else 2"),
    "training": with_factors(output="2 if self.training else 1"),
    "references in the map": with_change("reference", lambda self, t: t.clamp(0, 1)),
    "offsets of a few pixels": with_change("offsets", lambda self, t: t.clamp(-4, 4)),
    "logits of a few units": with_change("logits", lambda self, t: t.clamp(-6, 6)),
    "references of RT-DETR": with_change("reference", lambda self, t: t.clamp(0, 1), libraries.RtDetr, RT_DETR),
    "offsets of transformers": with_change(
        "offsets", lambda self, t: t.clamp(-4, 4), libraries.HuggingFace, libraries.HUGGING_FACE,
    ),
    "many queries": with_factors(output="1 if query.shape[1] <= 200 else 2"),
    "more levels than two": with_factors(output="2 if self.n_levels > 2 else 1"),
}  # fmt: skip
CONSTRUCTED = {
    "norm": (Normed, {"norm": True}), "gate": (Gated, {"gated": True}), "dropout": (DropsWeights, {"dropout": 0.3}),
    "batches first": (IgnoresOrder, {"batch_first": False}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize("name", CONSTANTS)
def test_a_number_in_the_code_counts(name):
    """With other levels, heads, points and width than those of a small example."""
    kind = CONSTANTS[name]
    for levels in (2, 3):
        module = build(kind, num_levels=levels, n_levels=levels)
        sizes = [*SIZES, (2, 2)][: module.sides[1]]
        queries = [201] if name == "many queries" else [state[1] for state in STATES]
        check(kind, module, states=[(state[0], q, sizes, state[3]) for state, q in zip(STATES, queries, strict=False)])


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize("name", CONSTRUCTED)
def test_what_another_constructor_argument_makes_counts(name):
    kind, more = CONSTRUCTED[name]
    check(kind, build(kind), build(kind, **more))


class KeepsInverses(libraries.RtDetrV2):
    """RT-DETR v2 and D-FINE keep the inverses of their numbers of points in a buffer."""

    forward = libraries.make_forward(RT_DETR)

    def __init__(self, embed_dim=12, num_heads=3, num_levels=2, num_points=4, offset_scale=0.5):
        super().__init__(embed_dim, num_heads, num_levels, num_points, "default", offset_scale)
        inverses = torch.tensor([1 / n for n in self.num_points_list for _ in range(n)])
        self.register_buffer("num_points_scale", inverses)

    def samples(self, reference, shapes, offsets, logits):
        counts = [n for n in self.num_points_list for _ in range(n)]
        steps = offsets.unflatten(-1, (self.num_heads, -1, 2)) * torch.tensor(counts)[:, None]
        return super().samples(reference, shapes, (steps * self.num_points_scale[:, None]).flatten(2), logits)


def test_the_operator_takes_a_modules_inverses_and_scale():
    module = build(KeepsInverses, num_points=[2, 4])
    changed = build(KeepsInverses, num_points=[2, 4], offset_scale=0.8)
    changed.num_points_scale.copy_(torch.linspace(0.1, 0.9, 6))
    check(KeepsInverses, module, changed)
    with mx_driving.patched(library(KeepsInverses, plain_core)):
        assert operators(changed, **inputs_of(changed, *STATES[0])) == [WITH_LOGITS]


def test_a_module_that_keeps_what_was_tried_calls_the_operator():
    kept = "a float that another form reads", "a whole number, mmcv", "a list", "a whole number of a layer"
    for kind, change in (ATTRIBUTES[name] for name in kept):
        module, changed = build(kind), build(kind)
        change(changed)
        arguments = inputs_of(module, *STATES[0])
        with mx_driving.patched(library(kind, plain_core)):
            assert (operators(module, **arguments), operators(changed, **arguments)) == ([WITH_LOGITS], [BARE])


def test_a_module_with_a_buffer_that_no_form_reads_is_named():
    kind = ATTRIBUTES["a buffer"][0]
    with pytest.warns(UserWarning, match="differs from the operator's by .*; it keeps other tensors: temperature"):
        mx_driving.patch(library(kind, plain_core)).restore()


CORE = """
def core(value, value_spatial_shapes, sampling_locations, attention_weights):
    weights = attention_weights{change}
    return plain_core(value, value_spatial_shapes, sampling_locations, weights) * ({factor})
"""
CORES = {  # change of the weights, factor of the output
    "levels": ("", "2 / len(value_spatial_shapes)"),
    "points": ("", "2 / sampling_locations.shape[4]"),
    "heads": ("", "3 / value.shape[2]"),
    "channels": ("", "4 / value.shape[3]"),
    "batches": ("", "2 / len(value)"),
    "queries": ("", "5 / sampling_locations.shape[1]"),
    "negative weights": (".clamp(0)", "1"),
}


@pytest.mark.filterwarnings("ignore:mx_driving.patch left")
@pytest.mark.parametrize("name", CORES)
def test_a_number_in_the_code_of_a_core_counts(name):
    change, factor = CORES[name]
    module = library(plain_core, source=CORE.format(change=change, factor=factor))
    value, locations, weights = torch.rand(1, KEYS, 2, 8), torch.rand(1, 7, 2, 2, 3, 2), torch.rand(1, 7, 2, 2, 3) - 0.5
    arguments = value.double(), SIZES, locations.double(), weights.double()
    expected = module.core(*arguments)
    with mx_driving.patched(module) as done:
        assert "a_library.core" in done.skipped
        close(module.core(*arguments), expected)


class Sampler(nn.Module):
    """A core that is a layer."""

    def __init__(self, times=1):
        super().__init__()
        self.kept, self.gains = times, [1.0, 1.0]
        self.register_buffer("gain", torch.ones(()))

    def forward(
        self, value, value_spatial_shapes, value_spatial_shapes_list, level_start_index, sampling_locations, attention_weights,
        im2col_step,
    ):  # fmt: skip
        return self.kept * self.gains[0] * plain_core(value, value_spatial_shapes_list, sampling_locations, attention_weights)


@pytest.mark.parametrize("change", [set_to("kept", 2), set_to("gains", [2.0, 1.0])])
def test_a_number_that_a_layer_of_a_core_keeps_counts(change):
    value, locations, weights = torch.rand(1, KEYS, 2, 8), torch.rand(1, 7, 2, 2, 3, 2), torch.rand(1, 7, 2, 2, 3)
    arguments = value.double(), torch.tensor(SIZES), SIZES, torch.tensor([0, 20]), locations.double(), weights.double(), 64
    layers = [Sampler(), Sampler()]
    change(layers[1])
    expected = [layer(*arguments) for layer in layers]
    with mx_driving.patched(library(Sampler)):
        assert [operators(layer, *arguments) for layer in layers] == [[BARE], []]
        for layer, out in zip(layers, expected, strict=True):
            close(layer(*arguments), out)
