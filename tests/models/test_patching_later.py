"""patch: what a layer or its caller does only after the proof is proven again, and what a forward writes is not lost."""

from __future__ import annotations

import copy
import pickle
import random
import types

import numpy as np
import pytest
import torch
from attention_modules import WITH_LOGITS, Paper, build, close, make_forward, operators, patched
from test_patching_proof import PAPERS, Varied, inputs_of, set_to
from torch import nn

pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch")
LOG, HEARD = [], []
MAPS = [(4, 4), (2, 2)]
SQUARE = inputs_of(sizes=MAPS, hidden=())


def share_a_temperature(layer):
    """Logits of zero, as a fresh layer has them, hide it."""
    layer.change_logits = lambda logits: 3 * logits
    layer.attention_weights.requires_grad_(False)
    for p in layer.attention_weights.parameters():
        p.zero_()


def freeze(layer):
    layer.change_logits = torch.detach
    layer.attention_weights.requires_grad_(False)


def end_in_a_linear_layer(layer):
    layer.after = nn.Linear(16, 16).double()
    layer.after.weight.copy_(torch.eye(16)), layer.after.bias.zero_()


def replace_parameters(layer):
    layer.attention_weights.weight = nn.Parameter(torch.randn(layer.attention_weights.weight.shape).double())


# how the layer is made otherwise before its first call, what changes then, the next inputs
CASES = {
    "a number": (lambda layer: None, set_to("times", 2.0), SQUARE),
    "a buffer": (lambda layer: None, lambda layer: layer.gain.fill_(2.0), SQUARE),
    "a tensor": (
        lambda layer: setattr(layer, "tensor", torch.ones(())),
        lambda layer: layer.tensor.fill_(2.0),
        SQUARE,
    ),
    "an attribute of the class": (lambda layer: None, lambda layer: setattr(Varied, "times", 2.0), SQUARE),
    "a list in place": (lambda layer: None, lambda layer: layer.factors.__setitem__(0, 2.0), SQUARE),
    "a configuration in place": (
        lambda layer: setattr(layer, "config", types.SimpleNamespace(factor=1.0)),
        lambda layer: setattr(layer.config, "factor", 2.0),
        SQUARE,
    ),
    "a hook within": (lambda layer: None, lambda layer: layer.after.register_forward_hook(lambda *a: 2 * a[2]), SQUARE),
    "a parameter within": (end_in_a_linear_layer, lambda layer: layer.after.weight.data.mul_(2.0), SQUARE),
    "zeros that were replaced": (share_a_temperature, replace_parameters, SQUARE),
    "oblong maps": (
        set_to("change_offsets", lambda offsets, shapes: offsets * (shapes[0, 0] / shapes[0, 1])),
        lambda layer: None,
        inputs_of(sizes=[(2, 8), (1, 4)], hidden=()),
    ),
    "a mask": (set_to("change_mask", lambda mask: None), lambda layer: None, inputs_of(sizes=MAPS, hidden=(1, 5))),
    "a parameter that is no longer frozen": (freeze, lambda layer: layer.requires_grad_(True), SQUARE),
    "zeros that were learned": (
        share_a_temperature,
        lambda layer: layer.attention_weights.weight.data.normal_(),
        SQUARE,
    ),
}


def run(layer, inputs, recorded):
    """Return the output and the gradients of all parameters that record them."""
    with torch.set_grad_enabled(recorded):
        out, parameters = layer(*inputs), [p for p in layer.parameters() if p.requires_grad and recorded]
    gradients = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True) if recorded else ()
    return [out, *(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True))]


@pytest.mark.parametrize("recorded", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_what_changes_after_the_proof(name, recorded, monkeypatch):
    monkeypatch.setattr(Varied, "times", 1.0)
    prepare, change, following = CASES[name]
    layer = build(Varied)
    with torch.no_grad():
        prepare(layer)
    with patched(Varied) as done:
        for _ in range(2):
            run(layer, SQUARE, recorded)
        assert done.kept == {} or name == "a mask" or (recorded and name == "a parameter within")  # which random numbers show
        with torch.no_grad():
            change(layer)
        found = run(layer, following, recorded)
    close(found, run(layer, following, recorded))


def test_inputs_of_one_number_hide_nothing():
    layer = build(Varied)
    layer.change_logits = lambda logits: 3 * logits
    with patched(Varied), torch.no_grad():
        layer(*(t * 0 if t.is_floating_point() else t for t in SQUARE))
        found = layer(*SQUARE)
    close(found, layer(*SQUARE))


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random, np.random.rand])
def test_a_layer_that_draws_random_numbers_keeps_its_code(draw):
    layer = build(Varied)
    layer.change = lambda out, query: out + 0 * draw()

    def draw_after():
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        layer(*SQUARE), layer(*SQUARE)
        return draw()

    expected = draw_after()
    with patched(Varied) as done:
        assert draw_after() == expected
        assert "draws other random numbers" in done.kept[f"{Varied.__module__}.Varied"]


