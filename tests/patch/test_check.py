"""patch(check=inputs): what is compared, what is refused, and that the check leaves no trace."""

import collections
import dataclasses
import math

import pytest
import torch
from attention_modules import WITH_LOGITS, Paper, arguments_for, build, library, operators, plain_core
from torch import nn

import mx_driving
from mx_driving._patch import _patch, _replace
from mx_driving._patch._parameters import unwrap

pytestmark = pytest.mark.filterwarnings("ignore:mx_driving.patch left")


@dataclasses.dataclass
class Outputs:
    boxes: torch.Tensor
    extra: list


class Model(nn.Module):
    """An attention, a BatchNorm with buffers, dropout, and outputs of the kind that a test asks for."""

    def __init__(self, kind="tensor"):
        super().__init__()
        self.attention, self.norm, self.dropout, self.kind = build(Paper), nn.BatchNorm1d(26).double(), nn.Dropout(0.5), kind

    def forward(self, query, scale=1.0, **named):
        out = self.dropout(self.norm(self.attention(query, **named))) * scale + 1e-3 * torch.rand(())
        self.norm.num_batches_tracked.add_(1)
        nested = {"list": lambda: [out, {"inner": [out]}], "dataclass": lambda: Outputs(out, [{"more": 2 * out}, "text", None])}
        return nested.get(self.kind, lambda: out)()


def make_inputs():
    named = arguments_for(build(Paper))
    return named.pop("query"), named


def patch(model, check):
    library(Paper, plain_core)
    return mx_driving.patched(model, forms={Paper: "deformable_detr"}, check=check)


@pytest.mark.parametrize("way", ["args and kwargs", "dict", "batch", "alone"])
@pytest.mark.parametrize("kind", ["tensor", "list", "dataclass"])
def test_outputs_that_agree_are_said_and_layers_counted(kind, way):
    model, (query, named) = Model(kind), make_inputs()
    if way == "alone":
        model.attention.forward = lambda query: Paper.forward(model.attention, query, **named)
        check = query
        model.forward = lambda query: Model.forward(model, query)
    else:
        mapping = {"query": query, **named}
        check = {"dict": mapping, "batch": collections.UserDict(mapping)}.get(way, ((query,), named))
    with patch(model, check) as done:
        assert done.checked.startswith("outputs agree within ")
        assert done.checked.endswith("of their largest magnitude; 1 of 1 layers called an operator, 0 ran their own code")
        assert done.layers == ("attention",)
        assert repr(done).splitlines()[-1] == done.checked
        assert "attention called an operator" in repr(done)


@pytest.mark.parametrize("training", [True, False])
def test_a_check_leaves_no_trace(training):
    model, (query, named) = Model().train(training), make_inputs()
    model.norm.eval()
    buffers, modes = {name: b.clone() for name, b in model.named_buffers()}, [m.training for m in model.modules()]
    kept, state = query.clone(), torch.random.get_rng_state()
    with patch(model, ((query,), named)):
        assert torch.equal(torch.random.get_rng_state(), state)
        assert [m.training for m in model.modules()] == modes
        assert all(torch.equal(buffers[name], b) for name, b in model.named_buffers())
        assert torch.equal(query, kept)
        assert all(p.grad is None for p in model.parameters())


def at(index, value):
    def change(out):
        out = out.clone()
        out.view(-1)[index] = value
        return out

    return change


def exchange(out):
    out = out.clone()
    out[:, [3, 9]] = out[:, [9, 3]]
    return out


FAULTS = {  # a fault of a replacement
    **{f"a factor of {factor}": lambda out, factor=factor: factor * out for factor in (1.1, 1.01, 1.001)},
    "one entry": lambda out: at(5, float(out.view(-1)[5]) + 1e-3)(out),
    **{str(value): at(7, value) for value in (math.nan, math.inf, 1e30)},
    "two queries": exchange,
    "another dtype": lambda out: out.float(),
    "another container": lambda out: [out],
    "zeros": torch.zeros_like,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_replacement_that_computes_something_else_is_refused(fault, dtype, monkeypatch):
    """The model then runs its own code again. An exchange of two of 26 queries is no near tie: few queries tie."""
    model, named = build(Paper).to(dtype), arguments_for(build(Paper))
    named = {n: t.to(dtype) if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in named.items()}
    if fault == "another dtype" and dtype == torch.float32:
        pytest.skip("it is float32 already")
    expected = model(**named)
    library(Paper, plain_core)
    done = mx_driving.patch(model, forms={Paper: "deformable_detr"})  # Its trial is over.
    key = _patch._changes[id(unwrap(Paper.forward))].key
    served = _replace.SERVED[key]
    monkeypatch.setitem(_replace.SERVED, key, lambda *args, **kwargs: FAULTS[fault](served(*args, **kwargs)))
    with pytest.raises(ValueError, match=r"^check must give the outputs of the model's own code; got output"):
        mx_driving.patch(model, forms={Paper: "deformable_detr"}, check=named)
    done.restore()
    assert operators(model, **named) == []
    assert torch.equal(model(**named), expected)


def test_sixteen_bits_show_gross_faults_only():
    """The own code rounds locations and weights to 16 bits, and the operator does not. So a factor of 1.01 is not seen."""
    model, named = build(Paper).bfloat16(), arguments_for(build(Paper))
    named = {n: t.bfloat16() if isinstance(t, torch.Tensor) and t.is_floating_point() else t for n, t in named.items()}
    with patch(model, named) as done:
        assert done.layers == ("",)


class Ranking(nn.Module):
    """A two-stage model of 200 queries, two of which change their places in the second run."""

    def __init__(self, tied):
        super().__init__()
        self.attention, self.tied, self.runs = build(Paper), tied, 0

    def forward(self, query, **named):
        self.attention(query, **named)
        self.runs += 1
        order = torch.arange(200)
        order[self.tied] = order[self.tied[:: 1 if self.runs == 1 else -1]]
        return (torch.arange(200.0)[:, None] + torch.zeros(4))[order][None]


def test_neighbours_that_a_near_tie_exchanges_are_reported():
    """Ranks that nearly tie are neighbours. Other queries do not change places by rounding."""
    query, named = make_inputs()
    with patch(Ranking([100, 101]), ((query,), named)) as done:
        assert "but for 2 queries that a near tie exchanges" in done.checked
    with pytest.raises(ValueError, match=r"^check must give the outputs of the model's own code; got output, which differs"):
        mx_driving.patch(Ranking([100, 103]), check=((query,), named))


def test_a_target_that_is_no_model_has_no_check():
    with pytest.raises(TypeError, match=r"^target must be a model if check is given; got a_library$"):
        mx_driving.patch(library(Paper, plain_core), check=())


def test_a_core_that_a_caller_names_is_checked():
    model, (query, named) = Model(), make_inputs()
    with patch(model, ((query,), named)):
        assert operators(model.attention, query, **named) == [WITH_LOGITS]
