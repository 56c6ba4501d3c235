"""The operator in LibreYOLO's registry of kernels, without that package: tests/libraries/test_libreyolo.py has it."""

import sys
import types

import cases
import pytest
import torch

import mx_driving


@pytest.fixture
def registry(monkeypatch):
    """LibreYOLO's in short: its own kernel enters at the first look, and what was found is kept under a name of its own."""
    kernels, entries, memory = types.ModuleType("libreyolo.kernels"), [], {}

    def resolve(op):
        if not memory:
            kernels.register(op, None, name="hub")
        return memory.setdefault(op + "|", next((impl for _, impl in entries if impl), None))

    kernels.resolve, kernels.clear_cache = resolve, memory.clear
    kernels.register = lambda op, impl, *, name: entries.insert(0, (name, impl))
    kernels.unregister = lambda op, name: entries.__setitem__(slice(None), [e for e in entries if e[0] != name])
    monkeypatch.setitem(sys.modules, "libreyolo", types.ModuleType("libreyolo"))
    monkeypatch.setitem(sys.modules, "libreyolo.kernels", kernels)
    return entries, memory


def test_ours_is_first_and_once(registry):
    entries, memory = registry
    for _ in range(2):
        mx_driving.kernels.libreyolo.register()
        assert entries[0] == ("mx_driving", mx_driving.kernels.libreyolo.ms_deform_attn)
    assert [name for name, _ in entries].count("mx_driving") == 1
    assert not memory


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_the_slot_is_the_operator(dtype):
    """Shapes are a tensor or pairs. What it does not take is left to LibreYOLO."""
    value, shapes, starts, locations, weights = cases.cast(cases.multi_scale(2, 5, 4, 2, [(3, 4), (2, 2)], 3), dtype)
    serve = mx_driving.kernels.libreyolo.ms_deform_attn
    expected = mx_driving.multi_scale_deformable_attn(value, shapes, starts, locations, weights)
    for given in (shapes, shapes.int(), shapes.tolist()):
        assert torch.equal(serve(value, given, locations, weights), expected)
    assert serve(value, shapes, locations.flatten(3, 4), weights.flatten(3)) is None
    assert serve(*(t.to("meta") for t in (value, shapes, locations, weights))) is None


def test_without_libreyolo(monkeypatch):
    monkeypatch.setitem(sys.modules, "libreyolo", None)
    with pytest.raises(RuntimeError, match=r"register needs a libreyolo with a registry of kernels: pip install"):
        mx_driving.kernels.libreyolo.register()
