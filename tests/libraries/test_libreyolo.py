"""LibreYOLO's slot of kernels, with its package: attention modules call our operator, and give their own numbers."""

from __future__ import annotations

import copy
import importlib
import inspect

import pytest
import test_rt_detr_family as family
import torch

import mx_driving

MODULES = [(model, how) for library, model, how, _ in family.ROWS if library == "libreyolo" and ".gtr." not in model]
MORE = {model: bool(more) for _, model, _, more in family.ROWS}  # points are a list
DTYPES = (torch.float64, torch.bfloat16)


def tried(*what: str):
    """All attention modules that consult the slot, and words for the record."""
    return pytest.mark.parametrize(
        ("library", "model", "how"), [("libreyolo", f"{model}, slot, {words}", how) for words in what for model, how in MODULES]
    )


@pytest.fixture(autouse=True)
def kernels():
    """LibreYOLO's registry, as it is when this test is over."""
    found = importlib.import_module("libreyolo.kernels")
    yield found
    found.unregister("ms_deform_attn", "mx_driving")
    found.clear_cache()


def built(model: str, dtype: torch.dtype) -> torch.nn.Module:
    python, _, kind = model.partition(", ")[0].rpartition(".")
    thing = getattr(importlib.import_module(python), kind)
    torch.manual_seed(0)
    known = {**family.COMMON, "num_points": [4, 4] if MORE[model.partition(", ")[0]] else 4}
    module = thing(**{name: known[name] for name in inspect.signature(thing).parameters if name in known})
    for p in module.parameters():
        p.data = torch.rand_like(p) - 0.5
    return module.to(dtype)


def inputs(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sides = (2, 7, 12), (2, family.KEYS, 12), (2, 7, 1, 4)
    return [torch.rand(s, generator=generator).to(dtype) for s in sides]


def run(module: torch.nn.Module, how: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The output and all gradients."""
    leaves = [t.clone().requires_grad_() for t in given]
    out = module(**family.arguments(list(inspect.signature(module.forward).parameters), how, leaves))
    moving = [*leaves, *(p for p in module.parameters() if p.requires_grad)]
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), moving)]


def counted(module: torch.nn.Module, how: str, given: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
    """What `run` gives, and how often an operator of ours was called."""
    with mx_driving.viz.recording() as looks:
        return run(module, how, given), len(looks)


def error(found: list[torch.Tensor], true: list[torch.Tensor]) -> float:
    """The largest difference, of the largest number in a tensor."""
    return max(float((f.double() - t).abs().max() / t.abs().max().clamp_min(1e-3)) for f, t in zip(found, true, strict=True))


@tried(*(str(dtype).removeprefix("torch.") for dtype in DTYPES))
def test_a_module_with_its_slot(library, model, how):
    """No further from float64 than its own path, but for a factor of two, and a few ulps where that has no rounding at all."""
    dtype = getattr(torch, model.rpartition(", ")[2])
    module, given = built(model, dtype), inputs(dtype)
    own, calls = counted(module, how, given)
    true = run(copy.deepcopy(module).double(), how, [t.double() for t in given])
    assert calls == 0
    mx_driving.kernels.libreyolo.register()
    found, calls = counted(module, how, given)
    assert calls == 1
    assert found[0].dtype == own[0].dtype == dtype
    assert error(found, true) <= 2 * error(own, true) + 16 * torch.finfo(dtype).eps


@pytest.mark.parametrize(("library", "model"), [("libreyolo", "slot, order of kernels")])
def test_ours_comes_first_and_goes(library, model, kernels):
    """Also when LibreYOLO looked for kernels before, and when it is registered twice."""
    before = [name for name, _ in kernels.iter_impls("ms_deform_attn")]
    assert kernels.resolve("ms_deform_attn") is None or before
    for _ in range(2):
        mx_driving.kernels.libreyolo.register()
        assert [name for name, _ in kernels.iter_impls("ms_deform_attn")] == ["mx_driving", *before]
        assert kernels.active()["ms_deform_attn"] == "mx_driving"
    kernels.unregister("ms_deform_attn", "mx_driving")
    assert [name for name, _ in kernels.iter_impls("ms_deform_attn")] == before