class Counting(nn.Module):
    """A layer that counts its calls, in an attribute and in a buffer that is assigned."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.calls = inner, 0
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, x):
        self.calls, self.mean = self.calls + 1, self.mean / 2 + 1
        return self.inner(x)


@pytest.mark.parametrize("recorded", [True, False])
def test_a_layer_within_that_the_operator_calls_counts_each_call_once(recorded):
    layer, counts = build(Paper), []
    layer.value_proj = Counting(layer.value_proj)
    with patched(Paper), torch.set_grad_enabled(recorded):
        for _ in range(3):
            layer(*SQUARE)
            counts.append((layer.value_proj.calls, float(layer.value_proj.mean)))
        assert operators(layer, *SQUARE) == [WITH_LOGITS]
    assert counts == [(1, 1.0), (2, 1.5), (3, 1.75)]


@pytest.mark.parametrize("recorded", [True, False])
def test_parameters_that_are_elsewhere_between_calls(recorded):
    """As offloading has them."""
    layer = build(Paper)
    expected = layer(*SQUARE)
    for part in (layer.value_proj, layer.sampling_offsets):
        real, empty = part.weight, nn.Parameter(part.weight.to("meta"))
        part.weight = empty
        part.register_forward_pre_hook(lambda part, _, real=real: part._parameters.update(weight=real))
        part.register_forward_hook(lambda part, *_, empty=empty: part._parameters.update(weight=empty))
    with patched(Paper), torch.set_grad_enabled(recorded):
        for _ in range(3):
            close(layer(*SQUARE), expected)


def test_replicas_as_data_parallel_makes_them():
    layer = build(Paper)
    expected = layer(*SQUARE)
    calls = []
    layer.value_proj.register_forward_pre_hook(lambda *_: calls.append(1))
    with patched(Paper), torch.no_grad():
        layer(*SQUARE)
        calls.clear()
        for _ in range(20):
            replica = layer._replicate_for_data_parallel()
            replica._modules = {name: copy.copy(part) for name, part in layer._modules.items()}
            close(replica(*SQUARE), expected)
        assert len(calls) == 20  # nothing is compared
        assert operators(replica, *SQUARE) == operators(layer, *SQUARE) == [WITH_LOGITS]


def test_the_older_onnx_exporter_gets_a_layers_own_code(tmp_path):
    layer = build(Paper).float()
    inputs = [t.float() if t.is_floating_point() else t for t in SQUARE[:-1]]
    with patched(Paper), torch.no_grad():
        layer(*inputs)
        torch.onnx.export(layer, tuple(inputs), tmp_path / "layer.onnx", dynamo=False, opset_version=17)


def test_a_caller_may_write_to_references_and_cache_tables():
    layer = build(Paper)
    with torch.inference_mode():
        cached = [t.clone() for t in SQUARE[3:]]
    with patched(Paper):
        for _ in range(2):
            query, reference, value, *_ = (t.clone() for t in SQUARE)
            out = layer(query, reference, value, *cached)
            reference.clamp_(0.2, 0.8)
            out.sum().backward()


def test_a_layer_with_equal_numbers_stays_proven():
    layer = build(Varied)
    with patched(Varied), torch.no_grad():
        layer(*SQUARE)
        layer.gain.fill_(1.0)
        assert operators(layer, *SQUARE) == [WITH_LOGITS]


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, number):
        self.calls.append(number)


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Writes(Varied):
    """`kind` says what it writes."""

    forward = make_forward(PAPERS)
    kind, seen, total = "", [], 0

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.register_buffer("counts", torch.zeros(()))
        self.recorder, self.slots, self.taps = Recorder(), Slots(), 0

    def attend(self, **named):
        if self.kind == "a global list":
            LOG.append(1)
        if self.kind in WRITES:
            WRITES[self.kind][0](self)
        return super().attend(**named)


def count_up(thing, name):
    setattr(thing, name, getattr(thing, name) + 1)


# what a forward does, how often it was done, and what patch says of it
WRITES = {
    "a global list": (lambda layer: None, lambda layer: len(LOG), "LOG"),
    "a list of the class": (lambda layer: layer.seen.append(1), lambda layer: len(layer.seen), "writes seen"),
    "a number of the class": (lambda layer: count_up(Writes, "total"), lambda layer: Writes.total, "writes total"),
    "a callback": (lambda layer: layer.callback(1), lambda layer: len(HEARD), "writes callback"),
    "an attribute": (lambda layer: count_up(layer, "taps"), lambda layer: layer.taps, "writes taps"),
    "an object that is called": (lambda layer: layer.recorder(1), lambda layer: len(layer.recorder.calls), "writes recorder"),
    "an object with slots": (lambda layer: count_up(layer.slots, "count"), lambda layer: layer.slots.count, "writes slots"),
    "a buffer by data": (lambda layer: layer.counts.data.add_(1), lambda layer: int(layer.counts), "writes counts"),
    "a hook": (lambda layer: None, lambda layer: layer.taps, "runs the hooks of after"),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_forward_writes_is_written_once_in_each_call(name):
    layer = build(Writes)
    if name == "a hook":
        layer.after.register_forward_hook(lambda *_: count_up(layer, "taps"))
    LOG.clear(), HEARD.clear(), Writes.seen.clear()
    Writes.total = 0
    with patched(Writes) as done, torch.no_grad():
        layer.kind, layer.callback = name, HEARD.append
        for call in range(1, 4):
            layer(*SQUARE)
            assert WRITES[name][1](layer) == call
        assert WRITES[name][2] in done.kept[f"{__name__}.Writes"]


def test_inference_mode_is_a_situation():
    layer = build(Varied)
    layer.change = lambda out, query: out + (1 if torch.is_inference_mode_enabled() else 0)
    modes = (torch.no_grad, torch.inference_mode, torch.no_grad)

    def run_in(mode):
        with mode():
            return layer(*SQUARE).clone()

    expected = list(map(run_in, modes))
    with patched(Varied):
        for mode, right in zip(modes, expected, strict=True):
            for _ in range(2):
                close(run_in(mode), right)


def test_copies_of_a_patched_layer_are_proven_anew():
    module = build(Paper)
    expected = module(*SQUARE)
    with patched(Paper):
        module(*SQUARE)
        for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            twin.scale = 2.0
            close(twin(*SQUARE), expected)
            assert operators(twin, *SQUARE) == [WITH_LOGITS]
    close(pickle.loads(pickle.dumps(module))(*SQUARE), expected)
