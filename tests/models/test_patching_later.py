"""patch: what a layer or its caller does only after the proof is proven again, and what a forward writes is not lost."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from attention_modules import WITH_LOGITS, Paper, build, close, make_forward, operators, patched
from test_patching_proof import PAPERS, Varied, inputs_of, set_to

pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch")
LOG: list[int] = []
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


# how the layer is made otherwise before its first call, what changes then, the next inputs
CASES = {
    "a number": (lambda layer: None, set_to("times", 2.0), SQUARE),
    "a buffer": (lambda layer: None, lambda layer: layer.gain.fill_(2.0), SQUARE),
    "a tensor": (
        lambda layer: setattr(layer, "tensor", torch.ones(())),
        lambda layer: layer.tensor.fill_(2.0),
        SQUARE,
    ),
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
def test_what_changes_after_the_proof(name, recorded):
    prepare, change, following = CASES[name]
    layer = build(Varied)
    with torch.no_grad():
        prepare(layer)
    with patched(Varied) as done:
        for _ in range(2):
            run(layer, SQUARE, recorded)
        assert done.kept == {} or name == "a mask"  # which random numbers show
        with torch.no_grad():
            change(layer)
        found = run(layer, following, recorded)
    close(found, run(layer, following, recorded))


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
    kind, seen = "", []

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
    LOG.clear()
    Writes.seen.clear()
    with patched(Writes) as done, torch.no_grad():
        layer.kind = name
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
