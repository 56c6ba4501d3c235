"""patch: what a layer or its caller does only after the proof is proven again, and what a forward writes is not lost."""

from __future__ import annotations

import pytest
import torch
from attention_modules import PAPER, SIZES, WITH_LOGITS, Paper, build, close, make_forward, operators, patched
from torch import nn

PAPERS = PAPER + ", input_level_start_index, input_padding_mask=None"
pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch")
LOG: list[int] = []


class Recorder:
    def __init__(self):
        self.calls = []

    def __call__(self, number):
        self.calls.append(number)


class Slots:
    __slots__ = ("count",)

    def __init__(self):
        self.count = 0


class Later(Paper):
    """`kind` says what it does otherwise than the library's layer."""

    forward = make_forward(PAPERS)
    kind, table, seen = "", torch.ones(()), []

    def __init__(self, d_model=12, n_levels=2, n_heads=3, n_points=4):
        super().__init__(d_model, n_levels, n_heads, n_points)
        self.register_buffer("gain", torch.ones(()))
        self.register_buffer("counts", torch.zeros(()))
        self.recorder, self.slots = Recorder(), Slots()
        self.tap = nn.Identity()

    def samples(self, reference, shapes, offsets, logits):
        if self.kind == "oblong":
            offsets = offsets * shapes[:, 0].div(shapes[:, 1])[:, None, None]
        if self.kind == "frozen":
            logits = logits.detach()
        return super().samples(reference, shapes, offsets * self.gain * self.table, logits)

    def rows(self, value, mask=None):
        return super().rows(value, None if self.kind == "mask" else mask)

    def attend(self, **named):
        out = self.tap(super().attend(**named))
        if self.kind == "a global list":
            LOG.append(1)
        if self.kind in WRITES:
            WRITES[self.kind][0](self)
        return out + (1 if self.kind == "inference" and torch.is_inference_mode_enabled() else 0)


def inputs_of(sizes=SIZES, hidden=()):
    generator, keys = torch.Generator().manual_seed(1), sum(h * w for h, w in sizes)
    query, reference, value = (torch.rand(s, generator=generator).double() for s in ((2, 9, 16), (2, 9, 2, 2), (2, keys, 16)))
    mask = torch.zeros(2, keys, dtype=torch.bool)
    mask[:, list(hidden)] = True
    starts = torch.tensor([0, sizes[0][0] * sizes[0][1]])
    return [query - 0.5, reference, value - 0.5, torch.tensor(sizes), starts, mask]


def give_table(layer):
    layer.table = torch.ones(())


def unfreeze(layer):
    layer.attention_weights.requires_grad_(True)


SQUARE = inputs_of([(4, 4), (2, 2)])
# what differs, how the layer is made otherwise before its first call, the first inputs, what changes then, the next inputs
CASES = {
    "a buffer": ("", None, SQUARE, lambda layer: layer.gain.fill_(2.0), SQUARE),
    "a tensor": ("", give_table, SQUARE, lambda layer: layer.table.fill_(2.0), SQUARE),
    "oblong": ("oblong", None, SQUARE, None, inputs_of([(2, 8), (1, 4)])),
    "mask": ("mask", None, SQUARE, None, inputs_of([(4, 4), (2, 2)], hidden=(1, 5))),
    "frozen": ("frozen", lambda layer: layer.attention_weights.requires_grad_(False), SQUARE, unfreeze, SQUARE),
    "zeros": ("oblong", lambda layer: nn.init.zeros_(layer.sampling_offsets.weight), SQUARE,
              lambda layer: layer.sampling_offsets.weight.data.normal_(), SQUARE),
}  # fmt: skip


def run(layer, inputs):
    """Return the output and the gradients of all parameters that record them."""
    out, parameters = layer(*inputs), [p for p in layer.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(out.square().sum(), parameters, allow_unused=True)
    return [out, *(torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True))]


@pytest.mark.parametrize("name", CASES)
def test_what_changes_after_the_proof(name):
    kind, make, first, change, following = CASES[name]
    layer = build(Later)
    layer.kind = kind
    if make:
        make(layer)
    with patched(Later):
        for _ in range(2):
            run(layer, first)
        if change:
            change(layer)
        found = run(layer, following)
    close(found, run(layer, following))


def test_a_layer_with_equal_numbers_stays_proven():
    layer = build(Later)
    with patched(Later), torch.no_grad():
        layer(*SQUARE)
        layer.gain.fill_(1.0)
        assert operators(layer, *SQUARE) == [WITH_LOGITS]


# what a forward does, and how often it was done
WRITES = {
    "a global list": (lambda layer: None, lambda layer: len(LOG)),
    "a list of the class": (lambda layer: layer.seen.append(1), lambda layer: len(layer.seen)),
    "an object that is called": (lambda layer: layer.recorder(1), lambda layer: len(layer.recorder.calls)),
    "an object with slots": (
        lambda layer: setattr(layer.slots, "count", layer.slots.count + 1),
        lambda layer: layer.slots.count,
    ),
    "a buffer by data": (lambda layer: layer.counts.data.add_(1), lambda layer: int(layer.counts)),
    "a hook": (lambda layer: None, lambda layer: layer.taps),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_a_forward_writes_is_written_once_in_each_call(name):
    layer = build(Later)
    layer.kind, layer.taps = name, 0
    if name == "a hook":
        layer.tap.register_forward_hook(lambda *_: setattr(layer, "taps", layer.taps + 1))
    LOG.clear()
    Later.seen.clear()
    with patched(Later), torch.no_grad():
        for call in range(1, 4):
            layer(*SQUARE)
            assert WRITES[name][1](layer) == call


def test_inference_mode_is_a_situation():
    layer = build(Later)
    layer.kind = "inference"
    modes = (torch.no_grad, torch.inference_mode, torch.no_grad)

    def run_in(mode):
        with mode():
            return layer(*SQUARE).clone()

    expected = list(map(run_in, modes))
    with patched(Later):
        for mode, right in zip(modes, expected, strict=True):
            for _ in range(2):
                close(run_in(mode), right)
